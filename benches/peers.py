#!/usr/bin/env python3
"""Compares Moestro, llama.cpp and mlx-lm on a model that fits in memory, on the CPU: prefill and decode.

  peers.py --model DIR --bench BIN [--gguf FILE --llama-bench CMD [--llama-decode CMD]] [--mlx PYTHON] [--membw CMD]
           [--prompts 512,4096] [--tokens 64] [--rounds 3] [--threads 2] [--before 'CMD'] > out.csv

DIR is an MLX 4-bit checkpoint, FILE a GGUF file with the same codes (Q4_0), --bench the binary of
`cargo bench --bench model --no-run`, PYTHON a Python that has mlx-lm. --llama-bench is llama.cpp's program, with
optional arguments. --llama-decode is another build of it (for example with AMX), of which only decode is measured.
--membw names a program that prints "GB/s=<number>" for the rate at which all threads together read plain memory. The
engines alternate in each round, so that a slow phase of the machine affects all of them. --before is a prefix of each
command (`nice -n -19`, or a lock on a shared machine). All engines use random tokens. llama-bench decodes from an empty
context, Moestro after the prompt. mlx-lm's CPU backend is slow, so it gets a sixteenth of the tokens.

Prints one CSV line for each figure of each run. Then prints the ratios: Moestro's figure divided by the other engine's
of the same round, as median, minimum and maximum. `share` is the bytes of weights that a token reads, times tokens per
second, divided by the memory bandwidth measured in the same round.
"""
import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys

MLX = """
import sys, time
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
from mlx_lm.models.cache import make_prompt_cache
mx.set_default_device(mx.cpu)
model = load_model(Path(sys.argv[1]))[0]
vocab = model.args.text_config["vocab_size"] if hasattr(model.args, "text_config") else model.args.vocab_size
def run(tokens, cache):
    ids = mx.random.randint(0, vocab, (1, tokens))
    begin = time.perf_counter()
    mx.eval(model(ids, cache=cache)[:, -1])
    return time.perf_counter() - begin
prompt, count = int(sys.argv[2]), int(sys.argv[3])
run(1, make_prompt_cache(model))
cache = make_prompt_cache(model)
print("prefill", prompt / run(prompt, cache))
print("decode", count / sum(run(1, cache) for _ in range(count)))
"""


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--bench", required=True)
    p.add_argument("--gguf")
    p.add_argument("--llama-bench")
    p.add_argument("--llama-decode")
    p.add_argument("--mlx")
    p.add_argument("--membw")
    p.add_argument("--prompts", default="512,4096")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--before", default="")
    return p.parse_args()


def run(a, command):
    done = subprocess.run(shlex.split(a.before) + command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\nended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def moestro(a, prompt):
    """Prefill, decode after it, and the bytes of weights of one token."""
    options = ["--depths", str(prompt), "--tokens", str(a.tokens), "--rounds", "1", "--threads", str(a.threads)]
    lines = [line.split(",") for line in run(a, [a.bench, a.model, *options]).split("\n")]
    figure = lambda *start: float([line for line in lines if line[: len(start)] == list(start)][-1][len(start)])
    return {"prefill": figure("prefill", "0", str(prompt)), "decode": figure("decode", "median", str(prompt))}, figure(
        "weights"
    )


def llama_bench(a, command, prompt):
    command = [*shlex.split(command), "-m", a.gguf, "-p", prompt, "-n", a.tokens, "-r", 1, "-t", a.threads, "-o", "json"]
    tests = json.loads(run(a, [str(word) for word in command]))
    return {"prefill" if test["n_prompt"] else "decode": test["avg_ts"] for test in tests}


def llama(a, prompt):
    return llama_bench(a, a.llama_bench, prompt)


def llama_decode(a, _):
    return llama_bench(a, a.llama_decode, 0)


def mlx(a, prompt):
    text = run(a, [a.mlx, "-c", MLX, a.model, str(prompt // 16), str(a.tokens // 16)])
    return {name: float(rate) for name, rate in (line.split() for line in text.splitlines())}


def memory(a):
    return max(float(found) for found in re.findall(r"GB/s=([\d.]+)", run(a, shlex.split(a.membw))))


def main():
    a = parse()
    ratios = {}
    others = [("llama.cpp", llama, a.llama_bench), ("llama.cpp (b)", llama_decode, a.llama_decode), ("mlx-lm", mlx, a.mlx)]
    others = [(name, engine) for name, engine, given in others if given]

    def show(turn, engine, what, prompt, value):
        print(turn, engine, what, prompt, f"{value:.3g}" if engine == "ratio" else f"{value:.2f}", sep=",", flush=True)

    print("round,engine,what,prompt,value")
    for turn in range(1, a.rounds + 1):
        for prompt in map(int, a.prompts.split(",")):
            bandwidth = memory(a) if a.membw else None
            first, between = (others, []) if turn % 2 == 0 else ([], others)
            found = {name: engine(a, prompt) for name, engine in first}
            ours, weights = moestro(a, prompt)
            found |= {name: engine(a, prompt) for name, engine in between}
            for name, figures in [("moestro", ours), *found.items()]:
                for what, value in figures.items():
                    show(turn, name, f"{what} tok/s", prompt, value)
                    if name != "moestro":
                        ratios.setdefault((f"{what} over {name}", prompt), []).append(ours[what] / value)
            if bandwidth:
                show(turn, "memory", "GB/s", prompt, bandwidth)
                share = ours["decode"] * weights / 1e9 / bandwidth
                ratios.setdefault(("decode share of memory", prompt), []).append(share)
    for (what, prompt), values in ratios.items():
        show("median", "ratio", what, prompt, statistics.median(values))
        show("least", "ratio", what, prompt, min(values))
        show("most", "ratio", what, prompt, max(values))


if __name__ == "__main__":
    main()
