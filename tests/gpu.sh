#!/usr/bin/env bash
# Tests and measures a machine's GPU: doctor, the demo's answers compared with the CPU's (resident, with few slots, long
# prompts, quantized keys and values), and speed. Continues after a failure and prints a summary.
#
#   tests/gpu.sh                          builds the programs and runs them
#   MOESTRO=... KERNELS=... tests/gpu.sh  runs existing programs: moestro, and the test program `kernels`
#   LIKE=35b LAYERS=8 tests/gpu.sh        also writes a checkpoint of this shape to $TMPDIR and measures GPU and CPU:
#                                         resident, after DEEP tokens (default: none), and streaming within each of
#                                         LIMITS
#   SANITIZER=compute-sanitizer tests/gpu.sh  also runs one answer under compute-sanitizer (CUDA)
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${MOESTRO:-}" ] || [ -z "${KERNELS:-}" ]; then
  cargo build --locked --release || exit 2
  MOESTRO=target/release/moestro
  KERNELS=$(cargo test --locked --release --test kernels --no-run --message-format=json |
    grep -o '"executable":"[^"]*/kernels-[^"]*"' | cut -d'"' -f4 | tail -1)
fi
case $(uname) in Darwin) device=metal ;; *) device=cuda ;; esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

summary=()
step() { # name, command...
  local name=$1 begin=$SECONDS status
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  if "$@"; then status=ok; else status="FAILED ($?)"; failed=1; fi
  summary+=("$(printf '%-28s %-12s %4d s' "$name" "$status" $((SECONDS - begin)))")
}
same_answers() {
  local question='Count from 49 to 119 by 10.' one two
  one=$("$MOESTRO" generate --device cpu --prompt "$question" 2>/dev/null) &&
    two=$("$MOESTRO" generate --device "$device" --prompt "$question" 2>/dev/null) &&
    printf '%s\n' "$two" && [ -n "$one" ] && [ "$one" = "$two" ]
}
bench() { "$MOESTRO" bench "$@" --prompt-tokens 512 --gen-tokens 128; }

failed=0
step doctor "$MOESTRO" doctor
step 'doctor, cached kernels' "$MOESTRO" doctor
step 'the demo against the CPU' "$KERNELS" card:: --nocapture --test-threads 1
step 'one answer' same_answers
for where in "$device" cpu; do step "speed, demo, $where" bench --device "$where"; done
if [ -n "${LIKE:-}" ]; then
  model=$scratch/model
  step synth "$MOESTRO" synth --like "$LIKE" --layers "${LAYERS:-8}" --seed 3 "$model"
  for where in "$device" cpu; do
    step "speed, resident, $where" bench "$model" --device "$where" --stream-experts off
    for limit in ${LIMITS:-3GiB}; do
      step "speed, $limit, $where" bench "$model" --device "$where" --stream-experts on --memory-limit "$limit" --cold
    done
  done
  if [ -n "${DEEP:-}" ]; then
    step "speed after $DEEP, $device" "$MOESTRO" bench "$model" --device "$device" --stream-experts off --ctx-size $((DEEP + 512)) \
      --prompt-tokens "$DEEP" --gen-tokens 128 --repeat 1
  fi
fi
if [ -n "${SANITIZER:-}" ]; then
  step sanitizer "$SANITIZER" --error-exitcode 9 "$MOESTRO" generate --device "$device" --prompt 'What is 12+7?'
fi

printf '\n== summary: %s, %s\n' "$(uname -sm)" "$(git rev-parse --short HEAD 2>/dev/null)"
printf '%s\n' "${summary[@]}"
exit "$failed"
