#!/usr/bin/env bash
# Runs the demo behind nginx, Caddy and HAProxy with the files of deploy/.
# tests/proxies/run.sh BINARY [nginx|caddy|haproxy]...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache XDG_DATA_HOME=$work/data XDG_CONFIG_HOME=$work/config PATH=$PATH:/usr/sbin
PYTHONPATH="$here/../support" python3 -B "$here/check.py" "$1" "$here/../../deploy" "$work" "${@:2}"
