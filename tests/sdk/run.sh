#!/usr/bin/env bash
# Checks a moestro binary with the libraries of its clients: tests/sdk/run.sh [BINARY]
# Only installs those libraries: tests/sdk/run.sh --install
#
# Makes two virtual environments and one node_modules (in $SDK_CACHE, else target/sdk, and keeps them), serves the demo model on a
# free port, runs check.py (OpenAI's chat completions), clients.py and clients.mjs (the others), schemas.py and
# agents.py (libraries that ask for objects, and agents), documents.py (answers against OpenAI's document) and forms.py (many
# answers of many forms), lets schemathesis try what /openapi.json describes, and has promtool, if
# there is one, read the metrics.
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
objects=${SDK_OBJECTS_VENV:-$cache/objects}
mkdir -p "$cache/node"
# What is asked for is installed when it changes.
environment() {
  if [ ! -x "$1/bin/python" ]; then
    python3 -m venv "$1"
  fi
  if ! cmp -s "$here/$2" "$1/$2"; then
    "$1/bin/pip" install --quiet -r "$here/$2"
    cp "$here/$2" "$1/$2"
  fi
}
environment "$venv" requirements.txt
environment "$objects" objects.txt
if ! cmp -s "$here/package.json" "$cache/node/package.json" || [ ! -d "$cache/node/node_modules" ]; then
  cp "$here/package.json" "$cache/node/package.json"
  (cd "$cache/node" && npm install --no-audit --no-fund --loglevel=error)
fi
[ "$binary" != --install ] || exit 0
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

for client in "$venv/bin/python $here/check.py" "$venv/bin/python $here/clients.py" "node $cache/node/clients.mjs" \
  "$objects/bin/python $here/schemas.py" "$objects/bin/python $here/agents.py" "$objects/bin/python $here/documents.py" \
  "$objects/bin/python $here/forms.py"; do
  if ! $client "http://127.0.0.1:$port/v1"; then
    tail -n 40 "$scratch/log" >&2
    exit 1
  fi
done

# Requests made from /openapi.json. That document says less of a request than the server checks, so a refusal of one that it
# allows is no violation; everything else that schemathesis looks for is. A request may have to wait for a long answer before it.
if ! "$objects/bin/schemathesis" run "http://127.0.0.1:$port/openapi.json" --max-examples 20 --phases examples,coverage,fuzzing \
  --exclude-checks positive_data_acceptance --request-timeout 60 --seed 1 --no-color >"$scratch/schemathesis" 2>&1; then
  cat "$scratch/schemathesis"
  exit 1
fi
grep -E 'generated' "$scratch/schemathesis" | sed 's/^ */ok      schemathesis: /'

if command -v promtool >/dev/null; then
  "$venv/bin/python" -c 'import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1]).read())' \
    "http://127.0.0.1:$port/metrics" >"$scratch/metrics"
  findings=$(promtool check metrics <"$scratch/metrics" 2>&1) || { echo "$findings" >&2; exit 1; }
  [ -z "$findings" ] || { echo "$findings" >&2; exit 1; }
  echo "ok      promtool check metrics"
else
  echo "skipped promtool check metrics: promtool is not installed"
fi
