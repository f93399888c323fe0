"""A minimal interface to NVIDIA's driver and to NVRTC, to compile, replay and time kernels. Needs no CUDA toolkit."""
import ctypes
import glob
import os
import sys

KERNELS = os.environ.get("KERNELS") or os.path.join(os.path.dirname(__file__), "../../kernels")
FILES = ["attention", "attention_prefill", "block_attention", "delta_net", "embedding", "kv_quant", "linear", "moe", "norm", "router", "sample", "streams"]


def compile(name, out):
    """Compiles kernels/NAME.metal with the CUDA shim to a cubin for sm_90."""
    paths = [p for d in sys.path for p in glob.glob(d + "/nvidia/*/lib/libnvrtc.so.1*")] + ["libnvrtc.so"]
    nvrtc = ctypes.CDLL(os.environ.get("NVRTC") or paths[0])
    read = lambda file: open(os.path.join(KERNELS, file)).read()
    more = {"linear": ["code_tiles", "row_tiles", "short_prompt"], "moe": ["code_tiles", "expert_tiles"], "block_attention": ["block_selection"]}
    files = ["quant", "tiles", name] + more.get(name, [])
    source = read("shim/cuda.h") + "".join(read(file + ".metal") for file in files)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    options = [b"--gpu-architecture=sm_90", b"-fmad=false", b"--std=c++14", b"-lineinfo", b"--maxrregcount=80"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status:
        sys.exit(f"{name}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    with open(os.path.join(out, name + ".cubin"), "wb") as file:
        file.write(cubin.raw)


def file_of(kernel):
    """The file that defines a kernel."""
    files = {"rms_norm": "norm", "gated_rms_norm": "norm", "rows_to_half": "norm", "swiglu": "moe", "split_rows": "linear", "embed": "embedding"}
    files |= {"dequantize": "embedding", "causal_conv": "delta_net"}
    if kernel.endswith(("_q8", "_q4", "_quant")) and not kernel.startswith("block_"):
        return "kv_quant"
    for prefix, file in (("gem", "linear"), ("moe_", "moe"), ("gated_delta", "delta_net"), ("attention_prefill", "attention_prefill"), ("block_", "block_attention"), ("index_", "block_attention"), ("stream_", "streams"), ("ngram_", "streams")):
        if kernel.startswith(prefix):
            return file
    return files.get(kernel, "router" if kernel == "router" else "attention")


class Gpu:
    """The first GPU, its primary context, and the kernels of a folder of cubins."""

    def __init__(self, cubins):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.modules = {}
        for name in FILES:
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), open(os.path.join(cubins, name + ".cubin"), "rb").read())
            self.modules[name] = module
        self.functions = {}

    def call(self, name, *args):
        status = getattr(self.cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            sys.exit(f"{name}: {text.value}")

    def function(self, name):
        if name not in self.functions:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), self.modules[file_of(name)], name.encode())
            self.functions[name] = function
        return self.functions[name]

    def alloc(self, data):
        """Allocates memory with these bytes, or of this size."""
        size = data if isinstance(data, int) else len(data)
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        if not isinstance(data, int) and size:
            self.write(pointer.value, data)
        return pointer.value

    def write(self, pointer, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), bytes(data), ctypes.c_size_t(len(data)))

    def read(self, pointer, size):
        data = ctypes.create_string_buffer(max(size, 1))
        if size:
            self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return data.raw[:size]

    def free(self, pointer):
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def launch(self, kernel, args, pointers, grid, threads, stream=None):
        """Launches a kernel. `args` is the argument struct as words, `pointers` are buffers 1, 2, ..."""
        values = [(ctypes.c_uint32 * len(args))(*args)] + [ctypes.c_uint64(p) for p in pointers]
        table = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values])
        self.call("cuLaunchKernel", self.function(kernel), *grid, threads, 1, 1, 0, stream, table, None)

    def wait(self):
        self.call("cuCtxSynchronize")

    def stream(self):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def event(self):
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def graph(self, launches, streams):
        """Captures `launches` (functions of a stream) in a graph with one branch per stream."""
        head, fork = streams[0], self.event()
        self.call("cuStreamBeginCapture_v2", head, 1)
        self.call("cuEventRecord", fork, head)
        for other in streams[1:]:
            self.call("cuStreamWaitEvent", other, fork, 0)
        for index, launch in enumerate(launches):
            launch(streams[index % len(streams)])
        for other in streams[1:]:
            join = self.event()
            self.call("cuEventRecord", join, other)
            self.call("cuStreamWaitEvent", head, join, 0)
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamEndCapture", head, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        return ready

    def seconds(self, run, stream, repeats=30):
        """The median time of `run(stream)`, measured with events, after three warm-up runs."""
        times, begin, end = [], self.event(), self.event()
        for index in range(repeats + 3):
            self.call("cuEventRecord", begin, stream)
            run(stream)
            self.call("cuEventRecord", end, stream)
            self.call("cuEventSynchronize", end)
            ms = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(ms), begin, end)
            if index >= 3:
                times.append(ms.value / 1e3)
        return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    for name in sys.argv[2:] or FILES:
        compile(name, sys.argv[1])
