#!/usr/bin/env bash
# Checks a moestro binary with the libraries of its clients: tests/sdk/run.sh [BINARY]
#
# Makes one virtual environment and one node_modules (in $SDK_CACHE, else target/sdk, and keeps them), serves the demo model on a
# free port, runs check.py (OpenAI's chat completions), clients.py and clients.mjs (the others), and has promtool, if there is
# one, read the metrics.
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

cache=${SDK_CACHE:-$here/../../target/sdk}
venv=${SDK_VENV:-$cache/venv}
mkdir -p "$cache/node"
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
fi
# What is asked for is installed when it changes.
if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
  "$venv/bin/pip" install --quiet -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/requirements.txt"
fi
if ! cmp -s "$here/package.json" "$cache/node/package.json" || [ ! -d "$cache/node/node_modules" ]; then
  cp "$here/package.json" "$cache/node/package.json"
  (cd "$cache/node" && npm install --no-audit --no-fund --loglevel=error)
fi
# Node looks for packages beside the file that names them.
cp "$here/clients.mjs" "$cache/node/"

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

for client in "$venv/bin/python $here/check.py" "$venv/bin/python $here/clients.py" "node $cache/node/clients.mjs"; do
  if ! $client "http://127.0.0.1:$port/v1"; then
    tail -n 40 "$scratch/log" >&2
    exit 1
  fi
done

if command -v promtool >/dev/null; then
  "$venv/bin/python" -c 'import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1]).read())' \
    "http://127.0.0.1:$port/metrics" >"$scratch/metrics"
  findings=$(promtool check metrics <"$scratch/metrics" 2>&1) || { echo "$findings" >&2; exit 1; }
  [ -z "$findings" ] || { echo "$findings" >&2; exit 1; }
  echo "ok      promtool check metrics"
else
  echo "skipped promtool check metrics: promtool is not installed"
fi
