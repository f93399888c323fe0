#!/usr/bin/env bash
# Runs one turn of real coding agents through `moestro launch`: tests/agents/run.sh [BINARY] [AGENT]...
# Installs only the agents: tests/agents/run.sh --install
#
# Each agent gets a home directory, an empty project, and a checkpoint that follows a script (scripted_model.py). The
# model calls the agent's shell tool, which must write proof.txt, and then ends with a sentence. aider has no tools: it
# gets an edit instead. Continue's command line has no launch: it gets a server and the configuration of
# docs/clients.md. The agent claude-search is Claude Code that has to search for its tool among those of an MCP server,
# many_tools.py. The server's log must have no warning and no status outside 2xx. All agents run at the same time. The
# packages are in $AGENTS_CACHE (default target/agents) and are used again.
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
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$scratch"' EXIT

# turn AGENT SCRIPT... -- ARGUMENTS OF THE AGENT: SCRIPT is for scripted_model.py.
turn() {
  local agent=$1 dir=$scratch/$1 script=()
  shift
  while [ "$1" != -- ]; do script+=("$1"); shift; done
  shift
  mkdir -p "$dir/home" "$dir/project"
  python3 "$here/scripted_model.py" "$dir/scripted" "${script[@]}"
  cd "$dir/project"
  local port
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  # Nothing of the caller's environment reaches the agent or the server.
  timeout 600 env -i HOME="$dir/home" PATH="$cache/node_modules/.bin:$cache/aider/bin:$PATH" LANG=C.UTF-8 \
    MOESTRO_LOG_LEVEL=debug MOESTRO_LOG_FORMAT=json \
    "$binary" launch "$agent" --yes --model "$dir/scripted" --port "$port" -- "$@" </dev/null >"$dir/out" 2>"$dir/err"
}

# serve DIR SCRIPT...: starts a server without launch, for a model with this script. Sets $server and $port. The log is
# where launch would write it.
serve() {
  local dir=$1 log=$1/home/.local/state/moestro/launch.log
  shift
  mkdir -p "$(dirname "$log")" "$dir/project"
  python3 "$here/scripted_model.py" "$dir/scripted" "$@"
  mkfifo "$dir/ready"
  env -i HOME="$dir/home" "$binary" serve "$dir/scripted" --port 0 --log-level debug --log-format json >"$dir/ready" 2>"$log" &
  server=$!
  exec 3<"$dir/ready"
  read -r -t 60 port <&3
  port=$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["port"])' "$port")
}

# A turn of Claude Code that sends tools only after it has searched for them, which launch switches off.
search_turn() {
  local dir=$scratch/claude-search server port status=0
  serve "$dir" --search mcp__many__run command
  echo '{"mcpServers": {"many": {"command": "python3", "args": ["'"$here/many_tools.py"'"]}}}' >"$dir/mcp.json"
  cd "$dir/project"
  timeout 600 env -i HOME="$dir/home" PATH="$cache/node_modules/.bin:$PATH" LANG=C.UTF-8 ENABLE_TOOL_SEARCH=true \
    ANTHROPIC_BASE_URL="http://localhost:$port" ANTHROPIC_AUTH_TOKEN=local ANTHROPIC_MODEL=scripted \
    ANTHROPIC_DEFAULT_HAIKU_MODEL=scripted CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
    CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072 claude -p "Write the file" --mcp-config "$dir/mcp.json" \
    --strict-mcp-config --allowedTools ToolSearch mcp__many__run </dev/null >"$dir/out" 2>"$dir/err" || status=$?
  kill "$server"
  wait "$server" || true
  return $status
}

# A turn of Continue's command line, which reads the same configuration as its editor extensions.
continue_turn() {
  local dir=$scratch/continue server port
  serve "$dir" Bash command
  cat >"$dir/config.yaml" <<YAML
name: Local
version: 1.0.0
schema: v1
models:
  - {name: Moestro, provider: openai, apiBase: "http://localhost:$port/v1", apiKey: local, model: scripted}
YAML
  cd "$dir/project"
  local status=0
  timeout 600 env -i HOME="$dir/home" PATH="$cache/node_modules/.bin:$PATH" LANG=C.UTF-8 CONTINUE_TELEMETRY_ENABLED=0 \
    cn -p "Write the file" --config "$dir/config.yaml" --auto </dev/null >"$dir/out" 2>"$dir/err" || status=$?
  kill "$server"
  wait "$server" || true
  return $status
}

# check AGENT TEXT: the turn of the agent is as expected, and its output has the text.
check() {
  local dir=$scratch/$1
  [ "$(cat "$dir/project/proof.txt")" = ran ] || { echo "proof.txt was not written"; return 1; }
  grep -q "$2" "$dir/out" || { echo "the output has no '$2'"; return 1; }
  python3 - "$dir/home/.local/state/moestro/launch.log" <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
answers = [line for line in lines if "status" in line]
generated = [line for line in answers if line["completion_tokens"]]
wrong = [line for line in lines if line["level"] in ("WARN", "ERROR") or not 200 <= line.get("status", 200) < 300]
if wrong or not generated:
    sys.exit(f"{len(generated)} answers; not expected: {wrong}")
PYTHON
}

declare -A running
start() {
  if [ ${#chosen[@]} = 0 ] || [[ " ${chosen[*]} " = *" $1 "* ]]; then
    case $1 in
    continue) continue_turn & ;;
    claude-search) search_turn & ;;
    *) turn "$@" & ;;
    esac
    running[$1]=$!
  fi
}
chosen=("$@")
start claude Bash command description=Test -- -p "Write the file" --allowedTools Bash
start codex exec_command cmd -- exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Write the file"
start opencode bash command description=Test -- run "Write the file"
start qwen run_shell_command command is_background=false description=Test -- --yolo -p "Write the file"
start continue
start claude-search
start aider - command -- --yes-always --no-git --no-check-update --analytics-disable --edit-format whole --message "Write the file"

failed=0
for agent in "${!running[@]}"; do
  text="The script has ended"
  [ "$agent" != aider ] || text="Applied edit to proof.txt"
  if wait "${running[$agent]}" && check "$agent" "$text"; then
    echo "ok      $agent ($SECONDS s)"
  else
    echo "FAILED  $agent"
    tail -n 40 "$scratch/$agent/out" "$scratch/$agent/err" "$scratch/$agent/home/.local/state/moestro/launch.log" || true
    failed=1
  fi
done
exit $failed
