"""Bandwidth of the matrix-vector and expert kernels on an NVIDIA GPU, relative to its copy bandwidth.

    python benches/gpu/cuda.py CUBINS && python benches/gpu/bandwidth.py CUBINS > benches/results/CARD.csv

Every launch has its own weights, and all weights together are many times the L2 cache. A CUDA graph holds all launches.
In one branch each launch waits for the previous one, as layers do. In several branches launches overlap. The bytes are
those of codes, scales, biases, activations and results, counted once each.
"""
import ctypes
import struct
import sys

import numpy as np

from cuda import Gpu

POOL = 1 << 29  # bytes of weights per measurement
random = np.random.default_rng(1)


def words(*values):
    return [struct.unpack("<I", struct.pack("<f", v))[0] if isinstance(v, float) else v for v in values]


def bf16(count):
    values = (random.random(count, np.float32) - 0.5) * 0.01
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def floats(count):
    return (random.random(count, np.float32) - 0.5).tobytes()


class Bench:
    def __init__(self, cubins):
        self.gpu = Gpu(cubins)
        self.streams = [self.gpu.stream() for _ in range(8)]
        self.kept = []

    def keep(self, data):
        self.kept.append(self.gpu.alloc(data))
        return self.kept[-1]

    def clear(self):
        for pointer in self.kept:
            self.gpu.free(pointer)
        self.kept = []

    def copy(self):
        size = 4 << 30
        a, b = self.keep(size), self.keep(size)
        run = lambda stream: self.gpu.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(b), ctypes.c_uint64(a), ctypes.c_size_t(size), stream)
        self.rate = 2 * size / self.gpu.seconds(run, self.streams[0])
        self.clear()
        print(f"copy,,,1,{self.rate / 1e9:.0f},100")

    def report(self, what, shape, launches, bytes_each):
        for branches in (1, 4, 8):
            graph = self.gpu.graph(launches, self.streams[:branches])
            run = lambda stream: self.gpu.call("cuGraphLaunch", graph, stream)
            rate = bytes_each * len(launches) / self.gpu.seconds(run, self.streams[0])
            print(f"{what},{shape},{bytes_each},{branches},{rate / 1e9:.0f},{100 * rate / self.rate:.0f}", flush=True)

    def linear(self, bits, rows, cols, norm=False):
        """Measures one launch with a matrix for each number in `rows`."""
        total = sum(rows)
        sizes = [(r * cols * bits // 8, r * cols // 64 * 2) for r in rows]
        each = sum(c + 2 * s for c, s in sizes) + 4 * (cols + total)
        matrix = lambda r: words(r, bits, 64, 2, 1.0)
        padded = list(rows) + [rows[-1]] * (4 - len(rows))
        split = total <= 4096
        args = words(0, 1, cols, total, len(rows), 0, 0, int(split), 1e-6) + sum(map(matrix, padded), [])
        block = 4 if split else 16
        grid = (1, sum((r + block - 1) // block for r in rows), 1)
        launches = []
        for _ in range(max(8, min(256, POOL // each))):
            x, w, y = self.keep(floats(cols)), self.keep(floats(cols)), self.keep(4 * total)
            parts = []
            for c, s in sizes:
                parts += [self.keep(random.bytes(c)), self.keep(bf16(s // 2)), self.keep(bf16(s // 2))]
            parts += parts[-3:] * (4 - len(rows))
            bound = [x, w, y, x] + parts + [x]
            kernel = "gemv_norm_1" if norm else "gemv_1"
            launches.append(lambda stream, b=bound: self.gpu.launch(kernel, args, b, grid, 128, stream))
        shape = "+".join(map(str, rows)) + f"x{cols}"
        self.report(f"linear {bits}-bit" + (" norm" if norm else ""), shape, launches, each)
        self.clear()

    def experts(self, hidden, inner, k, slots):
        codes, scales = hidden * inner // 2, hidden * inner // 64 * 2
        stride = 3 * (codes + 2 * scales)
        at, sizes = [], [codes, scales, scales] * 3
        for index in range(9):
            at.append(sum(sizes[:index]) // 16)
        slab = self.keep(slots * stride)
        one = b"".join(random.bytes(codes) + bf16(scales // 2) + bf16(scales // 2) for _ in range(3))
        for slot in range(slots):
            self.gpu.write(slab + slot * stride, one)
        table = self.keep(int(slab).to_bytes(8, "little"))  # one segment
        matrix = lambda r: words(r, 4, 64, 2, 1.0)
        args = [0, hidden, inner, k, 1, 0, inner, 256, 0, stride // 16, 31, 1] + at
        args += matrix(inner) + matrix(inner) + matrix(hidden) + matrix(hidden)
        shared = [self.keep(data) for data in (floats(hidden), floats(256), floats(k * inner), floats(k + 1), floats(hidden))]
        x, scores, act, weights, h = shared
        order = random.permutation(slots)
        up, down = [], []
        for first in range(0, slots - k + 1, k):
            chosen = self.keep(order[first:first + k].astype(np.uint32).tobytes())
            out = self.keep(4 * k * inner)
            result = self.keep(floats(hidden))
            bound_up = [x, scores, chosen, out] + [table, x]
            bound_down = [act, weights, chosen, result, x, x, x] + [table, x]
            grid_up, grid_down = (inner // 8, k, 1), (hidden // 16, 1, 1)
            up.append(lambda s, b=bound_up: self.gpu.launch("moe_gate_up", args, b, grid_up, 128, s))
            down.append(lambda s, b=bound_down: self.gpu.launch("moe_down", args, b, grid_down, 32 * (k + 1), s))
        shape = f"{k} of {hidden}x{inner}"
        self.report("moe_gate_up", shape, up, k * 2 * (codes + 2 * scales) + 4 * (hidden + k * inner))
        self.report("moe_down", shape, down, k * (codes + 2 * scales) + 4 * (2 * hidden + k * inner))
        self.clear()


def main(cubins):
    bench = Bench(cubins)
    print(f"# {bench.gpu.name}")
    print("kernel,shape,bytes,branches,GB/s,percent of copy")
    bench.copy()
    for rows, cols in [((2048,), 4096), ((4096,), 4096), ((8192,), 2048), ((12288,), 3072), ((8192, 4096, 32, 32), 2048)]:
        bench.linear(4, rows, cols)
    bench.linear(4, (8192, 4096, 32, 32), 2048, norm=True)
    bench.linear(4, (248320,), 2048)
    bench.linear(8, (4096,), 4096)
    for hidden, inner, k, slots in [(2048, 512, 8, 512), (3072, 1024, 8, 192), (4096, 1024, 10, 150)]:
        bench.experts(hidden, inner, k, slots)
    bench.copy()


main(*sys.argv[1:])
