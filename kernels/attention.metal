// Gated attention between its projections. A row of `proj` holds, for each query head, its query then its gate; then the
// keys and the values of the kv heads. The cache is pages [kv heads, PAGE, dim], keys normed and rotated; f32 or bf16.

// TOGETHER: positions waited for at once. AHEAD: asked for; more would drive out what others need.
enum { PARTS = 512, MOST_DIM = 256, TOGETHER = 4, AHEAD = 8 };

// Positions of a part for a query at `position`: few enough to fill the device, and so many that PARTS of them will do.
FN uint part_of(CONSTANT AttendArgs& a, uint position) {
  uint size = a.least;
  while (position / size >= PARTS) size *= 2;
  return size;
}

FN float bf16_(uint h) { return as_type<float>(h << 16); }
FN uint to_bf16(float x) {
  const uint u = as_type<uint>(x);
  return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 64u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
FN void get4(DEVICE const float* p, ulong i, THREAD float* v) {
  const float4 q = *(DEVICE const float4*)(p + i);
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
FN void get4(DEVICE const ushort* p, ulong i, THREAD float* v) { UNROLL for (uint n = 0; n < 4; n++) v[n] = bf16_(p[i + n]); }
FN void put(DEVICE float* p, ulong i, float x) { p[i] = x; }
FN void put(DEVICE ushort* p, ulong i, float x) { p[i] = ushort(to_bf16(x)); }

// Norm and rotation of query and key heads; keys and values go into the cache at start + token, queries to `q`.
// `turn` [tokens, rotary / 2, 2] holds cosines and sines. Grid (heads + 2 kv heads, tokens), 32 threads.
template <class T>
FN void place(CONSTANT AttendArgs& a, DEVICE const float* proj, DEVICE const float* q_norm, DEVICE const float* k_norm,
              DEVICE const float* turn, DEVICE float* q, DEVICE T* keys, DEVICE T* values, DEVICE const uint* table,
              THREADGROUP float* x PLACE) {
  const uint head = tgid.x, token = tgid.y, half_ = a.rotary / 2;
  const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
  const uint kv = query ? 0 : (head - a.heads) % a.kv_heads;
  const uint from = query ? head * 2 * a.dim : (a.heads + head) * a.dim;
  DEVICE const float* row = proj + ulong(token) * a.width + from;
  const ulong to = query ? (ulong(token) * a.heads + head) * a.dim : page_row(table, a.kv_heads, kv, a.start + token) * a.dim;
  if (value) {
    for (uint i = lane; i < a.dim; i += 32) put(values, to + i, row[i]);
    return;
  }
  DEVICE const float* w = query ? q_norm : k_norm;
  float squares = 0;
  for (uint i = lane; i < a.dim; i += 32) squares = fma(row[i], row[i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.dim) + a.eps);
  for (uint i = lane; i < a.dim; i += 32) x[i] = row[i] * scale * w[i];
  BARRIER();
  for (uint i = lane; i < a.dim; i += 32) {
    float v = x[i];
    if (i < a.rotary) {
      const uint j = i % half_;
      const float c = turn[(token * half_ + j) * 2], s = turn[(token * half_ + j) * 2 + 1];
      v = i < half_ ? x[i] * c - x[i + half_] * s : x[i] * c + x[i - half_] * s;
    }
    if (query) q[to + i] = v;
    else put(keys, to + i, v);
  }
}

// Asks for TOGETHER rows from row `p` of a page.
template <class T> FN void ask(DEVICE const T* keys, DEVICE const T* values, uint p, uint left, uint dim) {
  const uint bytes = min(uint(TOGETHER), left) * dim * sizeof(T);
  PREFETCH(keys + ulong(p) * dim, bytes);
  PREFETCH(values + ulong(p) * dim, bytes);
}

// One part of the positions for all query heads of a kv head: softmax over it, unnormalised. A simdgroup has HEADS query heads;
// all of them read the same keys at about the same time. `parts` [tokens, heads, splits, dim + 2]: the sum, then its largest score
// and its denominator. Where a part begins depends on nothing but the query's position, so a row's bytes do not depend on its
// company. Grid (splits, kv heads, tokens), 32 threads for each two heads of a kv head, or each one where they are odd.
template <class T, uint COLUMNS, uint HEADS>
FN void part(CONSTANT AttendArgs& a, DEVICE const float* q, DEVICE const T* keys, DEVICE const T* values,
             DEVICE const uint* table, DEVICE float* parts PLACE) {
  const uint groups = a.heads / a.kv_heads, simds = groups / HEADS, token = tgid.z, head = tgid.y * groups + sg * HEADS;
  const uint seen = a.start + token + 1, size = part_of(a, a.start + token), first = tgid.x * size, end = min(first + size, seen);
  // Of the positions looked at; a part of up to PAGE positions is in one.
  ulong page = page_row(table, a.kv_heads, tgid.y, min(first, seen - 1) / PAGE * PAGE) * a.dim;
  for (uint p = first + sg * TOGETHER; p < min(first + AHEAD, end); p += simds * TOGETHER)
    ask(keys + page, values + page, p % PAGE, end - p, a.dim);
  AWAIT();
  float query[HEADS * COLUMNS], sum[HEADS * COLUMNS] = {}, largest[HEADS], total[HEADS] = {};
  UNROLL for (uint h = 0; h < HEADS; h++) {
    largest[h] = -as_type<float>(0x7f7fffffu);
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = 4 * lane + j / 4 * 128 + j % 4;
      query[h * COLUMNS + j] = i < a.dim ? q[(ulong(token) * a.heads + head + h) * a.dim + i] * a.scale : 0.0f;
    }
  }
  for (uint block = first; block < end; block += TOGETHER) {
    if (block % PAGE == 0 && block != first) page = page_row(table, a.kv_heads, tgid.y, block) * a.dim;
    DEVICE const T* from = keys + page;
    DEVICE const T* back = values + page;
    const uint ahead = block % PAGE + AHEAD;
    if ((block - first) / TOGETHER % simds == sg && block + AHEAD < end && ahead < PAGE)
      ask(from, back, ahead, end - block - AHEAD, a.dim);
    // Values are asked for before the keys are looked at: one wait for both.
    float value[TOGETHER * COLUMNS] = {};
    UNROLL for (uint n = 0; n < TOGETHER; n++)
      UNROLL for (uint j = 0; j < COLUMNS; j += 4) {
        const uint i = 4 * lane + j * 32;
        if (i < a.dim) get4(back, min(block + n, end - 1) % PAGE * a.dim + i, value + n * COLUMNS + j);
      }
    float score[HEADS * TOGETHER] = {};
    UNROLL for (uint n = 0; n < TOGETHER; n++) {
      const uint at = min(block + n, end - 1) % PAGE * a.dim;
      UNROLL for (uint j = 0; j < COLUMNS; j += 4) {
        const uint i = 4 * lane + j * 32;
        float key[4] = {};
        if (i < a.dim) get4(from, at + i, key);
        UNROLL for (uint h = 0; h < HEADS; h++)
          UNROLL for (uint m = 0; m < 4; m++)
            score[h * TOGETHER + n] = fma(query[h * COLUMNS + j + m], key[m], score[h * TOGETHER + n]);
      }
    }
    UNROLL for (uint h = 0; h < HEADS; h++) {
      float next = largest[h];
      UNROLL for (uint n = 0; n < TOGETHER; n++) {
        score[h * TOGETHER + n] = SIMD_SUM(score[h * TOGETHER + n]);
        if (block + n < end) next = max(next, score[h * TOGETHER + n]);
      }
      const float old = exp(largest[h] - next);
      largest[h] = next;
      total[h] *= old;
      UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] *= old;
      UNROLL for (uint n = 0; n < TOGETHER; n++) {
        score[h * TOGETHER + n] = block + n < end ? exp(score[h * TOGETHER + n] - next) : 0.0f;
        total[h] += score[h * TOGETHER + n];
      }
    }
    UNROLL for (uint n = 0; n < TOGETHER; n++)
      UNROLL for (uint h = 0; h < HEADS; h++)
        UNROLL for (uint j = 0; j < COLUMNS; j++)
          sum[h * COLUMNS + j] = fma(score[h * TOGETHER + n], value[n * COLUMNS + j], sum[h * COLUMNS + j]);
  }
  UNROLL for (uint h = 0; h < HEADS; h++) {
    DEVICE float* out = parts + ((ulong(token) * a.heads + head + h) * a.splits + tgid.x) * (a.dim + 2);
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = 4 * lane + j / 4 * 128 + j % 4;
      if (i < a.dim) out[i] = sum[h * COLUMNS + j];
    }
    if (lane == 0) out[a.dim] = largest[h], out[a.dim + 1] = total[h];
  }
}

// Joins the parts, divides, and applies the gate. Grid (heads, tokens, ceil(dim / 32)), 128 threads: a lane has a column, a
// simdgroup every fourth part.
KERNEL(attention_merge, ARGS(AttendArgs, a), IN(float, proj, 1), IN(float, parts, 2), OUT(float, y, 3)) {
  SHARED(float, by, PARTS);
  SHARED(float, mine, 128);
  SHARED(float, most, 8);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, splits = (a.start + token) / part_of(a, a.start + token) + 1;
  const uint row = a.dim + 2, i = tgid.z * 32 + lane;
  DEVICE const float* from = parts + (ulong(token) * a.heads + head) * a.splits * row;
  float largest = -as_type<float>(0x7f7fffffu), total = 0;
  for (uint s = tid; s < splits; s += 128) largest = max(largest, from[s * row + a.dim]);
  largest = SIMD_MAX(largest);
  if (lane == 0) most[sg] = largest;
  BARRIER();
  largest = max(max(most[0], most[1]), max(most[2], most[3]));
  for (uint s = tid; s < splits; s += 128) {
    by[s] = exp(from[s * row + a.dim] - largest);
    total = fma(from[s * row + a.dim + 1], by[s], total);
  }
  total = SIMD_SUM(total);
  if (lane == 0) most[4 + sg] = total;
  BARRIER();
  float sum = 0;
  if (i < a.dim) {
    uint s = sg;
    for (; s + 28 < splits; s += 32) {
      float v[8];
      UNROLL for (uint n = 0; n < 8; n++) v[n] = from[(s + 4 * n) * row + i];
      UNROLL for (uint n = 0; n < 8; n++) sum = fma(v[n], by[s + 4 * n], sum);
    }
    for (; s < splits; s += 4) sum = fma(from[s * row + i], by[s], sum);
  }
  mine[tid] = sum;
  BARRIER();
  if (sg != 0 || i >= a.dim) return;
  sum = mine[lane] + mine[32 + lane] + mine[64 + lane] + mine[96 + lane];
  const float gate = proj[ulong(token) * a.width + head * 2 * a.dim + a.dim + i];
  y[(ulong(token) * a.heads + head) * a.dim + i] = sum / (most[4] + most[5] + most[6] + most[7]) * sigmoid(gate);
}

#define ATTEND(suffix, T)                                                                                              \
  KERNEL(qk_norm_rope##suffix, ARGS(AttendArgs, a), IN(float, proj, 1), IN(float, q_norm, 2), IN(float, k_norm, 3),    \
         IN(float, turn, 4), OUT(float, q, 5), OUT(T, keys, 6), OUT(T, values, 7), IN(uint, table, 8)) {               \
    SHARED(float, x, MOST_DIM);                                                                                        \
    AWAIT();                                                                                                           \
    place<T>(a, proj, q_norm, k_norm, turn, q, keys, values, table, x HERE);                                           \
  }                                                                                                                    \
  KERNEL(attention_decode_128##suffix, ARGS(AttendArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),                   \
         IN(uint, table, 4), OUT(float, parts, 5)) {                                                                   \
    if (a.heads / a.kv_heads % 2 == 0) part<T, 4, 2>(a, q, keys, values, table, parts HERE);                           \
    else part<T, 4, 1>(a, q, keys, values, table, parts HERE);                                                         \
  }                                                                                                                    \
  KERNEL(attention_decode_256##suffix, ARGS(AttendArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),                   \
         IN(uint, table, 4), OUT(float, parts, 5)) {                                                                   \
    if (a.heads / a.kv_heads % 2 == 0) part<T, 8, 2>(a, q, keys, values, table, parts HERE);                           \
    else part<T, 8, 1>(a, q, keys, values, table, parts HERE);                                                         \
  }

ATTEND(, float)
ATTEND(_bf16, ushort)
