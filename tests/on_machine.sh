#!/usr/bin/env bash
# Runs a command as on another machine. Linux only. Conditions about users, mounts and networks need root.
#
#   tests/on_machine.sh CONDITION... -- COMMAND...
#   tests/on_machine.sh user no-home umask -- tests/repeat.sh 1 2
#
#   user        as the user `nobody`, who owns only what is in TMPDIR
#   no-home     without HOME
#   c-locale    with LANG=C
#   umask       with umask 077
#   small-tmp   with TMPDIR on a tmpfs of 64 MiB
#   no-ipv6     without IPv6
#   no-network  with no network but the loopback addresses
#   busy-port   with another program on Moestro's default port
#   gpu         with variables of Moestro that choose a GPU, another port and a key
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
unset=() variables=() before=() last=() as=() namespaces=()
[ $# -gt 0 ] || set -- help
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
  user) as=(setpriv --reuid nobody --regid nogroup --clear-groups --inh-caps=-all) ;;
  no-home) unset+=(-u HOME) variables+=("CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}" "RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}") ;;
  c-locale) unset+=(-u LC_ALL -u LC_CTYPE) variables+=(LANG=C) ;;
  umask) before+=('umask 077') ;;
  small-tmp) namespaces+=(--mount) before+=('mount -t tmpfs -o size=64m,mode=1777 tmpfs "$TMPDIR"') ;;
  no-ipv6) namespaces+=(--net) before+=('ip link set lo up; echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6') ;;
  no-network) namespaces+=(--net) before+=('ip link set lo up') ;;
  # The command must not inherit descriptor 3, which is the first socket of socket activation.
  busy-port) last+=("exec 3< <(exec python3 $(printf %q "$here/support/busy_port.py"))" 'read -r <&3; exec 3<&-') ;;
  gpu) variables+=(MOESTRO_DEVICE=cuda MOESTRO_PORT=1 MOESTRO_API_KEY=another MOESTRO_THREADS=1 MOESTRO_MEMORY_LIMIT=1MiB) ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
  esac
  shift
done
shift
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
chmod 1777 "$TMPDIR"
# The mount and the addresses of the new namespaces are gone when the command ends.
unshare --fork "${namespaces[@]}" env "${unset[@]}" "${variables[@]}" bash -ec "$(printf '%s\n' "${before[@]}" "${last[@]}")
exec \"\$@\"" - "${as[@]}" "$@"
