#!/usr/bin/env python3
"""The first real model through a slow network: python3 tests/first_model.py BINARY [DIRECTORY]

Serves a synthetic 4B through a hub of 100 Mbit/s with 30 ms of latency, pulls it into an empty home, and asks it once. Fails
if both take 6 minutes, or if the shown speed is wrong by more than 20 %. HUB_MBIT and HUB_LATENCY (seconds) change the hub.
The checkpoint is read from DIRECTORY, or is written there. Takes about 5 GB in the directory for temporary files.
"""
import hashlib, http.server, json, os, pathlib, pty, re, select, shutil, subprocess, sys, tempfile, threading, time

MBIT = float(os.environ.get("HUB_MBIT", 100))
LATENCY = float(os.environ.get("HUB_LATENCY", 0.03))
LIMIT = 360
MODEL, COMMIT = "mlx-community/Qwen3.5-4B-MLX-4bit", "0123456789abcdef0123456789abcdef01234567"

program = str(pathlib.Path(sys.argv[1]).resolve())
work = pathlib.Path(tempfile.mkdtemp())
source = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else work / "checkpoint"


def digest(path):
    with open(path, "rb") as file:
        sha = hashlib.sha256()
        while part := file.read(1 << 20):
            sha.update(part)
        return sha.hexdigest()


class Line:
    """A line of fixed speed that all connections share."""

    def __init__(self):
        self.lock, self.free_at = threading.Lock(), 0.0

    def wait(self, count):
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic() - 0.05) + count * 8 / (MBIT * 1e6)
            delay = self.free_at - time.monotonic()
        if delay > 0:
            time.sleep(delay)


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    line, sums, sent, last_sent = Line(), {}, 0, 0.0

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        time.sleep(LATENCY)
        if self.path.startswith(f"/api/models/{MODEL}/"):
            siblings = [{"rfilename": name, "size": size, "blobId": sha[:40], "lfs": {"sha256": sha, "size": size} if name.endswith(".safetensors") else None} for name, (size, sha) in self.sums.items()]
            return self.answer(200, {}, json.dumps({"sha": COMMIT, "siblings": siblings}).encode())
        name = self.path.split("/resolve/")[-1].partition("/")[2]
        if name not in self.sums:
            return self.answer(404, {}, b"")
        size, sha = self.sums[name]
        first, last, status, fields = 0, size - 1, 200, {"ETag": f'"{sha}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            first, last, status = int(match[1]), min(int(match[2] or last), last), 206
            fields["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.answer(status, fields | {"Content-Length": str(last - first + 1)})
        if self.command == "HEAD":
            return
        with open(source / name, "rb") as file:
            file.seek(first)
            left = last - first + 1
            while left:
                part = file.read(min(left, 64 << 10))
                self.line.wait(len(part))
                self.wfile.write(part)
                left -= len(part)
                Hub.sent, Hub.last_sent = Hub.sent + len(part), time.monotonic()

    def answer(self, status, fields, body=None):
        self.send_response(status)
        length = {} if body is None else {"Content-Length": str(len(body))}
        for name, value in (fields | length).items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def handle(self):
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            pass


def on_terminal(command, environment):
    """Runs a command on a terminal. Returns its status, seconds and output, with the time of each part."""
    begin, parts = time.monotonic(), []
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environment)
    while True:
        try:
            part = os.read(terminal, 4096) if select.select([terminal], [], [], 1)[0] else None
        except OSError:
            break
        if part == b"":
            break
        if part:
            parts.append((time.monotonic() - begin, part.decode(errors="replace")))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - begin, parts


def shown_speeds(parts):
    """Time and bytes per second of each speed that a progress line shows."""
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return [(at, float(number) * units[unit]) for at, text in parts for number, unit in re.findall(r"([\d.]+) (B|[KMG]iB)/s", text)]


try:
    if not source.exists():
        subprocess.run([program, "synth", "--like", "4b", str(source)], check=True)
    files = [path for path in source.iterdir() if path.is_file()]
    Hub.sums = {path.name: (path.stat().st_size, digest(path)) for path in files}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = work / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "TERM": "xterm", "MOESTRO_PORT": "0", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    size = sum(size for size, _ in Hub.sums.values())
    begin = time.monotonic()
    status, pulled, parts = on_terminal([program, "pull", MODEL], environment)
    output = "".join(text for _, text in parts)
    assert status == 0, output[-2000:]
    # After the last byte the program only checks what it has.
    transferred = Hub.last_sent - begin
    true = size / transferred
    late = [speed / true for at, speed in shown_speeds(parts) if 5 < at < transferred]
    print(f"moestro pull {MODEL}: {size / 1e9:.2f} GB in {pulled:.0f} s, {Hub.sent / size:.3f} of its bytes were sent; "
          f"{true / 1e6:.1f} MB/s, and from 5 s on {min(late):.2f} to {max(late):.2f} of that is shown", flush=True)
    status, answered, parts = on_terminal([program, "run", MODEL, "--max-tokens", "20", "hello"], environment)
    output = "".join(text for _, text in parts)
    assert status == 0 and output.strip(), output[-2000:]
    print(f"moestro run {MODEL} hello: an answer of 20 tokens after {answered:.0f} s")
    assert pulled + answered < LIMIT, f"{pulled + answered:.0f} s"
    assert 0.8 <= min(late) and max(late) <= 1.2, "the shown speed is wrong"
finally:
    shutil.rmtree(work)
