#!/usr/bin/env bash
# Checks a moestro binary with client libraries: tests/sdk/run.sh [BINARY]
# Installs only the libraries: tests/sdk/run.sh --install
#
# Creates two virtual environments and one node_modules in $SDK_CACHE (default target/sdk) and reuses them. Serves the
# demo model on a free port and runs:
#   check.py               chat completions and completions through OpenAI's SDK
#   clients.py             Responses, Messages, LiteLLM, LangChain
#   clients.mjs            OpenAI, Anthropic and Vercel for Node
#   ollama_clients.*       ollama-python, ollama-js and LangChain's ChatOllama, on the port of Ollama's API
#   tool_types.py          the types of tools of both SDKs
#   schemas.py, agents.py  libraries for structured objects and agents
#   openai_document.py     bodies and events against OpenAI's OpenAPI document
#   structured_outputs.py  many answers under many schemas
# Serves the vision-language checkpoint of the tests and runs pictures.py and pictures.mjs. Then schemathesis tests
# /openapi.json, and promtool, if installed, checks the metrics.
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
bash "$here/../venv.sh" "$venv" "$here/requirements.txt"
bash "$here/../venv.sh" "$objects" "$here/objects.txt"
if ! cmp -s "$here/package.json" "$cache/node/package.json" || [ ! -d "$cache/node/node_modules" ]; then
  cp "$here/package.json" "$cache/node/package.json"
  (cd "$cache/node" && npm install --no-audit --no-fund --loglevel=error)
fi
[ "$binary" != --install ] || exit 0
# Node resolves packages relative to the importing file.
cp "$here/clients.mjs" "$here/ollama_clients.mjs" "$here/pictures.mjs" "$cache/node/"

mkfifo "$scratch/ready"
# Serves a model, or the demo, and sets `port`.
serve() {
  "$binary" serve "$@" --port 0 >"$scratch/ready" 2>"$scratch/log" &
  server=$!
  # The first line on stdout has the port, unless the server exits early.
  if ! read -r -t 120 ready <"$scratch/ready" || [[ $ready != *'"event":"ready"'* ]]; then
    cat "$scratch/log" >&2
    echo "the server did not start" >&2
    exit 1
  fi
  port=$("$venv/bin/python" -c 'import json, sys; print(json.loads(sys.argv[1])["port"])' "$ready")
}

serve "$here/../fixtures/vision/mlx_4bit" --thinking off
for client in "$venv/bin/python $here/pictures.py" "node $cache/node/pictures.mjs"; do
  if ! $client "http://127.0.0.1:$port/v1"; then
    tail -n 40 "$scratch/log" >&2
    exit 1
  fi
done
kill "$server"
wait "$server" || true

serve --ollama-port 0
ollama=$(sed -n "s|.*Ollama's API is at http://127.0.0.1:\([0-9]*\).*|\1|p" "$scratch/log")
for client in "$venv/bin/python $here/check.py" "$venv/bin/python $here/clients.py" "$venv/bin/python $here/tool_types.py" \
  "node $cache/node/clients.mjs" \
  "$objects/bin/python $here/schemas.py" "$objects/bin/python $here/agents.py" "$objects/bin/python $here/openai_document.py" \
  "$objects/bin/python $here/structured_outputs.py"; do
  if ! $client "http://127.0.0.1:$port/v1"; then
    tail -n 40 "$scratch/log" >&2
    exit 1
  fi
done

for client in "$venv/bin/python $here/ollama_clients.py" "node $cache/node/ollama_clients.mjs"; do
  if ! $client "http://127.0.0.1:$ollama"; then
    tail -n 40 "$scratch/log" >&2
    exit 1
  fi
done

# Sends requests generated from /openapi.json. The server checks more than the document states, so refusing a request
# that the document allows is no violation. The timeout is long, because a request may wait for a long answer before it.
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
