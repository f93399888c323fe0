"""Replays recorded launches on an NVIDIA GPU and compares the results with those of the host run.

    MOESTRO_RECORD=REC cargo test --release --test kernels -- --skip forward --skip faults
    python benches/gpu/cuda.py CUBINS && python benches/gpu/replay.py CUBINS REC
    compute-sanitizer --tool memcheck python benches/gpu/replay.py CUBINS REC    (and --tool racecheck)

Each binding is an allocation of exactly its bytes, so that memcheck finds an overrun. The tolerance of f32 results is
1e-5 of the largest value, that of 16-bit keys and values one unit. Integers and f16 results must be equal.
"""
import glob
import json
import os
import sys

import numpy as np

from cuda import Gpu


def compare(kernel, index, args, found, expected):
    """The largest difference divided by the largest value; infinity if results that must be equal differ."""
    if found == expected:
        return 0.0
    if kernel == "index_select" or kernel == "router" and index < 4 or kernel == "dequantize" and args[1] != 0:
        return float("inf")
    if kernel == "qk_norm_rope_i16" and index > 4:
        # The words of a scale differ by at most one, too.
        found, expected = (np.frombuffer(b, np.uint16).astype(np.int64) for b in (found, expected))
        return 0.0 if np.abs(found - expected).max() <= 1 else float("inf")
    f, e = np.frombuffer(found, np.uint32), np.frombuffer(expected, np.uint32)
    same = f == e  # bytes that are never written keep their initial NaN
    f, e = f[~same].view(np.float32).astype(np.float64), e.view(np.float32).astype(np.float64)
    worst = np.abs(f - e[~same]).max() / np.nanmax(np.abs(e))
    return float("inf") if np.isnan(worst) else worst


def main(cubins, records, short="0"):
    """`short` makes each output buffer this many bytes too short, which memcheck must report."""
    gpu, worst = Gpu(cubins), {}
    blob = lambda name: open(os.path.join(records, name), "rb").read()
    for path in sorted(glob.glob(records + "/*.json")):
        d = json.load(open(path))
        contents = [blob(b["before"]) if b["before"] else b"\xff" * b["bytes"] for b in d["bindings"]]
        pointers = [gpu.alloc(c[:-int(short) or None] if b["after"] else c) for b, c in zip(d["bindings"], contents)]
        gpu.launch(d["kernel"], d["args"], pointers, d["grid"], d["threads"])
        gpu.wait()
        for index, (b, pointer) in enumerate(zip(d["bindings"], pointers)):
            if b["after"]:
                off = compare(d["kernel"], index, d["args"], gpu.read(pointer, b["bytes"]), blob(b["after"]))
                count, most = worst.get(d["kernel"], (0, 0.0))
                worst[d["kernel"]] = (count + 1, max(most, off))
            gpu.free(pointer)
    print(gpu.name)
    print("kernel,outputs,worst")
    for kernel, (count, off) in sorted(worst.items()):
        print(f"{kernel},{count},{off:.1e}")
    bad = [kernel for kernel, (_, off) in worst.items() if off > 1e-5]
    sys.exit(f"differ: {bad}" if bad else 0)


main(*sys.argv[1:])
