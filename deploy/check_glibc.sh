#!/usr/bin/env bash
# Fails if a program needs a newer glibc: check_glibc.sh PROGRAM VERSION
set -euo pipefail
newest=$(objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
[ "$(printf '%s\n' "$newest" "GLIBC_$2" | sort -V | tail -1)" = "GLIBC_$2" ] || {
  echo "check_glibc.sh: $1 needs $newest, and $2 is allowed" >&2
  exit 1
}
echo "$1 needs glibc ${newest#GLIBC_}"
