// CUDA (NVRTC): a warp is a simdgroup, a block is a threadgroup. Compile with -fmad=false, as Metal does not contract.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

#define FN static __device__ __forceinline__
#define DEVICE
#define CONSTANT const
#define THREAD
#define THREADGROUP
#define UNROLL _Pragma("unroll")
#define ARGS(T, name) const T name
#define IN(T, name, slot) const T* __restrict__ name
#define OUT(T, name, slot) T* __restrict__ name
#define PLACE
#define HERE
#define SHARED(T, name, count) __shared__ T name[count]
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define tgid blockIdx
#define tid threadIdx.x
#define lane (threadIdx.x % 32u)
#define sg (threadIdx.x / 32u)
// A conversion has an eighth of the rate of an addition: 2^23 + q has q's bits as its last ones, and loses 2^23 exactly.
#define MASKED(q, mask) masked(q, mask)
#define BARRIER() __syncthreads()
#define SIMD_SUM(x) warp_sum(x)
#define SIMD_MAX(x) warp_max(x)
#define SIMD_MIN(x) __reduce_min_sync(0xffffffffu, x)

template <class To, class From> FN To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  union { From from; To to; } bits = {from};
  return bits.to;
}
FN float masked(uint q, uint mask) {
  uint bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(q), "r"(mask), "r"(0x4b000000u));  // q & mask | 2^23
  return __uint_as_float(bits) - 8388608.0f;
}
FN float warp_sum(float x) {
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
FN float warp_max(float x) {
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}
