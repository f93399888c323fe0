// The kernel dialect for CUDA (NVRTC). A warp is a simdgroup, a block is a threadgroup. Compile with -fmad=false,
// because Metal does not fuse multiplications and additions either.
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
// The compiler copies ARGS to registers. It reads ARGS_IN_PLACE from constant memory whenever they are used, which is
// faster if an array among them has a variable index: registers have no index, so the compiler would compare it with
// every possible one. It also leaves more registers. COPY copies a part of such arguments to registers.
#define ARGS(T, name) const T name
#define ARGS_IN_PLACE(T, name) const __grid_constant__ T name
#define COPY(T, name, value) const T name = value
#define IN(T, name, slot) const T* __restrict__ name
#define OUT(T, name, slot) T* __restrict__ name
#define THREAD_IDS_PARAM
#define THREAD_IDS
#define SHARED(T, name, count) __shared__ T name[count]
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
// Up to 128 registers for each of up to 512 threads, instead of the limit of the file.
#define WIDE_KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(512, 1) name(__VA_ARGS__)
// Up to 168 registers for each of up to 128 threads.
#define WIDEST_KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(128, 3) name(__VA_ARGS__)
#define tgid blockIdx
#define tid threadIdx.x
#define lane (threadIdx.x % 32u)
#define sg (threadIdx.x / 32u)
// In a graph, a launch may begin before the previous launch has ended. AWAIT waits until the previous launch has ended
// and its writes are visible. Then the next launch may begin. So at most two launches run at once, and everything
// written before those two is visible from the start.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AWAIT() asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory")
#else
#define AWAIT() ((void)0)
#endif
#define PREFETCH(p, bytes) prefetch(p, bytes)
#define PREFETCH_LINE(p) prefetch_line(p)
#define STREAM(p) stream(p)
#define PEEK(p) peek(p)
#define LOAD(p) (*(p))
// A GPU converts integers to floats at a lower rate than it adds floats. Instead, the bits of q become the low bits
// of the float 2^23 + q, and subtracting 2^23 is exact.
#define MASKED(q, mask) masked(q, mask)
#define HALF_TO_FLOAT(bits) half_to_float(bits)
#define FAST_EXP(x) exp(x)
#define BARRIER() __syncthreads()
#define SIMD_BARRIER() __syncwarp()
#define IN_REGISTER(x) in_register(x)
#define SIMD_SUM(x) lanes_sum<32>(x)
#define SIMD_MAX(x) lanes_max<32>(x)
#define SIMD_MIN(x) __reduce_min_sync(0xffffffffu, x)
#define SIMD_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define SIMD_LANE(x, from) __shfl_sync(0xffffffffu, x, from)

template <class To, class From> FN To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  union { From from; To to; } bits = {from};
  return bits.to;
}
// Prefetches into the L2 cache, one line per lane.
FN void prefetch(const void* p, uint bytes) {
  for (uint at = lane * 128u; at < bytes; at += 4096u)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const uchar*)p + at));
}
FN void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Returns x. The bits above 16 of the warp's number are 0, but the compiler does not know that, and it does not read the
// number again. So it cannot compute the value again for each use.
FN uint in_register(uint x) {
  uint warp;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  return x | warp >> 16;
}
FN uint2 stream(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
FN uint4 stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
FN uint peek(const uint* p) {
  uint value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
FN float masked(uint q, uint mask) {
  uint bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(q), "r"(mask), "r"(0x4b000000u));  // q & mask | 2^23
  return __uint_as_float(bits) - 8388608.0f;
}
FN float half_to_float(uint bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((ushort)bits));
  return value;
}
// Reduce over LANES lanes that are next to each other.
template <int LANES> FN float lanes_sum(float x) {
  for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
template <int LANES> FN float lanes_max(float x) {
  for (int o = LANES / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

// Tiles on tensor cores (Ampere and later). In a tile of sums (SumTile), lane l holds rows r and r + 8 with r = l / 4,
// and columns c, c + 1, c + 8 and c + 9 with c = 2 (l % 4).
struct HalfTile { uint r[4]; };
struct SumTile { float v[8]; };
#define HALF_TILE HalfTile
#define SUM_TILE SumTile
#define HALF2(x, y) half2_bits(x, y)
#define HALF2_SUB(x, y) half2_sub(x, y)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define E4M3_HALF2(q) e4m3_half2(q)
#endif
#define TILE_ZERO(sum) tile_zero(sum)
#define TILE_LOAD(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_T(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_RIGHT(tile, p, pitch) tile_load_right(tile, p, pitch)
#define TILE_SCALE(sum, by) tile_scale(sum, by)
#define TILE_FMA(sum, a, b) tile_fma(sum, a, b)
// Only rows 0 to 7 are needed, but mma.sync always computes 16 rows.
#define TILE_FMA_TOP(sum, a, b) tile_fma(sum, a, b)
#define TILE_STORE(sum, p, pitch) tile_store(sum, p, pitch)

// One step of a 16x8 product: four sums, four words of the left factor and two of the right factor per lane.
#define QUAD_FMA(c, a0, a1, a2, a3, b0, b1) quad_fma(c, a0, a1, a2, a3, b0, b1)
#define QUAD_MUL(c, a0, a1, a2, a3, b0, b1) quad_mul(c, a0, a1, a2, a3, b0, b1)
#define QUAD_LOAD(a, p, pitch) quad_load(a, p, pitch)
#define ASYNC_COPY(to, from) async_copy(to, from)
#define ASYNC_COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define ASYNC_WAIT(n) async_wait<n>()
#define QUAD_SUM(x) lanes_sum<4>(x)
#define QUAD_MAX(x) lanes_max<4>(x)

FN void async_copy(uint4* to, const uint4* from) {
  const uint at = (uint)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
FN void async_copy(uint* to, const uint* from) {
  const uint at = (uint)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
template <int LEFT> FN void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncwarp();
}
FN void quad_mul(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
FN void quad_fma(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN uint half2_bits(float x, float y) {
  uint bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
  return bits;
}
FN uint e4m3_half2(uint q) {
  uint bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"((ushort)q));
  return bits;
}
FN uint half2_sub(uint x, uint y) {
  uint bits;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(x), "r"(y));
  return bits;
}
FN void tile_zero(SumTile& sum) {
  for (int i = 0; i < 8; i++) sum.v[i] = 0;
}
// Four 8x8 matrices: rows 0 to 7 and 8 to 15 of the first 8 columns, then of the last 8 columns.
FN void quad_load(uint* r, const uint* p, uint pitch) {
  const uint at = (uint)__cvta_generic_to_shared(p + lane % 16u * pitch + lane / 16u * 4u);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
FN void tile_load(HalfTile& tile, const uint* p, uint pitch) { quad_load(tile.r, p, pitch); }
// tile_load with each matrix transposed: rows 0 to 7 of the first and the last 8 columns, then rows 8 to 15.
FN void tile_load_right(HalfTile& tile, const uint* p, uint pitch) {
  const uint at = (uint)__cvta_generic_to_shared(p + (lane % 8u + lane / 16u * 8u) * pitch + lane / 8u % 2u * 4u);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.r[0]), "=r"(tile.r[1]), "=r"(tile.r[2]), "=r"(tile.r[3]) : "r"(at) : "memory");
}
FN void tile_fma(SumTile& sum, const HalfTile& a, const HalfTile& b) {
  for (int i = 0; i < 2; i++)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum.v[4 * i]), "+f"(sum.v[4 * i + 1]), "+f"(sum.v[4 * i + 2]), "+f"(sum.v[4 * i + 3])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[i]), "r"(b.r[i + 2]));
}
FN void tile_scale(SumTile& sum, const float* by) {
  for (uint i = 0; i < 2; i++) {
    const uint row = lane / 4u + i * 8u;
    const float factor = by[row * 8u + row % 8u];
    sum.v[2 * i] *= factor, sum.v[2 * i + 1] *= factor, sum.v[2 * i + 4] *= factor, sum.v[2 * i + 5] *= factor;
  }
}
FN void tile_store(const SumTile& sum, float* p, uint pitch) {
  for (uint i = 0; i < 8; i++) {
    const uint row = lane / 4u + i / 2u % 2u * 8u, column = lane % 4u * 2u + i % 2u + i / 4u * 8u;
    p[row * pitch + column] = sum.v[i];
  }
}
