#!/usr/bin/env bash
# Makes the archive, the Debian package and the wheel of this machine from a compiled program: build_packages.sh PROGRAM OUT
# The wheel needs maturin, in PATH or in target/packaging/bin. It compiles nothing if PROGRAM is target/release/moestro.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1 out=$2
version=$("$program" --version | cut -d' ' -f2)
target=$(rustc -vV | sed -n 's/^host: //p')
rm -rf "$out"
bash deploy/archive.sh "$program" "$version" "$target" "$out"
bash deploy/deb.sh "$out"/*.tar.gz "$version" "$(dpkg --print-architecture)" "$out"
PATH=$PATH:$PWD/target/packaging/bin maturin build --quiet --release --locked --compatibility linux --out "$out"
