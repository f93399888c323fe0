#!/usr/bin/env bash
# Tests the page in headless Chromium and Firefox with the demo model: tests/page/run.sh BINARY [DIRECTORY [FILTER]]
# Screenshots of failed tests and downloads go to DIRECTORY. FILTER is a part of a test's name, such as markdown::
# PAGE_SLOW names what is slow, to find tests that look too early:
#   database   each transaction takes 300 ms
#   messages   messages between tabs arrive 300 ms late
#   network    each request arrives 300 ms late
#   processor  Chromium has a tenth of its speed
#   load       there are two busy processes per core
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
firefox=$(command -v firefox-esr || command -v firefox)
node=$here/../../target/page/node
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$work"' EXIT
mkdir -p "$node"
if ! cmp -s "$here/package.json" "$node/package.json" || [ ! -d "$node/node_modules" ]; then
  cp "$here/package.json" "$node/package.json"
  (cd "$node" && npm install --no-audit --no-fund --loglevel=error)
fi
# Each script by itself, so that a syntax error has a file and a line.
for script in "$here"/../../src/http/page/*.js; do node --use-strict --check "$script"; done
# Node searches for packages next to the file that imports them.
cp "$here"/*.mjs "$node/"

# Starts a server and prints its address: serve NAME [FLAGS]
serve() {
  mkfifo "$work/$1"
  XDG_CACHE_HOME=$work/cache "$binary" serve --port 0 --memory-limit 512M "${@:2}" >"$work/$1" 2>"$work/$1.log" &
  read -r -t 120 ready <"$work/$1"
  address=http://127.0.0.1:$(node -e 'console.log(JSON.parse(process.argv[1]).port)' "$ready")/
}
binary=$1
if [[ " ${PAGE_SLOW:-} " == *" load "* ]]; then
  for ((process = 0; process < 2 * $(getconf _NPROCESSORS_ONLN); process++)); do
    (while :; do :; done) &
  done
fi
serve open && open=$address
serve keyed --api-key page-test-key && keyed=$address
# Tests in a browser: check NAME BROWSER. The browsers mostly wait, so both run at a time.
check() {
  node "$node/check.mjs" "$2" "$open" "$keyed" page-test-key "$files/$1" "$filter"
}
files=${2:-$work/files} filter=${3:-}
check firefox "$firefox" >"$work/firefox.log" 2>&1 &
in_firefox=$!
status=0
check chromium "$chromium" || status=$?
wait "$in_firefox" || status=$?
printf '\nIn Firefox:\n'
cat "$work/firefox.log"
exit "$status"
