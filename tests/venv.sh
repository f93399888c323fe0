#!/usr/bin/env bash
# Creates a virtual environment with packages, unless it already has them: tests/venv.sh DIRECTORY REQUIREMENTS
set -euo pipefail
[ -x "$1/bin/python" ] || python3 -m venv "$1"
if ! cmp -s "$2" "$1/requirements.txt"; then
  # pip takes several times the CPU time of uv, but knows more proxies and indexes.
  "$1/bin/pip" install --quiet --disable-pip-version-check uv
  "$1/bin/uv" pip install --quiet --python "$1/bin/python" -r "$2" ||
    "$1/bin/pip" install --quiet --disable-pip-version-check -r "$2"
  cp "$2" "$1/requirements.txt"
fi
