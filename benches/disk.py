#!/usr/bin/env python3
"""Disk throughput of the expert reader compared with fio: random direct reads of one expert's size, alternating.

  disk.py --file FILE --expert-io BIN [--rounds 5] [--seconds 2] [--small-pages] > out.csv

FILE is a large file (a shard), BIN the binary of `cargo bench --bench expert_io --no-run`. `packed` reads routes of
eight experts with one read each: at most eight reads are in flight, and fewer at the end of a route. `mlx` uses nine
reads per expert with sixteen in flight. fio keeps its queue depth constant: psync uses one thread per read in flight,
libaio and io_uring use one thread for all. Prints CSV: megabytes per second, and bytes read by the block device per
byte needed.
"""
import argparse
import json
import subprocess

EXPERT = 1769472
PAGES = "/proc/sys/vm/nr_hugepages"


def fio(a, engine, depth):
    command = ["fio", "--name=x", f"--filename={a.file}", "--readonly", "--rw=randread", f"--bs={EXPERT}", "--direct=1"]
    command += ["--thread", "--group_reporting", "--time_based", f"--runtime={a.seconds}", "--norandommap", "--randrepeat=0"]
    command += [] if a.small_pages else ["--mem=mmaphuge"]
    command += ["--output-format=json", f"--ioengine={engine}"]
    command += [f"--numjobs={depth}"] if engine == "psync" else [f"--iodepth={depth}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(text[text.index("{"):])["jobs"][0]["read"]["bw_bytes"] / 1e6


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--file", required=True)
    p.add_argument("--expert-io", required=True)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=int, default=2)
    p.add_argument("--small-pages", action="store_true")
    a = p.parse_args()
    if a.small_pages:
        return measure(a)
    before = open(PAGES).read()
    open(PAGES, "w").write("64")
    try:
        measure(a)
    finally:
        open(PAGES, "w").write(before)


def row(*values):
    print(*values, sep=",", flush=True)


def measure(a):
    row("round", "reader", "depth", "mb_per_s", "disk_per_wanted")
    for turn in range(1, a.rounds + 1):
        for threads in (8, 16):
            row(turn, "fio psync", threads, f"{fio(a, 'psync', threads):.0f}", "")
            command = [a.expert_io, a.file, str(a.seconds), str(threads), "direct"]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
            for line in lines:
                layout, _, threads_used, speed, _, per_wanted, _ = line.split(",")
                row(turn, f"moestro {layout}", threads_used, speed, per_wanted)
            for engine in ("io_uring", "libaio"):
                row(turn, f"fio {engine}", threads, f"{fio(a, engine, threads):.0f}", "")


if __name__ == "__main__":
    main()
