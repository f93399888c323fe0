#!/usr/bin/env bash
# Starts an image and checks what it answers: check_image.sh IMAGE. Needs docker, or podman as DOCKER=podman.
set -euo pipefail
docker=${DOCKER:-docker}
id=$($docker run --detach --publish 127.0.0.1::5413 --env MOESTRO_API_KEY=secret "$1")
trap '$docker rm --force "$id" >/dev/null' EXIT
address=$($docker port "$id" 5413) || { $docker logs "$id"; exit 1; }
url=http://$address
for _ in $(seq 120); do curl -fs "$url/health" >/dev/null && break; sleep 1; done
curl -fsS "$url/health" >/dev/null || { $docker logs "$id"; exit 1; }
status() { curl -s -o /dev/null -w '%{http_code}' "$@"; }
body='{"messages": [{"role": "user", "content": "What is 12+7?"}], "temperature": 0}'
ask() { status -H 'content-type: application/json' -d "$body" "$@" "$url/v1/chat/completions"; }
[ "$(ask)" = 401 ] || { echo "the image answers without the key"; exit 1; }
[ "$(ask -H 'authorization: Bearer secret')" = 200 ] || { $docker logs "$id"; exit 1; }
[ "$($docker exec "$id" id -u)" != 0 ] || { echo "the server runs as root"; exit 1; }
echo "the image answers, and only with its key"
