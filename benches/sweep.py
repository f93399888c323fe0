#!/usr/bin/env python3
"""Memory and decode speed of one model under several memory limits, each from a cold start.

  sweep.py --model DIR --moestro BIN --stream BIN [--percent 0,15,25,35,50,75,100] [--rounds 1] [--threads 2] > out.csv

BIN are the release binary and the binary of `cargo bench --bench stream --no-run`. The limit is the memory that DIR
needs with PERCENT of its experts in memory (0: the lowest accepted limit). It is passed to the bench, which runs in a
memory cgroup (v1) of 10 % more. Decodes 64 random tokens, then 64 more. Prints one CSV line per run: peak_mb is the
peak resident memory, cached_mb the size of the shards in the page cache afterwards. Needs root and fincore.
"""
import argparse
import json
import re
import subprocess

import versus

CONTEXT, CHUNK = 512, 16


def limit(a, percent):
    command = [a.moestro, "info", a.model, "--json", "--memory-limit", "1M", "--ctx-size", str(CONTEXT)]
    text = subprocess.run(command + ["--prefill-chunk", str(CHUNK)], capture_output=True, text=True).stdout
    found = json.loads(text)
    smallest = int(re.search(r"--memory-limit (\d+)M", found["refused"]).group(1)) << 20
    shape = found["shape"]
    more = shape["layers"] * (shape["experts"] * percent / 100 - shape["experts_per_token"])
    # The bench needs slightly more memory than `info` reports, so add 2 MB.
    return smallest + (2 << 20) + max(0, int(more * shape["slot"]))


def cached(path):
    names = versus.files(path)
    text = subprocess.run(["fincore", "-nbo", "RES"] + names, capture_output=True, text=True, check=True).stdout
    return sum(map(int, text.split()))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--moestro", required=True)
    p.add_argument("--stream", required=True)
    p.add_argument("--percent", default="0,15,25,35,50,75,100")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    limits = [limit(a, float(percent)) for percent in a.percent.split(",")]
    print("round,limit_mb,slots,peak_mb,cached_mb,killed,tok_s_1-64,tok_s_65-128,hit_1-64,hit_65-128", flush=True)
    for turn in range(1, a.rounds + 1):
        for most in limits:
            versus.forget(a.model)
            command = [a.stream, a.model, str(most), "--tokens", "64,64", "--threads", str(a.threads), "--io", "direct"]
            text, _, _, failed = versus.run(command, int(most * 1.1 / 1e6) + 1, "^MARK")
            held = cached(a.model)
            result = json.loads(re.search(r"^RESULT (.*)$", text, re.M).group(1))
            first, second = result["phases"]
            hits = [f"{phase['hit'] + phase['foreseen']:.3f}" for phase in (first, second)]
            row = [turn, f"{most / 1e6:.0f}", result["slots"], f"{result['peak_resident'] / 1e6:.0f}", f"{held / 1e6:.1f}"]
            print(*row, int(failed), f"{first['tok_s']:.2f}", f"{second['tok_s']:.2f}", *hits, sep=",", flush=True)


if __name__ == "__main__":
    main()
