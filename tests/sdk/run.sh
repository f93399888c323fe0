#!/usr/bin/env bash
# Checks a moestro binary with the official OpenAI SDK: tests/sdk/run.sh [BINARY]
#
# Makes a virtual environment (in $SDK_VENV, or a temporary directory), serves the demo model on a free port, runs
# check.py, and has promtool, if there is one, read the metrics.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
binary=${1:-target/release/moestro}
scratch=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$scratch"
}
trap cleanup EXIT

venv=${SDK_VENV:-$scratch/venv}
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
fi
"$venv/bin/python" -c 'import openai' 2>/dev/null || "$venv/bin/pip" install --quiet 'openai>=2'

mkfifo "$scratch/ready"
"$binary" serve --port 0 >"$scratch/ready" 2>"$scratch/log" &
server=$!
# The first line on stdout says where; if the server ends before, there is none.
if ! read -r -t 60 ready <"$scratch/ready"; then
  cat "$scratch/log" >&2
  echo "the server did not come up" >&2
  exit 1
fi
port=$("$venv/bin/python" -c 'import json, sys; print(json.loads(sys.argv[1])["port"])' "$ready")

if ! "$venv/bin/python" "$here/check.py" "http://127.0.0.1:$port/v1"; then
  tail -n 40 "$scratch/log" >&2
  exit 1
fi

if command -v promtool >/dev/null; then
  "$venv/bin/python" -c 'import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1]).read())' \
    "http://127.0.0.1:$port/metrics" >"$scratch/metrics"
  findings=$(promtool check metrics <"$scratch/metrics" 2>&1) || { echo "$findings" >&2; exit 1; }
  [ -z "$findings" ] || { echo "$findings" >&2; exit 1; }
  echo "ok      promtool check metrics"
else
  echo "skipped promtool check metrics: promtool is not installed"
fi
