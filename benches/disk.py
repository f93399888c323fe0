#!/usr/bin/env python3
"""What the reader gets of a disk, beside fio: random reads of one expert's size past the page cache, in turn.

  disk.py --file FILE --expert-io BIN [--rounds 5] [--seconds 2] [--small-pages] > out.csv

FILE is a large file (a shard), BIN the binary of `cargo bench --bench expert_io --no-run`. `packed` reads routes of eight
experts, one read each, so that eight reads are in flight at most and none once the last of a route is being waited for;
`mlx` nine pieces each, sixteen in flight. fio keeps its depth all the time: psync with one thread for each read in
flight, libaio and io_uring with one thread for all. One CSV line each: megabytes a second, and bytes read by the block
device for each byte wanted.
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
