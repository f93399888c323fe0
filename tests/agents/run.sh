#!/usr/bin/env bash
# Runs real coding agents through `moestro launch`: tests/agents/run.sh [BINARY] [SCENARIO]...
# Installs only the agents: tests/agents/run.sh --install
# Scenarios that take longer: tests/agents/run.sh BINARY --nightly
#
# Each scenario of scenarios.py has a home directory, an empty project, and a checkpoint that follows a script
# (scripted_model.py). Most scenarios have two turns. In the first one, the model calls several tools at once: the agent's
# shell writes two files, and another tool shows an image. Then the server is started again, and the agent resumes the
# conversation for the second turn. aider has no tools: it gets edits instead. The others are Claude Code with a search for
# a tool among those of an MCP server, many_tools.py; with two agents at once; and, at night, with 40 calls, two searches and
# a compaction. At night, Claude Code, Codex, opencode and pi also get outputs that are larger than the context.
#
# The server's log must have no warning and no status outside 2xx, except those that a turn expects. The prompts of all
# requests minus what the server had cached is what it computed. Each turn has a limit, so that a cache that is lost between
# requests, or by the restart, is a failure.
#
# All agents run at the same time. The packages are in $AGENTS_CACHE (default target/agents) and are used again. With
# MOESTRO_KEEP=1, the directories of the scenarios stay.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${AGENTS_CACHE:-$here/../../target/agents}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
if ! cmp -s "$here/package.json" "$cache/package.json" || [ ! -e "$cache/installed" ]; then
  rm -f "$cache/installed"
  cp "$here/package.json" "$cache/package.json"
  (cd "$cache" && npm install --no-audit --no-fund --loglevel=error >/dev/null)
  touch "$cache/installed"
fi
bash "$here/../venv.sh" "$cache/aider" "$here/requirements.txt"
[ "${1:-}" != --install ] || exit 0

binary=$(realpath "${1:-target/release/moestro}")
shift || true
scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; [ -n "${MOESTRO_KEEP:-}" ] && echo "$scratch" || rm -rf "$scratch"' EXIT
python3 -B "$here/run.py" "$binary" "$cache" "$scratch" "$@"
