#!/usr/bin/env bash
# Scrapes the demo with Prometheus and runs every query of deploy/grafana.json and deploy/alerts.yml.
# tests/prometheus/run.sh BINARY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
promtool check rules "$here/../../deploy/alerts.yml"
python3 "$here/check.py" "$1" "$here/../../deploy" "$work"
