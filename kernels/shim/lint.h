// Definitions for a syntax check of the kernels by Clang, with Metal's address spaces. What Apple's compiler would
// reject is an error here, too: a pointer without address space, double, a library call that Metal lacks, a built-in
// used outside a kernel.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __attribute__((ext_vector_type(2))) uint uint2;
typedef __attribute__((ext_vector_type(3))) uint uint3;
typedef __attribute__((ext_vector_type(4))) uint uint4;
typedef __attribute__((ext_vector_type(4))) float float4;

#define FN static inline
#define DEVICE __attribute__((address_space(1)))
#define CONSTANT const __attribute__((address_space(2)))
#define THREAD
#define THREADGROUP __attribute__((address_space(3)))
#define UNROLL
#define ARGS(T, name) CONSTANT T& name
#define ARGS_IN_PLACE(T, name) ARGS(T, name)
#define COPY(T, name, value) CONSTANT T& name = value
#define IN(T, name, slot) DEVICE const T* name
#define OUT(T, name, slot) DEVICE T* name
// Parameters that give a function the kernel's thread ids: f(int a THREAD_IDS_PARAM), called f(a THREAD_IDS).
#define THREAD_IDS_PARAM , uint3 tgid, uint tid, uint lane, uint sg
#define THREAD_IDS , tgid, tid, lane, sg
#define SHARED(T, name, count) static THREADGROUP T name[count]
#define KERNEL(name, ...)                                       \
  void name(__VA_ARGS__, uint3 tgid, uint tid, uint lane, uint sg); \
  void name(__VA_ARGS__, uint3 tgid, uint tid, uint lane, uint sg)
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
#define BARRIER() lint_barrier()
#define SIMD_SUM(x) simd_sum(x)
#define SIMD_MAX(x) simd_max(x)
#define SIMD_MIN(x) simd_min(x)
#define SIMD_XOR(x, mask) simd_shuffle(x, lane ^ (mask))
#define SIMD_LANE(x, from) simd_shuffle(x, from)

void lint_barrier();
float simd_sum(float);
float simd_max(float);
uint simd_min(uint);
float simd_shuffle(float, uint);
template <class To, class From> To as_type(From);
float exp(float);
float log(float);
float sqrt(float);
float fma(float, float, float);
float max(float, float);
float min(float, float);
uint max(uint, uint);
uint min(uint, uint);
#include "declared_tiles.h"
#pragma GCC poison double goto throw try catch new delete dynamic_cast std printf
