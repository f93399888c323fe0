#!/usr/bin/env python3
"""Decode speed of several engines under a memory limit, from a cold start, alternating.

  versus.py --model DIR --gguf FILE --llama-bench BIN --stream BIN [--caps 2668,4480] [--rounds 3] [--threads 2]
            > out.csv

DIR is an MLX 4-bit checkpoint, FILE a GGUF file with the same codes (Q4_0), --stream the binary of
`cargo bench --bench stream --no-run`. Each run gets a fresh memory cgroup (v1) of CAP megabytes and a page cache
without the file's pages. The disk's read-ahead is set to 128 KB meanwhile: llama.cpp is fastest with it, and Moestro
bypasses the page cache. Every engine decodes 64 random tokens, then 64 more. Needs root. Prints one CSV line for each
phase of each run: megabytes read are those that the disk delivered to the process, peak megabytes those charged to the
cgroup.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time

ROOT = "/sys/fs/cgroup/memory"


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model")
    p.add_argument("--gguf")
    p.add_argument("--llama-bench")
    p.add_argument("--stream")
    p.add_argument("--stream-args", default="")
    p.add_argument("--caps", default="2668,4480")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--disk", default="vda")
    return p.parse_args()


def files(path):
    if os.path.isdir(path):
        return [os.path.join(path, n) for n in sorted(os.listdir(path)) if n.endswith(".safetensors")]
    return [path]


def forget(path):
    """Drops a file's pages from the page cache."""
    for name in files(path):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk_bytes(pid):
    try:
        with open(f"/proc/{pid}/io") as f:
            return int(dict(line.split(": ") for line in f)["read_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def run(command, cap_mb, mark):
    """Runs `command` in a cgroup; returns its output, disk bytes at each line matching `mark` and at the end."""
    group = f"{ROOT}/versus-{os.getpid()}"
    os.mkdir(group)
    with open(f"{group}/memory.limit_in_bytes", "w") as f:
        f.write(str(cap_mb * 1_000_000))

    def join():
        with open(f"{group}/cgroup.procs", "w") as f:
            f.write(str(os.getpid()))

    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=join)
    last = [0]

    def watch():
        while child.poll() is None:
            last[0] = disk_bytes(child.pid) or last[0]
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    lines, marks = [], []
    for line in child.stdout:
        lines.append(line)
        if re.search(mark, line):
            marks.append(disk_bytes(child.pid) or last[0])
    child.wait()
    watcher.join()
    marks.append(last[0])
    peak = int(open(f"{group}/memory.max_usage_in_bytes").read())
    killed = "oom_kill 0" not in open(f"{group}/memory.oom_control").read()
    open(f"{group}/memory.force_empty", "w").write("0")
    for _ in range(100):
        try:
            os.rmdir(group)
            break
        except OSError:
            time.sleep(0.1)
    if child.returncode:
        # If the system does not allow AMX, a llama-bench built with AMX ends like this, without a message, in repacked
        # prefill.
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        sys.stderr.write("".join(lines[-20:]) + f"{command[0]} ended with {how}\n")
    return "".join(lines), marks, peak, killed or child.returncode != 0


def llama(a, cap):
    """llama-bench runs tg64 twice in one process. The second run uses what the first one left in the page cache."""
    command = [a.llama_bench, "-m", a.gguf, "-p", "0", "-n", "64", "-r", "2", "-t", str(a.threads), "--no-warmup"]
    command += ["--progress", "-o", "json", "-lm", "mmap", "--repack", "0"]
    forget(a.gguf)
    text, marks, peak, failed = run(command, cap, r"run \d+/\d+")
    found = re.search(r"^\[\s*\{.*^\]", text, re.S | re.M)
    speeds = json.loads(found.group(0))[0]["samples_ts"] if found else []
    bounds = marks[-3:]
    read = [(bounds[i + 1] - bounds[i]) / 64e6 for i in range(len(bounds) - 1)]
    return list(zip(speeds, read)), peak, failed


def moestro(a, cap):
    command = [a.stream, a.model, "0", "--tokens", "64,64", "--threads", str(a.threads)] + a.stream_args.split()
    forget(a.model)
    text, marks, peak, failed = run(command, cap, r"^MARK")
    found = re.search(r"^RESULT (.*)$", text, re.M)
    phases = json.loads(found.group(1))["phases"] if found else []
    read = [(marks[i + 1] - marks[i]) / 64e6 for i in range(len(marks) - 1)]
    return [(phase["tok_s"], read[i]) for i, phase in enumerate(phases)], peak, failed


def main():
    a = parse()
    engines = [("moestro", moestro)] if a.stream else []
    if a.llama_bench:
        engines.append(("llama.cpp", llama))
    knob = f"/sys/block/{a.disk}/queue/read_ahead_kb"
    before = open(knob).read()
    print("round,cap_mb,engine,phase,tok_s,disk_mb_per_token,peak_mb,failed", flush=True)
    try:
        open(knob, "w").write("128")
        for turn in range(a.rounds):
            for cap in map(int, a.caps.split(",")):
                for name, engine in engines if turn % 2 == 0 else engines[::-1]:
                    phases, peak, failed = engine(a, cap)
                    for index, (speed, read) in enumerate(phases or [(0.0, 0.0)]):
                        row = [turn + 1, cap, name, f"{64 * index + 1}-{64 * index + 64}", f"{speed:.2f}", f"{read:.1f}"]
                        print(*row, round(peak / 1e6), int(failed), sep=",", flush=True)
    finally:
        open(knob, "w").write(before)


if __name__ == "__main__":
    main()
