// Metal, the mother tongue. In kernels/ an UPPER-CASE word is the shim's; all else is C++14 that Metal also speaks.
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)

#define FN static inline
#define DEVICE device
#define CONSTANT constant
#define THREAD thread
#define THREADGROUP threadgroup
#define UNROLL _Pragma("clang loop unroll(full)")
#define ARGS(T, name) constant T& name [[buffer(0)]]
#define IN(T, name, slot) device const T* name [[buffer(slot)]]
#define OUT(T, name, slot) device T* name [[buffer(slot)]]
// Parameters that tell a function below a kernel its place: f(int a PLACE), called f(a HERE).
#define PLACE , uint3 tgid, uint tid, uint lane, uint sg
#define HERE , tgid, tid, lane, sg
#define SHARED(T, name, count) threadgroup T name[count]
#define KERNEL(name, ...)                                       \
  kernel void name(__VA_ARGS__,                                 \
                   uint3 tgid [[threadgroup_position_in_grid]], \
                   uint tid [[thread_index_in_threadgroup]],    \
                   uint lane [[thread_index_in_simdgroup]],     \
                   uint sg [[simdgroup_index_in_threadgroup]])
#define MASKED(q, mask) float((q) & (mask))
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SIMD_SUM(x) simd_sum(x)
#define SIMD_MAX(x) simd_max(x)
#define SIMD_MIN(x) simd_min(x)
