#!/usr/bin/env bash
# Tests the alerts, scrapes the demo with Prometheus and runs every query of deploy/grafana.json and deploy/alerts.yml.
# tests/prometheus/run.sh BINARY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
deploy=$(cd "$here/../../deploy" && pwd)
promtool check rules "$deploy/alerts.yml"
sed "s|RULES|$deploy/alerts.yml|" "$here/alerts.yml" > "$work/alerts.yml"
promtool test rules "$work/alerts.yml"
PYTHONPATH="$here/../support" python3 -B "$here/check.py" "$1" "$deploy" "$work"
