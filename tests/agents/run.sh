#!/usr/bin/env bash
# Runs two turns of real coding agents through `moestro launch`: tests/agents/run.sh [BINARY] [AGENT]...
# Installs only the agents: tests/agents/run.sh --install
#
# Each agent gets a home directory, an empty project, and a checkpoint that follows a script (scripted_model.py). The
# model calls the agent's shell tool, which must write proof.txt, and then ends with a sentence. aider has no tools: it
# gets an edit instead. The agent claude-search is Claude Code that has to search for its tool among those of an MCP server,
# many_tools.py. The server's log must have no warning and no status outside 2xx.
#
# Then the server is started anew, and the agent resumes the conversation for a second turn. The prompts of all requests
# minus what the server had cached is what it computed. `check` has a limit for each agent and turn, so that a cache that
# is lost between requests, or by the restart, is a failure.
#
# All agents run at the same time. The packages are in $AGENTS_CACHE (default target/agents) and are used again.
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
trap 'kill $(jobs -p) 2>/dev/null || true; [ -n "${MOESTRO_KEEP:-}" ] || rm -rf "$scratch"' EXIT

# turns NAME AGENT SCRIPT... -- ARGUMENTS OF THE AGENT -- ARGUMENTS THAT RESUME: SCRIPT is for scripted_model.py.
turns() {
  local dir=$scratch/$1 agent=$2 script=() first=() port
  shift 2
  while [ "$1" != -- ]; do script+=("$1"); shift; done
  shift
  while [ "$1" != -- ]; do first+=("$1"); shift; done
  shift
  mkdir -p "$dir/home" "$dir/project"
  python3 "$here/scripted_model.py" "$dir/scripted" "${script[@]}"
  port=$(python3 "$here/../support/free_port.py")
  cd "$dir/project"
  launch() {
    # Nothing of the caller's environment reaches the agent or the server.
    timeout 600 env -i HOME="$dir/home" PATH="$cache/node_modules/.bin:$cache/aider/bin:$PATH" LANG=C.UTF-8 \
      MOESTRO_LOG_LEVEL=debug MOESTRO_LOG_FORMAT=json CONTINUE_TELEMETRY_ENABLED=0 COPILOT_OFFLINE=true \
      "$binary" launch "$agent" --yes --model "$dir/scripted" --port "$port" -- "$@" </dev/null >"$dir/out" 2>"$dir/err"
  }
  launch "${first[@]}" || return
  mv "$dir/project/proof.txt" "$dir/first-proof.txt" || return
  mv "$dir/home/.local/state/moestro/launch.log" "$dir/first.log" || return
  launch "$@"
}

# check AGENT TEXT FIRST SECOND: the turns of the agent are as expected, its output has the text, and the server computed at
# most FIRST and SECOND tokens of the prompts. The text for the summary is in $computed.
check() {
  local dir=$scratch/$1
  [ "$(cat "$dir/first-proof.txt" "$dir/project/proof.txt")" = $'ran\nran' ] || { echo "proof.txt was not written"; return 1; }
  grep -q "$2" "$dir/out" || { echo "the output has no '$2'"; return 1; }
  computed=$(python3 - "$dir/first.log" "$3" "$dir/home/.local/state/moestro/launch.log" "$4" <<'PYTHON'
import json, sys
summary = []
for path, limit in zip(sys.argv[1::2], sys.argv[2::2]):
    lines = [json.loads(line) for line in open(path)]
    answers = [line for line in lines if line.get("completion_tokens")]
    wrong = [line for line in lines if line["level"] in ("WARN", "ERROR") or not 200 <= line.get("status", 200) < 300]
    if wrong or not answers:
        sys.exit(f"{len(answers)} answers; not expected: {wrong}")
    computed = [line["prompt_tokens"] - line["cached_tokens"] for line in answers]
    summary.append(f"{sum(computed)} of {sum(line['prompt_tokens'] for line in answers)}")
    if sum(computed) > int(limit):
        sys.exit(f"computed {computed} tokens of the prompts, more than {limit} in total")
print(", resumed ".join(summary))
PYTHON
  )
}

declare -A running
# start NAME AGENT ...: see turns.
start() {
  if [ ${#chosen[@]} = 0 ] || [[ " ${chosen[*]} " = *" $1 "* ]]; then
    turns "$@" &
    running[$1]=$!
  fi
}
chosen=("$@")
start claude claude Bash command description=Test -- -p "Write the file" --allowedTools Bash \
  -- --continue -p "Again" --allowedTools Bash
codex=(--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox)
start codex codex exec_command cmd -- exec "${codex[@]}" "Write the file" -- exec "${codex[@]}" resume --last "Again"
start opencode opencode bash command description=Test -- run "Write the file" -- run --continue "Again"
start qwen qwen run_shell_command command is_background=false description=Test -- --yolo -p "Write the file" \
  -- --continue --yolo -p "Again"
start continue continue Bash command -- -p "Write the file" --auto -- --resume -p "Again" --auto
start copilot copilot bash command description=Test -- -p "Write the file" --allow-all-tools \
  -- --continue -p "Again" --allow-all-tools
start pi pi bash command -- -p "Write the file" -- --continue -p "Again"
echo '{"mcpServers": {"many": {"command": "python3", "args": ["'"$here/many_tools.py"'"]}}}' >"$scratch/mcp.json"
search=(--mcp-config "$scratch/mcp.json" --strict-mcp-config --allowedTools ToolSearch mcp__many__run)
start claude-search claude --search mcp__many__run command -- -p "Write the file" "${search[@]}" \
  -- --continue -p "Again" "${search[@]}"
aider=(--yes-always --no-git --no-check-update --analytics-disable --edit-format whole)
start aider aider - command -- "${aider[@]}" --message "Write the file" \
  -- "${aider[@]}" --restore-chat-history --message "Again"

# At most so many tokens of the prompts may be computed, in the first turn and in the second one. Qwen Code changes its first
# message when it resumes.
declare -A limits=([claude]="24300 300" [claude-search]="25400 300" [codex]="18700 300" [opencode]="16200 300"
  [qwen]="38000 5200" [continue]="3400 300" [copilot]="24800 300" [pi]="2700 300" [aider]="1300 700")
failed=0
for agent in "${!running[@]}"; do
  text="The script has ended"
  [ "$agent" != aider ] || text="Applied edit to proof.txt"
  # shellcheck disable=SC2086 # two numbers
  if wait "${running[$agent]}" && check "$agent" "$text" ${limits[$agent]}; then
    echo "ok      $agent ($SECONDS s): computed $computed tokens"
  else
    echo "FAILED  $agent"
    tail -n 40 "$scratch/$agent/out" "$scratch/$agent/err" "$scratch/$agent/home/.local/state/moestro/launch.log" || true
    failed=1
  fi
done
exit $failed
