#!/usr/bin/env python3
"""Speedup of parallel connections in `pull`: python3 benches/pull.py BINARY [ANOTHER BINARY ...]

Pulls a shard of 256 MiB from a local hub that sends 5 MB per second over each connection, alternately with each binary,
three times. Checksums and resuming work as with the real hub.
"""
import hashlib, http.server, json, os, subprocess, sys, tempfile, threading, time

RATE, ROUNDS = 5e6, 3
SHARD = os.urandom(1 << 20) * 256
INDEX = b'{"weight_map": {"a": "model-1.safetensors"}}'
FILES = {"config.json": b"{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": SHARD}
LISTED = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
LISTED[-1]["lfs"] = {"sha256": hashlib.sha256(SHARD).hexdigest()}
LISTING = json.dumps({"sha": "0123456789abcdef0123456789abcdef01234567", "siblings": LISTED}).encode()


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path.startswith("/api/"):
            self.send_response(200)
            self.send_header("content-length", str(len(LISTING)))
            self.end_headers()
            self.wfile.write(LISTING)
            return
        data = FILES[self.path.rsplit("/", 1)[1]]
        first, last = self.headers["range"].removeprefix("bytes=").split("-")
        first, end = int(first), int(last) + 1 if last else len(data)
        self.send_response(206)
        self.send_header("content-range", f"bytes {first}-{end - 1}/{len(data)}")
        self.send_header("content-length", str(end - first))
        self.end_headers()
        begun = time.time()
        for at in range(first, end, 1 << 18):
            self.wfile.write(data[at : min(at + (1 << 18), end)])
            time.sleep(max(0, (at + (1 << 18) - first) / RATE - (time.time() - begun)))


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
for round in range(ROUNDS):
    for binary in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as home:
            address = f"http://127.0.0.1:{server.server_port}"
            begun = time.time()
            subprocess.run([binary, "pull", "org/name"], check=True, capture_output=True,
                           env={"HOME": home, "HF_HOME": home, "HF_ENDPOINT": address})
            seconds = time.time() - begun
            print(f"{round},{os.path.basename(binary)},{seconds:.1f},{len(SHARD) / 1e6 / seconds:.1f}", flush=True)
