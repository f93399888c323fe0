// C++ for OpenCL, to SPIR-V's target: a compiler that has Metal's address spaces built in, infers them where Metal does, and
// refuses what a GPU cannot do (recursion, function pointers, arrays of a threadgroup outside a kernel). Nothing runs it.
#define FN static inline
#define DEVICE __global
#define CONSTANT __constant const
#define THREAD __private
#define THREADGROUP __local
#define UNROLL _Pragma("unroll")
#define ARGS(T, name) __constant const T& name
#define IN(T, name, slot) __global const T* name
#define OUT(T, name, slot) __global T* name
#define PLACE
#define HERE
#define SHARED(T, name, count) __local T name[count]
#define KERNEL(name, ...) __kernel void name(__VA_ARGS__)
#define tgid ((uint3)((uint)get_group_id(0), (uint)get_group_id(1), (uint)get_group_id(2)))
#define tid ((uint)get_local_id(0))
#define lane ((uint)get_local_id(0) % 32u)
#define sg ((uint)get_local_id(0) / 32u)
#define MASKED(q, mask) float((q) & (mask))
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define SIMD_SUM(x) simd_sum(x)
#define SIMD_MAX(x) simd_max(x)
#define SIMD_MIN(x) simd_min(x)

float simd_sum(float);
float simd_max(float);
uint simd_min(uint);
template <class To, class From> To as_type(From from) { return __builtin_astype(from, To); }

struct HalfTile { uint r; };
struct SumTile { float v; };
#define HALF_TILE HalfTile
#define SUM_TILE SumTile
#define HALF2(x, y) (to_f16(x) | to_f16(y) << 16)
#define TILE_ZERO(sum) tile_zero(sum)
#define TILE_LOAD(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_T(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_FMA(sum, a, b) tile_fma(sum, a, b)
#define TILE_STORE(sum, p, pitch) tile_store(sum, p, pitch)
void tile_zero(THREAD SumTile& sum);
void tile_load(THREAD HalfTile& tile, THREADGROUP const uint* p, uint pitch);
void tile_fma(THREAD SumTile& sum, THREAD const HalfTile& a, THREAD const HalfTile& b);
void tile_store(THREAD const SumTile& sum, THREADGROUP float* p, uint pitch);
