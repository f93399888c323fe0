#!/usr/bin/env bash
# Tests the NEON kernels on a machine without Arm, built for aarch64 Linux and run by qemu: the tests of `ops` on a
# processor with `sdot`, and the products on a processor without. Emulation checks bytes, not speed.
#
#   tests/neon.sh            the kernels
#   tests/neon.sh --models   whole models, too: some logits are compared with those of transformers
#
# Needs, but does not install, `rustup target add aarch64-unknown-linux-gnu`, aarch64-linux-gnu-gcc with its C library
# (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross) and qemu-aarch64-static or qemu-aarch64 (qemu-user-static).
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
sysroot=/usr/aarch64-linux-gnu
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
missing=()
[ -n "$qemu" ] || missing+=(qemu-aarch64-static)
command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(aarch64-linux-gnu-gcc)
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || missing+=("rustup target $target")
if [ ${#missing[@]} -gt 0 ]; then
  printf 'neon.sh: missing: %s\n' "${missing[@]}" >&2
  exit 2
fi

case ${1:-} in '' | --models) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;; esac

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
# Only moestro-compute is hot in the tests below. At level 1 the emulated tests take several times as long, and at level 0
# the assembly of gemm-f16 does not compile.
fast_build=(--config profile.release.opt-level=0)
for crate in $(sed -n 's/^\([a-z0-9_-]*\) = { opt-level = 3.*}$/\1/p' Cargo.toml); do
  case $crate in
  moestro-compute) level=2 ;;
  gemm-f16) level=1 ;;
  *) level=0 ;;
  esac
  fast_build+=(--config "profile.release.package.$crate.opt-level=$level")
done
fast_build+=(--config profile.release.package.moestro-compute.codegen-units=16)
# In a separate folder, so that no other cargo waits while this one compiles.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/neon
# Without `.cargo/rustc-for-tests`, which would choose other levels.
export RUSTC_WORKSPACE_WRAPPER=
run() {
  printf '\n== %s: %s (%s s)\n' "$1" "${*:2}" "$SECONDS"
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$qemu -cpu $1 -L $sysroot" \
    cargo test "${fast_build[@]}" --locked --quiet --release --no-default-features --target "$target" "${@:2}"
}

# `max` has sdot, `cortex-a53` does not. A test prints the kernels it found, so that neither is skipped silently. On
# `max`, the tests of `ops` compare all kernels, also those without sdot. Only products use sdot.
run max -p moestro-compute --lib -- ops:: --nocapture | tee >(cat >&2) | grep 'kernels: .*Dotprod' >/dev/null
run cortex-a53 -p moestro-compute --lib -- ops::simd:: ops::linear:: ops::check:: --nocapture | tee >(cat >&2) |
  grep 'kernels: \[Scalar, Neon\]' >/dev/null
[ "${1:-}" != --models ] || run max -p moestro-model --lib -- model::image_tests::
printf '\n%s s\n' "$SECONDS"
