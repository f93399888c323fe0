#!/usr/bin/env bash
# Installs the archive, the Debian package and the wheel in DIR, each in an empty place and without Rust: serves, asks and
# uninstalls. check_packages.sh DIR [UV]. With UV, runs the wheel through `uv tool run`, too.
set -euo pipefail
dir=$(cd "$1" && pwd) uv=${2:-}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
fail() { echo "check_packages.sh: $*" >&2; exit 1; }

# Serves the demo with a fresh home and a path without Rust, and asks it: answers NAME COMMAND...
answers() {
  # The file is new: that of the server before would be read until this one has opened it.
  local name=$1 home=$work/home-$1 ready=$work/ready-$1 begin=$SECONDS
  shift
  mkdir "$home"
  env -i HOME="$home" PATH=/usr/bin:/bin "$@" serve --port 0 --device cpu > "$ready" 2> "$work/log" &
  server=$!
  for _ in $(seq 1200); do
    if [ -s "$ready" ] || ! kill -0 "$server" 2> /dev/null; then break; fi
    sleep 0.1
  done
  local port
  port=$(sed -n 's/.*"port":\([0-9]*\).*/\1/p' "$ready")
  [ -n "$port" ] || { cat "$work/log"; fail "$name does not serve"; }
  local body='{"messages": [{"role": "user", "content": "What is 12+7?"}], "temperature": 0}'
  curl -fsS -H 'content-type: application/json' -d "$body" "http://127.0.0.1:$port/v1/chat/completions" |
    grep -q 19 || fail "$name answers wrongly"
  kill "$server"
  wait "$server" || true
  server=
  echo "$name: installed, served and answered after $((SECONDS - begin)) s"
}

mkdir "$work/archive"
tar -C "$work/archive" --strip-components=1 -xzf "$dir"/*.tar.gz
answers archive "$work/archive/moestro"

# A root with an empty package database. Its programs run on this system's libraries.
root=$work/root
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} && touch "$root/var/lib/dpkg/status"
dpkg_in_root() { dpkg --root="$root" --force-not-root --force-depends --log=/dev/null "$@" >/dev/null; }
dpkg_in_root --install "$dir"/*.deb 2> "$work/log" || { cat "$work/log"; fail "the package is not installed"; }
answers package "$root/usr/bin/moestro"
for page in "$work"/archive/man/*; do
  [ -f "$root/usr/share/man/man${page##*.}/${page##*/}.gz" ] || fail "the package lacks ${page##*/}"
done
dpkg_in_root --purge moestro
[ -z "$(find "$root" -path "$root/var/lib/dpkg" -prune -o -type f -print)" ] || fail "the package leaves files"

python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install --no-index --find-links "$dir" moestro
answers wheel "$work/venv/bin/moestro"
"${pip[@]}" uninstall --yes moestro
[ ! -e "$work/venv/bin/moestro" ] || fail "the wheel leaves its program"

if [ -n "$uv" ]; then
  answers uvx "$uv" tool run --offline --no-index --find-links "$dir" --python /usr/bin/python3 moestro
fi
