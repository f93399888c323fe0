// The kernel dialect for Metal. Macros of the shim are UPPER-CASE words, as are constants and template parameters. All
// other code in kernels/ is C++14 that Metal also has.
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
#define ARGS_IN_PLACE(T, name) ARGS(T, name)
#define COPY(T, name, value) constant T& name = value
#define IN(T, name, slot) device const T* name [[buffer(slot)]]
#define OUT(T, name, slot) device T* name [[buffer(slot)]]
// Parameters that give a function the kernel's thread ids: f(int a THREAD_IDS_PARAM), called f(a THREAD_IDS).
#define THREAD_IDS_PARAM , uint3 tgid, uint tid, uint lane, uint sg
#define THREAD_IDS , tgid, tid, lane, sg
#define SHARED(T, name, count) threadgroup T name[count]
#define KERNEL(name, ...)                                       \
  kernel void name(__VA_ARGS__,                                 \
                   uint3 tgid [[threadgroup_position_in_grid]], \
                   uint tid [[thread_index_in_threadgroup]],    \
                   uint lane [[thread_index_in_simdgroup]],     \
                   uint sg [[simdgroup_index_in_threadgroup]])
// On CUDA, AWAIT waits for earlier launches. On Metal, barriers between launches already provide the order.
#define WIDE_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define AWAIT() ((void)0)
#define PREFETCH(p, bytes) ((void)(p), (void)(bytes))
#define PREFETCH_LINE(p) ((void)(p))
#define STREAM(p) (*(p))
#define PEEK(p) (*(p))
#define LOAD(p) (*(p))
#define MASKED(q, mask) float((q) & (mask))
#define HALF_TO_FLOAT(bits) float(as_type<half>(ushort(bits)))
// Safe math makes exp precise. The fast one errs by at most 3 + 2 |x| units in the last place.
#define FAST_EXP(x) fast::exp(x)
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SIMD_SUM(x) simd_sum(x)
#define SIMD_MAX(x) simd_max(x)
#define SIMD_MIN(x) simd_min(x)
#define SIMD_XOR(x, mask) simd_shuffle_xor(x, ushort(mask))
#define SIMD_LANE(x, from) simd_shuffle(x, ushort(from))

#ifndef NO_TILES
// Tiles of four 8x8 matrices. TILE_LOAD_T loads a right factor that threadgroup memory holds transposed, and
// TILE_LOAD_RIGHT loads a right factor that is not transposed.
struct HalfTile { simdgroup_half8x8 m[4]; };
struct SumTile { simdgroup_float8x8 m[4]; };
#define HALF_TILE HalfTile
#define SUM_TILE SumTile
#define HALF2(x, y) as_type<uint>(half2(half(x), half(y)))
#define HALF2_SUB(x, y) as_type<uint>(as_type<half2>(x) - as_type<half2>(y))
#define TILE_ZERO(sum) tile_zero(sum)
#define TILE_LOAD(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_T(tile, p, pitch) tile_load_transposed(tile, p, pitch)
#define TILE_LOAD_RIGHT(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_SCALE(sum, by) tile_scale(sum, by)
#define TILE_FMA(sum, a, b) tile_fma(sum, a, b)
#define TILE_FMA_TOP(sum, a, b) tile_fma_top(sum, a, b)
#define TILE_STORE(sum, p, pitch) tile_store(sum, p, pitch)

FN void tile_zero(thread SumTile& sum) {
  for (int i = 0; i < 4; i++) sum.m[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
}
FN void tile_load(thread HalfTile& tile, threadgroup const uint* p, uint pitch) {
  threadgroup const half* from = (threadgroup const half*)p;
  for (uint i = 0; i < 4; i++) simdgroup_load(tile.m[i], from + i / 2 * 8 * pitch * 2 + i % 2 * 8, pitch * 2);
}
FN void tile_load_transposed(thread HalfTile& tile, threadgroup const uint* p, uint pitch) {
  threadgroup const half* from = (threadgroup const half*)p;
  for (uint i = 0; i < 4; i++)
    simdgroup_load(tile.m[i], from + i % 2 * 8 * pitch * 2 + i / 2 * 8, pitch * 2, ulong2(0, 0), true);
}
FN void tile_fma(thread SumTile& sum, thread const HalfTile& a, thread const HalfTile& b) {
  for (uint k = 0; k < 2; k++)
    for (uint i = 0; i < 4; i++)
      simdgroup_multiply_accumulate(sum.m[i], a.m[i / 2 * 2 + k], b.m[k * 2 + i % 2], sum.m[i]);
}
// tile_fma for the first eight rows only.
FN void tile_fma_top(thread SumTile& sum, thread const HalfTile& a, thread const HalfTile& b) {
  for (uint k = 0; k < 2; k++)
    for (uint i = 0; i < 2; i++) simdgroup_multiply_accumulate(sum.m[i], a.m[k], b.m[k * 2 + i], sum.m[i]);
}
FN void tile_scale(thread SumTile& sum, threadgroup const float* by) {
  for (uint i = 0; i < 4; i++) {
    simdgroup_float8x8 factors, scaled;
    simdgroup_load(factors, by + i / 2 * 64, 8);
    simdgroup_multiply(scaled, factors, sum.m[i]);
    sum.m[i] = scaled;
  }
}
FN void tile_store(thread const SumTile& sum, threadgroup float* p, uint pitch) {
  for (uint i = 0; i < 4; i++) simdgroup_store(sum.m[i], p + i / 2 * 8 * pitch + i % 2 * 8, pitch);
}
#endif
