#!/usr/bin/env bash
# Makes a Debian package from an archive of archive.sh: deb.sh ARCHIVE VERSION PROCESSOR OUT
# PROCESSOR is Debian's name: amd64 or arm64.
set -euo pipefail
archive=$1 version=$2 processor=$3 out=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/from" "$out"
tar -C "$work/from" --strip-components=1 -xzf "$archive"
from=$work/from root=$work/root
install -D -m 755 "$from/moestro" "$root/usr/bin/moestro"
for page in "$from"/man/*; do
  install -D -m 644 "$page" "$root/usr/share/man/man${page##*.}/${page##*/}"
done
gzip -9n "$root"/usr/share/man/man*/*
install -D -m 644 "$from/completions/moestro.bash" "$root/usr/share/bash-completion/completions/moestro"
install -D -m 644 "$from/completions/moestro.zsh" "$root/usr/share/zsh/vendor-completions/_moestro"
install -D -m 644 "$from/completions/moestro.fish" "$root/usr/share/fish/vendor_completions.d/moestro.fish"
install -D -m 644 "$from/README.md" "$root/usr/share/doc/moestro/README.md"
cat "$from"/LICENSE-* | install -D -m 644 /dev/stdin "$root/usr/share/doc/moestro/copyright"
glibc=$(objdump -T "$from/moestro" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
mkdir "$root/DEBIAN"
cat > "$root/DEBIAN/control" <<CONTROL
Package: moestro
Version: $version
Architecture: $processor
Maintainer: The Moestro authors <authors@moestro.invalid>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: libc6 (>= ${glibc#GLIBC_}), libgcc-s1
Recommends: ca-certificates
Section: utils
Priority: optional
Description: serves mixture-of-experts models that are larger than memory
 The program answers the OpenAI and Anthropic HTTP APIs, and has a web page and
 a chat on the terminal. Experts stay on the SSD and are read as they are used.
CONTROL
# The same files give the same package.
export SOURCE_DATE_EPOCH=0
find "$root" -exec touch --no-dereference --date=@0 {} +
dpkg-deb --root-owner-group -Zgzip --build "$root" "$out/moestro_${version}_$processor.deb" >/dev/null
echo "$out/moestro_${version}_$processor.deb"
