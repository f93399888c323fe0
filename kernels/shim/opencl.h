// The kernel dialect for C++ for OpenCL, compiled to SPIR-V. This compiler has Metal's address spaces built in and
// infers them where Metal does. The compiler rejects what a GPU cannot do: recursion, function pointers, threadgroup
// arrays outside a kernel. The compiled kernels are never executed.
#define FN static inline
#define DEVICE __global
#define CONSTANT __constant const
#define THREAD __private
#define THREADGROUP __local
#define UNROLL _Pragma("unroll")
#define ARGS(T, name) __constant const T& name
#define ARGS_IN_PLACE(T, name) ARGS(T, name)
#define COPY(T, name, value) __constant const T& name = value
#define IN(T, name, slot) __global const T* name
#define OUT(T, name, slot) __global T* name
#define THREAD_IDS_PARAM
#define THREAD_IDS
#define SHARED(T, name, count) __local T name[count]
#define KERNEL(name, ...) __kernel void name(__VA_ARGS__)
#define tgid ((uint3)((uint)get_group_id(0), (uint)get_group_id(1), (uint)get_group_id(2)))
#define tid ((uint)get_local_id(0))
#define lane ((uint)get_local_id(0) % 32u)
#define sg ((uint)get_local_id(0) / 32u)
#define WIDE_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define WIDEST_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define AWAIT() ((void)0)
#define PREFETCH(p, bytes) ((void)(p), (void)(bytes))
#define PREFETCH_LINE(p) ((void)(p))
#define STREAM(p) (*(p))
#define PEEK(p) (*(p))
#define LOAD(p) (*(p))
#define MASKED(q, mask) float((q) & (mask))
#define HALF_TO_FLOAT(bits) f16(bits)
#define FAST_EXP(x) exp(x)
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define SIMD_SUM(x) simd_sum(x)
#define SIMD_MAX(x) simd_max(x)
#define SIMD_MIN(x) simd_min(x)
#define SIMD_XOR(x, mask) simd_shuffle(x, lane ^ (mask))
#define SIMD_LANE(x, from) simd_shuffle(x, from)

float simd_sum(float);
float simd_max(float);
uint simd_min(uint);
float simd_shuffle(float, uint);
template <class To, class From> To as_type(From from) { return __builtin_astype(from, To); }

#include "declared_tiles.h"
