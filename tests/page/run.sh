#!/usr/bin/env bash
# Tests the page in headless Chromium with the demo model: tests/page/run.sh BINARY [DIRECTORY FOR SCREENSHOTS]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
node=$here/../../target/page/node
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir -p "$node"
if ! cmp -s "$here/package.json" "$node/package.json" || [ ! -d "$node/node_modules" ]; then
  cp "$here/package.json" "$node/package.json"
  (cd "$node" && npm install --no-audit --no-fund --loglevel=error)
fi
# Node searches for packages next to the file that imports them.
cp "$here/check.mjs" "$node/"

mkfifo "$work/ready"
XDG_CACHE_HOME=$work/cache "$1" serve --port 0 --memory-limit 512M >"$work/ready" 2>"$work/log" &
read -r -t 60 ready <"$work/ready"
port=$(node -e 'console.log(JSON.parse(process.argv[1]).port)' "$ready")
node "$node/check.mjs" "$chromium" "http://127.0.0.1:$port/" "${2:-$work}"
