// Declarations of the tile macros for shims that only check the kernels (lint.h, opencl.h).

struct HalfTile { uint r; };
struct SumTile { float v; };
#define HALF_TILE HalfTile
#define SUM_TILE SumTile
#define HALF2(x, y) (to_f16(x) | to_f16(y) << 16)
#define HALF2_SUB(x, y) HALF2(f16((x) & 0xffffu) - f16((y) & 0xffffu), f16((x) >> 16) - f16((y) >> 16))
#define TILE_ZERO(sum) tile_zero(sum)
#define TILE_LOAD(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_T(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_LOAD_RIGHT(tile, p, pitch) tile_load(tile, p, pitch)
#define TILE_SCALE(sum, by) tile_scale(sum, by)
#define TILE_FMA(sum, a, b) tile_fma(sum, a, b)
#define TILE_FMA_TOP(sum, a, b) tile_fma(sum, a, b)
#define TILE_STORE(sum, p, pitch) tile_store(sum, p, pitch)
#define QUAD_FMA(c, a0, a1, a2, a3, b0, b1) quad_fma(c, a0, a1, a2, a3, b0, b1)
#define QUAD_MUL(c, a0, a1, a2, a3, b0, b1) quad_fma(c, a0, a1, a2, a3, b0, b1)
#define QUAD_LOAD(a, p, pitch) quad_load(a, p, pitch)
#define ASYNC_COPY(to, from) (*(to) = *(from))
#define ASYNC_COMMIT() ((void)0)
#define ASYNC_WAIT(n) ((void)0)
#define QUAD_SUM(x) quad_reduce(x)
#define QUAD_MAX(x) quad_reduce(x)
float quad_reduce(float x);
void quad_fma(THREAD float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1);
void quad_load(THREAD uint* a, THREADGROUP const uint* p, uint pitch);
void tile_zero(THREAD SumTile& sum);
void tile_load(THREAD HalfTile& tile, THREADGROUP const uint* p, uint pitch);
void tile_fma(THREAD SumTile& sum, THREAD const HalfTile& a, THREAD const HalfTile& b);
void tile_scale(THREAD SumTile& sum, THREADGROUP const float* by);
void tile_store(THREAD const SumTile& sum, THREADGROUP float* p, uint pitch);
