#!/usr/bin/env bash
# Runs two replicas of the demo and HAProxy with deploy/haproxy.cfg; kills one under load and drains one.
# tests/router/run.sh BINARY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
PYTHONPATH="$here/../support" python3 -B "$here/check.py" "$1" "$here/../../deploy/haproxy.cfg" "$work"
