// The kernel dialect on the host. Every GPU thread is a fiber on one CPU thread, and a threadgroup runs to its end
// before the next one begins. A fiber runs until it must wait. A simdgroup operation or barrier then releases all
// threads of the simdgroup or threadgroup together.
//
// Undefined behaviour of a GPU is an error here: a barrier or reduction that some threads do not reach, and, under
// AddressSanitizer, an access outside a binding or a threadgroup array. Threadgroup memory starts as NaN.
#pragma once
#include <math.h>  // Not <cmath>: only <math.h> declares exp(float) etc. outside std in both libstdc++ and libc++.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "fiber.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
struct uint2 { uint x, y; };
struct uint3 { uint x, y, z; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline uint max(uint a, uint b) { return a < b ? b : a; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

#define FN static inline
#define DEVICE
#define CONSTANT const
#define THREAD
#define THREADGROUP
#define UNROLL
#define ARGS(T, name) const T& name
#define ARGS_IN_PLACE(T, name) ARGS(T, name)
#define COPY(T, name, value) const T& name = value
#define IN(T, name, slot) const T* name
#define OUT(T, name, slot) T* name
#define THREAD_IDS_PARAM
#define THREAD_IDS
#define SHARED(T, name, count) T* const name = (T*)host::shared(#name, sizeof(T) * (count))
#define KERNEL(name, ...)                                                   \
  static void name(__VA_ARGS__);                                            \
  static const bool host_##name = host::add(#name, host::callable(&name)); \
  static void name(__VA_ARGS__)
#define WIDE_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define WIDEST_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define tgid (host::group->id)
#define tid (host::group->now)
#define lane (host::group->now % 32u)
#define sg (host::group->now / 32u)
#define AWAIT() (host::now().awaited = true)
#define PREFETCH(p, bytes) host::touch(p, bytes)
#define PREFETCH_LINE(p) host::touch(p, 1)
#define STREAM(p) (*(p))
#define PEEK(p) (*(p))
#define LOAD(p) host::load(p)
#define MASKED(q, mask) float((q) & (mask))
#define HALF_TO_FLOAT(bits) host::halves[bits]
#define FAST_EXP(x) host::fast_exp(x)
#define BARRIER() host::meet(host::Whole, __LINE__, 0)
#define SIMD_SUM(x) host::reduce(host::Sum, __LINE__, x)
#define SIMD_MAX(x) host::reduce(host::Max, __LINE__, x)
#define SIMD_MIN(x) host::smallest(__LINE__, x)
#define SIMD_XOR(x, mask) host::shuffle(__LINE__, x, lane ^ (mask))
#define SIMD_LANE(x, from) host::shuffle(__LINE__, x, from)
#define HALF_TILE host::HalfTile
#define SUM_TILE host::SumTile
#define HALF2(x, y) (uint(to_f16(x)) | uint(to_f16(y)) << 16)
#define HALF2_SUB(x, y) HALF2(f16((x) & 0xffffu) - f16((y) & 0xffffu), f16((x) >> 16) - f16((y) >> 16))
#define TILE_ZERO(sum) host::tile_zero(sum)
#define TILE_LOAD(tile, p, pitch) host::tile_load(tile, p, pitch)
#define TILE_LOAD_T(tile, p, pitch) host::tile_load(tile, p, pitch)
#define TILE_LOAD_RIGHT(tile, p, pitch) host::tile_load(tile, p, pitch, true)
#define TILE_SCALE(sum, by) host::tile_scale(sum, by)
#define TILE_FMA(sum, a, b) host::tile_fma(sum, a, b)
#define TILE_FMA_TOP(sum, a, b) host::tile_fma_top(sum, a, b)
#define TILE_STORE(sum, p, pitch) host::tile_store(sum, p, pitch)
#define QUAD_FMA(c, a0, a1, a2, a3, b0, b1) host::quad_fma(__LINE__, c, {a0, a1, a2, a3}, {b0, b1})
#define QUAD_MUL(c, a0, a1, a2, a3, b0, b1) host::quad_mul(__LINE__, c, {a0, a1, a2, a3}, {b0, b1})
#define QUAD_LOAD(a, p, pitch) host::quad_load(a, p, pitch)
#define ASYNC_COPY(to, from) host::async_copy(to, from, sizeof *(to))
#define ASYNC_COMMIT() host::open_copies(), host::now().copies.emplace_back()
#define ASYNC_WAIT(n) host::async_wait(__LINE__, n)
#define SIMD_BARRIER() ((void)host::smallest(__LINE__, 0))
#define IN_REGISTER(x) (x)
#define QUAD_SUM(x) host::reduce(host::QuadSum, __LINE__, x)
#define QUAD_MAX(x) host::reduce(host::QuadMax, __LINE__, x)

namespace host {

enum State { Ready, Whole, Sum, Max, Min, Shuffle, Quad, QuadSum, QuadMax, Done };
// A lane's part of a 16x8 product.
struct QuadStep { uint a[4], b[2]; float* sums; };
// A copy that takes effect when the thread waits for it, so that an early read finds old bytes.
struct Copy { void* to; const void* from; size_t bytes; };
struct Thread {
  Fiber fiber;
  std::deque<std::vector<Copy>> copies;  // by commit; the last group is open; empty before the first copy
  QuadStep quad;
  State state = Ready;
  int site = 0;
  uint operand = 0;
  uint from = 0;  // in a shuffle: the lane whose operand this thread receives
  bool awaited = false;  // whether the thread has reached AWAIT
};
struct Group {
  uint3 id;
  uint now = 0;
  bool backwards = false;
  std::vector<Thread> threads;
  std::vector<std::pair<const char*, void*>> arrays;  // by the address of their name
};
inline Group* group;
inline const std::function<void()>* body;

inline Thread& now() { return group->threads[group->now]; }

// Reads the first and last byte, so that a prefetch of memory that is not readable is detected.
inline void touch(const void* p, uint bytes) {
  volatile uchar seen = 0;
  if (bytes > 0) seen = *(const volatile uchar*)p, seen = ((const volatile uchar*)p)[bytes - 1];
  (void)seen;
}

[[noreturn]] inline void die(const char* what, uint a, uint b) {
  const Thread &x = group->threads[a], &y = group->threads[b];
  fprintf(stderr, "%s in threadgroup (%u, %u, %u): thread %u is at line %d, thread %u %s %d\n", what, group->id.x,
          group->id.y, group->id.z, a, x.site, b, y.state == Done ? "returned; it was last at line" : "is at line",
          y.site);
  fflush(stderr);
  _exit(3);
}

// Threadgroup memory: one heap block per array, so that AddressSanitizer guards both ends.
inline void* shared(const char* name, size_t bytes) {
  for (auto& array : group->arrays)
    if (array.first == name) return array.second;
  group->arrays.emplace_back(name, memset(malloc(bytes), 0xff, bytes));
  return group->arrays.back().second;
}

// Switches from a thread that waits or has ended to the next thread of the same simdgroup. The last thread of a
// simdgroup switches to the scheduler.
inline void pass_on() {
  Thread& t = now();
  if (lane == (group->backwards ? 0 : 31)) return leave(t.fiber);
  group->backwards ? group->now-- : group->now++;
  hand_over(t.fiber, now().fiber);
}

// Waits until every thread of the simdgroup or threadgroup is at the same line.
inline uint meet(State why, int site, uint operand) {
  Thread& t = now();
  t.state = why, t.site = site, t.operand = operand;
  pass_on();
  return t.operand;
}
inline float reduce(State why, int site, float x) { return as_type<float>(meet(why, site, as_type<uint>(x))); }
inline uint smallest(int site, uint x) { return meet(Min, site, x); }
inline float shuffle(int site, float x, uint from) {
  now().from = from;
  return as_type<float>(meet(Shuffle, site, as_type<uint>(x)));
}

inline std::vector<Copy>& open_copies() {
  auto& copies = now().copies;
  return copies.empty() ? copies.emplace_back() : copies.back();
}
inline void async_copy(void* to, const void* from, size_t bytes) {
  if ((size_t)to % bytes || (size_t)from % bytes) die("a copy that is not aligned", group->now, group->now);
  open_copies().push_back({to, from, bytes});
}
// Completes all but the last `left` groups of copies, then waits for the simdgroup.
inline void async_wait(int site, size_t left) {
  auto& copies = now().copies;
  for (; copies.size() > left + 1; copies.pop_front())
    for (const Copy& copy : copies.front()) memcpy(copy.to, copy.from, copy.bytes);
  smallest(site, 0);
}

template <class T, class F> uint fold(const Thread* t, F two) {
  T v[32];
  for (int i = 0; i < 32; i++) v[i] = as_type<T>(t[i].operand);
  for (int half = 16; half; half >>= 1)
    for (int i = 0; i < half; i++) v[i] = two(v[i], v[i + half]);
  return as_type<uint>(v[0]);
}

// The float value of each of the 65,536 f16 bit patterns. A table, because a forward pass converts many f16 values.
inline float half_value(uint bits) {
  const uint e = bits >> 10 & 31u, f = bits & 1023u;
  const float v = e == 0 ? float(f) * as_type<float>(0x33800000u)
                         : as_type<float>((e == 31 ? 255u : e + 112u) << 23 | f << 13);
  return bits & 0x8000u ? -v : v;
}
inline const std::vector<float> halves = [] {
  std::vector<float> all(65536);
  for (uint bits = 0; bits < 65536; bits++) all[bits] = half_value(bits);
  return all;
}();
// exp. If the environment has MOESTRO_FAST_EXP_ERRORS, errs as much as Metal's specification allows for fast::exp: by
// 3 + floor(|2 x|) units in the last place. The power 2^0 is exact.
inline float fast_exp(float x) {
  static const bool errs = getenv("MOESTRO_FAST_EXP_ERRORS") != nullptr;
  const float y = exp(x);
  if (!errs || y == 0 || x == 0) return y;
  const float error = (3 + floor(fabs(2 * x))) * as_type<float>(0x34000000u);  // 2^-23
  return as_type<uint>(x) & 1u ? y * (1 + error) : y * (1 - error);
}
// Multiplications on matrix units since the last launch began.
inline ulong products = 0;
// Loads of simdgroups from keys and values since the last launch began.
inline ulong loads = 0;
template <class T> T load(const T* p) {
  if (lane == 0) loads++;
  return *p;
}

// Adds the 16x8 product of the 32 lanes from `t` to their sums, in the layout of NVIDIA GPUs: a lane has rows lane / 4
// and lane / 4 + 8 of the left factor, column lane / 4 of the right factor, and two adjacent columns of the sums.
inline void quad_step(Thread* t) {
  float left[16][16], right[8][16];
  for (uint l = 0; l < 32; l++)
    for (uint half = 0; half < 2; half++) {
      const uint k = l % 4 * 2 + half, shift = 16 * half;
      for (uint i = 0; i < 4; i++) left[l / 4 + i % 2 * 8][k + i / 2 * 8] = halves[t[l].quad.a[i] >> shift & 0xffffu];
      for (uint i = 0; i < 2; i++) right[l / 4][k + i * 8] = halves[t[l].quad.b[i] >> shift & 0xffffu];
    }
  for (uint l = 0; l < 32; l++)
    for (uint i = 0; i < 4; i++)
      for (uint k = 0; k < 16; k++) t[l].quad.sums[i] += left[l / 4 + i / 2 * 8][k] * right[l % 4 * 2 + i % 2][k];
  products += 2048;
}
// The parts of a lane of 16 rows of 16 halves as the left factor.
inline void quad_load(uint* a, const uint* p, uint pitch) {
  for (uint i = 0; i < 4; i++) a[i] = p[(lane / 4 + i % 2 * 8) * pitch + i / 2 * 4 + lane % 4];
}
inline void quad_fma(int site, float* sums, const uint (&a)[4], const uint (&b)[2]) {
  now().quad = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, sums};
  meet(Quad, site, 0);
}
inline void quad_mul(int site, float* sums, const uint (&a)[4], const uint (&b)[2]) {
  for (uint i = 0; i < 4; i++) sums[i] = 0;
  quad_fma(site, sums, a, b);
}

// Reduces the operands of each four lanes, pairwise.
template <class F> void fold_quads(Thread* t, F two) {
  for (int i = 0; i < 32; i += 4) {
    float v[4];
    for (int j = 0; j < 4; j++) v[j] = as_type<float>(t[i + j].operand);
    for (int j = 0; j < 4; j++) t[i + j].operand = as_type<uint>(two(two(v[0], v[2]), two(v[1], v[3])));
  }
}

// Computes the reduction that the 32 threads from `first` wait for, and releases them. Sums are added pairwise.
inline void release_simd(uint first) {
  Thread* t = &group->threads[first];
  if (t->state == Quad) quad_step(t);
  if (t->state == Shuffle) {
    uint operands[32];
    for (int i = 0; i < 32; i++) operands[i] = t[i].operand;
    for (int i = 0; i < 32; i++) t[i].operand = operands[t[i].from % 32], t[i].state = Ready;
    return;
  }
  if (t->state == QuadSum || t->state == QuadMax) {
    t->state == QuadSum ? fold_quads(t, [](float a, float b) { return a + b; })
                        : fold_quads(t, [](float a, float b) { return max(a, b); });
    for (int i = 0; i < 32; i++) t[i].state = Ready;
    return;
  }
  const uint found = t->state == Sum   ? fold<float>(t, [](float a, float b) { return a + b; })
                     : t->state == Max ? fold<float>(t, [](float a, float b) { return max(a, b); })
                                       : fold<uint>(t, [](uint a, uint b) { return min(a, b); });
  for (int i = 0; i < 32; i++) t[i].operand = found, t[i].state = Ready;
}

// Runs the simdgroup at `first` until all its threads wait for the threadgroup or are done.
inline void run_simd(uint first) {
  Thread* t = &group->threads[first];
  for (;;) {
    group->now = group->backwards ? first + 31 : first;
    enter(now().fiber);
    for (uint i = 1; i < 32; i++)
      if (t[i].state != t[0].state || (t[i].state != Done && t[i].site != t[0].site))
        t[0].state == Done ? die("divergent barrier", first + i, first) : die("divergent barrier", first, first + i);
    if (t[0].state == Whole || t[0].state == Done) return;
    release_simd(first);
  }
}

inline void run_group(uint3 id, uint count, bool backwards) {
  group->id = id, group->backwards = backwards;
  for (uint i = 0; i < count; i++) {
    Thread& t = group->threads[i];
    t.state = Ready, t.site = 0, t.awaited = false;
    t.copies.clear();
    start(t.fiber, [] { (*body)(); now().state = Done, pass_on(); }, i);
  }
  for (bool over = false; !over;) {
    for (uint s = 0; s < count; s += 32) run_simd(backwards ? count - 32 - s : s);
    for (uint s = 32; s < count; s += 32) {
      Thread &a = group->threads[0], &b = group->threads[s];
      if (a.state != b.state || (a.state != Done && a.site != b.site))
        a.state == Done ? die("divergent barrier", s, 0) : die("divergent barrier", 0, s);
    }
    over = group->threads[0].state == Done;
    for (uint i = 0; over && i < count; i++)
      if (!group->threads[i].awaited) die("a launch that does not wait", i, 0);
    if (!over) for (Thread& t : group->threads) t.state = Ready;
  }
  for (auto& array : group->arrays) free(array.second);
  group->arrays.clear();
}

// Runs `kernel` over the grid, forwards or backwards. If the result depends on the order, the kernel has a race.
inline void dispatch(uint3 grid, uint count, bool backwards, const std::function<void()>& kernel) {
  static Group memory;
  group = &memory, body = &kernel;
  memory.threads.resize(count);
  const uint total = grid.x * grid.y * grid.z;
  for (uint i = 0; i < total; i++) {
    uint n = backwards ? total - 1 - i : i;
    run_group({n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y}, count, backwards);
  }
}

// Tiles. A lane holds eight of the 256 sums, as on NVIDIA GPUs, and a copy of a whole half tile.
struct HalfTile { uint rows[16][8]; bool turned; };
struct SumTile { float v[8]; };
inline void half_row(const HalfTile& tile, uint row, float* to) {
  const float* values = halves.data();
  if (tile.turned) {
    for (uint k = 0; k < 16; k++) to[k] = values[tile.rows[k][row / 2] >> row % 2 * 16 & 0xffffu];
    return;
  }
  for (uint j = 0; j < 8; j++) {
    const uint two = tile.rows[row][j];
    to[2 * j] = values[two & 0xffffu], to[2 * j + 1] = values[two >> 16];
  }
}
inline uint tile_row(uint i) { return lane / 4 + i / 2 % 2 * 8; }
inline uint tile_column(uint i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }
inline void tile_zero(SumTile& sum) {
  for (float& v : sum.v) v = 0;
}
inline void tile_load(HalfTile& tile, const uint* p, uint pitch, bool turned = false) {
  for (uint row = 0; row < 16; row++) std::copy_n(p + row * pitch, 8, tile.rows[row]);
  tile.turned = turned;
}
inline void tile_fma(SumTile& sum, const HalfTile& a, const HalfTile& b) {
  float rows[2][16], columns[4][16];
  for (uint i = 0; i < 2; i++) half_row(a, tile_row(2 * i), rows[i]);
  for (uint i = 0; i < 4; i++) half_row(b, tile_column(i % 2 + i / 2 * 4), columns[i]);
  for (uint i = 0; i < 8; i++)
    for (uint k = 0; k < 16; k++) sum.v[i] += rows[i / 2 % 2][k] * columns[i % 2 + i / 4 * 2][k];
  products += 128;
}
// tile_fma for the first eight rows only. A lane's sums 0, 1, 4 and 5 are in these rows.
inline void tile_fma_top(SumTile& sum, const HalfTile& a, const HalfTile& b) {
  float row[16], columns[4][16];
  half_row(a, tile_row(0), row);
  for (uint i = 0; i < 4; i++) half_row(b, tile_column(i % 2 + i / 2 * 4), columns[i]);
  for (uint i = 0; i < 8; i++)
    for (uint k = 0; k < 16 && i / 2 % 2 == 0; k++) sum.v[i] += row[k] * columns[i % 2 + i / 4 * 2][k];
  products += 64;
}
inline void tile_scale(SumTile& sum, const float* by) {
  for (uint i = 0; i < 8; i++) sum.v[i] *= by[tile_row(i) * 8 + tile_row(i) % 8];
}
inline void tile_store(const SumTile& sum, float* p, uint pitch) {
  for (uint i = 0; i < 8; i++) p[tile_row(i) * pitch + tile_column(i)] = sum.v[i];
}

// A kernel's argument size, number of buffers and entry point.
struct Kernel {
  size_t args, buffers;
  std::function<void(void**)> call;
};
inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}
inline bool add(const char* name, Kernel kernel) { return kernels().emplace(name, kernel).second; }
template <class A, class... P, size_t... I> Kernel callable(void (*f)(const A&, P...), std::index_sequence<I...>) {
  return {sizeof(A), sizeof...(P), [f](void** b) { f(*(const A*)b[0], (P)b[I + 1]...); }};
}
template <class A, class... P> Kernel callable(void (*f)(const A&, P...)) {
  return callable(f, std::index_sequence_for<P...>{});
}

}  // namespace host
