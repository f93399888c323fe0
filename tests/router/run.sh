#!/usr/bin/env bash
# Two replicas of the demo behind HAProxy with deploy/haproxy.cfg: one is killed under load, one drained. tests/router/run.sh BINARY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
exec python3 "$here/check.py" "$1" "$here/../../deploy/haproxy.cfg" "$work"
