#!/usr/bin/env bash
# Packs a binary with its manual, completions and licences: archive.sh BINARY VERSION TARGET OUT
set -euo pipefail
binary=$1 version=$2 target=$3 out=$4
name=moestro-$version-$target
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dir=$work/$name
mkdir -p "$dir/completions"
cp "$binary" "$dir/moestro"
# With an entry for the root package in the table of profiles, cargo would not strip the binary.
if [[ $target == *-linux-* ]] && readelf --section-headers "$binary" | grep -q '\.symtab'; then
  echo "archive.sh: $binary is not stripped" >&2
  exit 1
fi
if [ "$(wc -c < "$binary")" -gt 35000000 ]; then
  echo "archive.sh: $binary has more than 35 MB" >&2
  exit 1
fi
cp "$root"/LICENSE* "$root/README.md" "$dir"
"$dir/moestro" man "$dir/man"
for shell in bash zsh fish; do "$dir/moestro" completions $shell > "$dir/completions/moestro.$shell"; done
# The same files give the same archive.
tar --version 2>/dev/null | grep -q GNU && steady=(--sort=name --owner=0 --group=0 --mtime=@0) || steady=()
tar ${steady[@]+"${steady[@]}"} -C "$work" -cf - "$name" | gzip -9n > "$out/$name.tar.gz"
echo "$out/$name.tar.gz"
