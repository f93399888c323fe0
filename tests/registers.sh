#!/usr/bin/env bash
# Compiles the kernels as for an NVIDIA GPU, and compares their registers and spills with benches/results/registers.csv:
# tests/registers.sh. Installs NVRTC in target/nvrtc. Takes about a minute after compiling, and needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/venv.sh target/nvrtc tests/nvrtc.txt
library=$(echo target/nvrtc/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.*)
ln -sf "$(basename "$library")" "$(dirname "$library")/libnvrtc.so"
LD_LIBRARY_PATH=$PWD/$(dirname "$library") MOESTRO_REQUIRE_NVRTC=1 cargo test --locked --release --lib registers_
