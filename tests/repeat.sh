#!/usr/bin/env bash
# Runs test programs many times, to find tests that depend on other tests, on the number of threads or on a busy machine.
#
#   tests/repeat.sh N THREADS [PROGRAM...]
#
# Each program runs N times on an idle machine and N times beside one busy process per core. Each run is one process with
# THREADS test threads, as with `cargo test`. A PROGRAM is `lib` (the unit tests of the program), the name of a crate (its
# unit tests), the name of a program in tests/, or the path of a compiled test program. Without PROGRAM, all run. Prints
# which tests failed and how often.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
rounds=$1 threads=$2
shift 2
out=$(mktemp -d)
load=()
stop_load() {
  [ ${#load[@]} = 0 ] || { kill "${load[@]}" && wait "${load[@]}"; } 2>/dev/null || true
  load=()
}
trap 'stop_load; rm -rf "$out"' EXIT

# Lines of the form "NAME PATH", from "Executable unittests src/lib.rs (target/release/deps/moestro_chat-0123)".
programs() {
  cargo test --release --no-run 2>&1 | tee "$out/build" | sed -nE \
    -e 's|^ *Executable unittests src/lib.rs \((.*/moestro-[^/]*)\)$|lib \1|p' \
    -e 's|^ *Executable unittests src/lib.rs \((.*/moestro_([^/-]*)-[^/]*)\)$|\2 \1|p' \
    -e 's|^ *Executable tests/([^/]*)(/main)?\.rs \((.*)\)$|\1 \3|p'
}
names=() paths=()
for program; do
  [[ $program == */* ]] && names+=("$(basename "$program")") paths+=("$program")
done
if [ ${#names[@]} -lt $# ] || [ $# = 0 ]; then
  programs >"$out/programs" || { cat "$out/build" >&2; exit 1; }
  while read -r name path; do
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    names+=("$name") paths+=("$path")
  done <"$out/programs"
  for program; do
    [[ $program == */* || " ${names[*]} " == *" $program "* ]] || { echo "no test program $program" >&2; exit 2; }
  done
fi

runs=0 failed=0
# Runs all programs once: once CONDITION
once() {
  for i in "${!names[@]}"; do
    local status=0 log=$out/log
    # The program's directory is its own, so that a run does not see the files of another one.
    mkdir "$out/tmp"
    TMPDIR=$out/tmp "${paths[$i]}" --test-threads "$threads" >"$log" 2>&1 </dev/null || status=$?
    rm -rf "$out/tmp"
    runs=$((runs + 1))
    [ $status = 0 ] && continue
    failed=$((failed + 1))
    # The list after the last line `failures:`. The output of a program that was killed has none.
    local tests
    tests=$(awk '/^failures:$/ { list = "" } /^    [^ ]+$/ { list = list $1 "\n" } END { printf "%s", list }' "$log")
    [ -n "$tests" ] || tests="(exit status $status)"
    cat "$log"
    while read -r test; do echo "${names[$i]} $test, $1" >>"$out/failures"; done <<<"$tests"
  done
}
for ((round = 1; round <= rounds; round++)); do
  once "idle machine"
  for ((core = 0; core < $(getconf _NPROCESSORS_ONLN); core++)); do
    (while :; do :; done) &
    load+=($!)
  done
  once "busy machine"
  stop_load
done

echo "$runs runs with $threads test threads in $SECONDS s, $failed failed"
[ $failed = 0 ] || { sort "$out/failures" | uniq -c; exit 1; }
