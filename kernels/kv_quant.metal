// Attention over keys and values of few bits: 8 or 4, as src/ops/attention/kv_quant.rs has them, and the newest positions in f32 beside
// them, in rings of `room` positions. Queries, keys and values are turned by a Hadamard matrix. Otherwise as attention.metal.

// NEW: newest positions of a part. PARTS of the others at most. TOGETHER: positions waited for at once, AHEAD: asked for.
enum { GROUP = 32, NEWEST = 64, NEW = 16, PARTS = 256, MOST_DIM = 256, TOGETHER = 4, AHEAD = 16, JOINS = 512 };

FN float bf16_(uint h) { return as_type<float>(h << 16); }

// The first position that a query at `position` sees among the newest.
FN uint rounded_until(uint position) {
  const uint block = position / NEWEST * NEWEST;
  return block < NEWEST ? 0 : block - NEWEST;
}

// x = H x / sqrt(n), n the largest power of two that divides dim, by `threads` threads of which this is number t.
FN void hadamard(uint dim, uint t, uint threads, THREADGROUP float* x PLACE) {
  uint size = 1;
  while (dim % (2 * size) == 0) size *= 2;
  for (uint half_ = 1; half_ < size; half_ *= 2) {
    BARRIER();
    for (uint i = t; i < dim / 2; i += threads) {
      const uint low = i / half_ * 2 * half_ + i % half_;
      const float a = x[low], b = x[low + half_];
      x[low] = a + b;
      x[low + half_] = a - b;
    }
  }
  BARRIER();
  const float by = 1.0f / sqrt(float(size));
  for (uint i = t; i < dim; i += threads) x[i] *= by;
  BARRIER();
}

// Half to even, of at most 2^22.
FN int nearest(float x) { return int(as_type<uint>(x + 12582912.0f) - 0x4b400000u); }

// `x`, turned, as one row. 32 threads: a lane has one value of each group.
template <uint BITS>
FN void round_row(uint dim, DEVICE uchar* row, THREADGROUP float* x PLACE) {
  for (uint g = 0; g < dim / GROUP; g++) {
    const float v = x[g * GROUP + lane], most = SIMD_MAX(v < 0 ? -v : v);
    const uint up = (as_type<uint>(most / (BITS == 8 ? 127.0f : 15.0f)) + 0xffffu) >> 16;
    const bool none = most < 1e-30f;
    const float inverse = none ? 0.0f : 1.0f / bf16_(up);
    if (BITS == 8) row[g * GROUP + lane] = uchar(nearest(v * inverse));
    else {
      x[g * GROUP + lane] = max(0.0f, min(15.0f, float(nearest(v * inverse * 0.5f + 7.5f))));
      BARRIER();
      if (lane < 16) row[g * 16 + lane] = uchar(uint(x[g * GROUP + lane]) | uint(x[g * GROUP + lane + 16]) << 4);
    }
    if (lane == 0) {
      DEVICE uchar* scale = row + dim * BITS / 8 + 2 * g;
      scale[0] = uchar(none ? 0 : up & 255u);
      scale[1] = uchar(none ? 0 : up >> 8);
    }
  }
}

// As `place`, for few bits. Grid (heads + 2 kv heads, tokens), 32 threads.
template <uint BITS>
FN void place_few(CONSTANT AttendArgs& a, DEVICE const float* proj, DEVICE const float* q_norm,
                  DEVICE const float* k_norm, DEVICE const float* turn, DEVICE float* q, DEVICE uchar* keys,
                  DEVICE uchar* values, DEVICE const uint* table, DEVICE float* new_keys, DEVICE float* new_values,
                  THREADGROUP float* x PLACE) {
  const uint head = tgid.x, token = tgid.y, half_ = a.rotary / 2, position = a.start + token;
  const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
  const uint kv = query ? 0 : (head - a.heads) % a.kv_heads;
  DEVICE const float* row = proj + ulong(token) * a.width + (query ? head * 2 * a.dim : (a.heads + head) * a.dim);
  DEVICE const float* w = query ? q_norm : k_norm;
  float squares = 0;
  for (uint i = lane; i < a.dim; i += 32) squares = fma(row[i], row[i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.dim) + a.eps);
  float v[MOST_DIM / 32];
  for (uint i = lane; i < a.dim; i += 32) x[i] = value ? row[i] : row[i] * scale * w[i];
  BARRIER();
  UNROLL for (uint j = 0; j < MOST_DIM / 32; j++) {
    const uint i = lane + 32 * j;
    v[j] = i < a.dim ? x[i] : 0;
    if (!value && i < a.rotary) {
      const float c = turn[(token * half_ + i % half_) * 2], s = turn[(token * half_ + i % half_) * 2 + 1];
      v[j] = i < half_ ? x[i] * c - x[i + half_] * s : x[i] * c + x[i - half_] * s;
    }
  }
  BARRIER();
  UNROLL for (uint j = 0; j < MOST_DIM / 32; j++)
    if (lane + 32 * j < a.dim) x[lane + 32 * j] = v[j];
  hadamard(a.dim, lane, 32, x HERE);
  if (query) {
    for (uint i = lane; i < a.dim; i += 32) q[(ulong(token) * a.heads + head) * a.dim + i] = x[i];
    return;
  }
  DEVICE float* fresh = (value ? new_values : new_keys) + (ulong(kv) * a.room + position % a.room) * a.dim;
  for (uint i = lane; i < a.dim; i += 32) fresh[i] = x[i];
  const uint bytes = a.dim * BITS / 8 + a.dim / GROUP * 2;
  round_row<BITS>(a.dim, (value ? values : keys) + page_row(table, a.kv_heads, kv, position) * bytes, x HERE);
}

// Parts of the newest positions that a query at `position` sees; they come first.
FN uint new_parts(uint position) { return (position - rounded_until(position)) / NEW + 1; }

// Positions of a part of the others, of which there are `until`.
FN uint part_of(CONSTANT AttendArgs& a, uint until) {
  uint size = a.least;
  while (until / size >= PARTS) size *= 2;
  return size;
}

// The column of a lane's value `j`: the values of a lane lie in one group, and their codes side by side.
template <uint BITS, uint COLUMNS>
FN uint column(uint j PLACE) {
  if (BITS == 8) return COLUMNS * lane + j;
  return COLUMNS * lane / GROUP * GROUP + lane % (GROUP / COLUMNS) * (COLUMNS / 2) + j / 2 + j % 2 * (GROUP / 2);
}

// Two bytes are all that a row is aligned to, unless it is `wide`.
FN uint word_at(DEVICE const uchar* p, bool wide) {
  if (wide) return *(DEVICE const uint*)p;
  return uint(((DEVICE const ushort*)p)[0]) | uint(((DEVICE const ushort*)p)[1]) << 16;
}

// A lane's codes of a row, and the scale of its values. They stay packed until they are needed: registers are few.
struct FewRow { uint w[2]; float by; };

template <uint BITS, uint COLUMNS>
FN FewRow load_few(DEVICE const uchar* row, uint dim, bool wide PLACE) {
  FewRow to = {};
  if (lane * COLUMNS >= dim) return to;
  DEVICE const uchar* at = row + lane * (COLUMNS * BITS / 8);
  if (COLUMNS * BITS == 64 && wide) {
    const uint2 q = *(DEVICE const uint2*)at;
    to.w[0] = q.x, to.w[1] = q.y;
  } else {
    to.w[0] = COLUMNS * BITS == 16 ? uint(*(DEVICE const ushort*)at) : word_at(at, wide);
    if (COLUMNS * BITS == 64) to.w[1] = word_at(at + 4, wide);
  }
  to.by = bf16_(*(DEVICE const ushort*)(row + dim * BITS / 8 + COLUMNS * lane / GROUP * 2));
  return to;
}

// Its values, which are to be multiplied by the scale.
template <uint BITS, uint COLUMNS>
FN void unpack_few(FewRow from, THREAD float* to) {
  UNROLL for (uint j = 0; j < COLUMNS; j++) {
    const uint h = (BITS == 8 ? from.w[j / 4] ^ 0x80808080u : from.w[0]) >> 16 * (j * BITS / 16 % 2), shift = j * BITS % 16;
    // Codes stay where they lie in a half word: a power of two brings them back.
    const float by = as_type<float>((127u - shift) << 23);
    to[j] = BITS == 8 ? fma(MASKED(h, 255u << shift), by, -128.0f) : fma(MASKED(h, 15u << shift), 2.0f * by, -15.0f);
  }
}

// Positions from `first` up to `end` for HEADS queries from head `head`: as `part` of attention.metal, of the newest or of the others.
template <uint BITS, uint COLUMNS, uint HEADS, bool FRESH>
FN void walk(CONSTANT AttendArgs& a, DEVICE const float* q, DEVICE const uchar* keys, DEVICE const uchar* values,
             DEVICE const uint* table, DEVICE const float* new_keys, DEVICE const float* new_values,
             DEVICE float* parts, uint first, uint end, uint head, uint simds PLACE) {
  const uint token = tgid.z, bytes = a.dim * BITS / 8 + a.dim / GROUP * 2;
  const bool wide = bytes % 8 == 0;
  ulong page = FRESH ? 0 : page_row(table, a.kv_heads, tgid.y, first / PAGE * PAGE);
  float query[HEADS * COLUMNS], sum[HEADS * COLUMNS] = {}, largest[HEADS], total[HEADS] = {};
  UNROLL for (uint h = 0; h < HEADS; h++) {
    largest[h] = -as_type<float>(0x7f7fffffu);
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = column<BITS, COLUMNS>(j HERE);
      query[h * COLUMNS + j] = i < a.dim ? q[(ulong(token) * a.heads + head + h) * a.dim + i] * a.scale : 0.0f;
    }
  }
  for (uint block = first; block < end; block += TOGETHER) {
    if (!FRESH && block % PAGE == 0) page = page_row(table, a.kv_heads, tgid.y, block);
    if (!FRESH && (block - first) % AHEAD == 0 && (block - first) / AHEAD % simds == sg) {
      // This time's and the next time's, of one page.
      const uint to = min(min(block + 2 * AHEAD, end), block / PAGE * PAGE + PAGE), from = block == first ? block : block + AHEAD;
      if (from < to) {
        PREFETCH(keys + (page + from % PAGE) * bytes, (to - from) * bytes);
        PREFETCH(values + (page + from % PAGE) * bytes, (to - from) * bytes);
      }
    }
    // All is asked for before any of it is looked at.
    FewRow key[TOGETHER], value[TOGETHER];
    float fresh[FRESH ? 2 * TOGETHER * COLUMNS : 1];
    UNROLL for (uint n = 0; n < TOGETHER; n++) {
      const uint p = min(block + n, end - 1);
      if (FRESH) {
        const ulong row = (ulong(tgid.y) * a.room + p % a.room) * a.dim;
        key[n].by = value[n].by = 1;
        UNROLL for (uint j = 0; j < COLUMNS; j++) {
          const uint i = column<BITS, COLUMNS>(j HERE);
          fresh[2 * n * COLUMNS + j] = i < a.dim ? new_keys[row + i] : 0.0f;
          fresh[(2 * n + 1) * COLUMNS + j] = i < a.dim ? new_values[row + i] : 0.0f;
        }
      } else {
        key[n] = load_few<BITS, COLUMNS>(keys + (page + p % PAGE) * bytes, a.dim, wide HERE);
        value[n] = load_few<BITS, COLUMNS>(values + (page + p % PAGE) * bytes, a.dim, wide HERE);
      }
    }
    float score[HEADS * TOGETHER];
    UNROLL for (uint n = 0; n < TOGETHER; n++) {
      float row[COLUMNS];
      if (FRESH) {
        UNROLL for (uint j = 0; j < COLUMNS; j++) row[j] = fresh[2 * n * COLUMNS + j];
      } else {
        unpack_few<BITS, COLUMNS>(key[n], row);
      }
      UNROLL for (uint h = 0; h < HEADS; h++) {
        float dot = 0;
        UNROLL for (uint j = 0; j < COLUMNS; j++) dot = fma(query[h * COLUMNS + j], row[j], dot);
        score[h * TOGETHER + n] = dot * key[n].by;
      }
    }
    UNROLL for (uint n = 0; n < HEADS * TOGETHER; n++) score[n] = SIMD_SUM(score[n]);
    UNROLL for (uint h = 0; h < HEADS; h++) {
      float next = largest[h];
      UNROLL for (uint n = 0; n < TOGETHER; n++)
        if (block + n < end) next = max(next, score[h * TOGETHER + n]);
      const float old = exp(largest[h] - next);
      largest[h] = next;
      total[h] *= old;
      UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] *= old;
      UNROLL for (uint n = 0; n < TOGETHER; n++) {
        score[h * TOGETHER + n] = block + n < end ? exp(score[h * TOGETHER + n] - next) : 0.0f;
        total[h] += score[h * TOGETHER + n];
      }
    }
    UNROLL for (uint n = 0; n < TOGETHER; n++) {
      float row[COLUMNS];
      if (FRESH) {
        UNROLL for (uint j = 0; j < COLUMNS; j++) row[j] = fresh[(2 * n + 1) * COLUMNS + j];
      } else {
        unpack_few<BITS, COLUMNS>(value[n], row);
      }
      UNROLL for (uint h = 0; h < HEADS; h++) {
        const float by = score[h * TOGETHER + n] * value[n].by;
        UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] = fma(by, row[j], sum[h * COLUMNS + j]);
      }
    }
  }
  UNROLL for (uint h = 0; h < HEADS; h++) {
    DEVICE float* out = parts + ((ulong(token) * a.heads + head + h) * a.splits + tgid.x) * (a.dim + 2);
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = column<BITS, COLUMNS>(j HERE);
      if (i < a.dim) out[i] = sum[h * COLUMNS + j];
    }
    if (lane == 0) out[a.dim] = largest[h], out[a.dim + 1] = total[h];
  }
}

template <uint BITS, uint COLUMNS, uint HEADS>
FN void part(CONSTANT AttendArgs& a, DEVICE const float* q, DEVICE const uchar* keys, DEVICE const uchar* values,
             DEVICE const uint* table, DEVICE const float* new_keys, DEVICE const float* new_values,
             DEVICE float* parts PLACE) {
  const uint groups = a.heads / a.kv_heads, simds = groups / HEADS, head = tgid.y * groups + sg * HEADS;
  const uint position = a.start + tgid.z, until = rounded_until(position), news = new_parts(position);
  if (tgid.x < news) {
    const uint first = until + tgid.x * NEW, end = min(first + NEW, position + 1);
    walk<BITS, COLUMNS, HEADS, true>(a, q, keys, values, table, new_keys, new_values, parts, first, end, head, simds HERE);
    return;
  }
  const uint size = part_of(a, until), first = (tgid.x - news) * size, end = min(first + size, until);
  // Other rows have more parts.
  if (first >= end) return;
  walk<BITS, COLUMNS, HEADS, false>(a, q, keys, values, table, new_keys, new_values, parts, first, end, head, simds HERE);
}

// As `attention_merge`; the result is turned back before the gate. Grid (heads, tokens), JOINS threads: a thread has a column of every
// so many parts.
KERNEL(attention_merge_quant, ARGS(AttendArgs, a), IN(float, proj, 1), IN(float, parts, 2), OUT(float, y, 3)) {
  SHARED(float, by, PARTS + 2 * NEWEST / NEW);
  SHARED(float, mine, JOINS);
  SHARED(float, most, 2 * JOINS / 32);
  SHARED(float, x, MOST_DIM);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, row = a.dim + 2, position = a.start + token, until = rounded_until(position);
  const uint size = part_of(a, until), splits = new_parts(position) + (until + size - 1) / size;
  DEVICE const float* from = parts + (ulong(token) * a.heads + head) * a.splits * row;
  DEVICE const float* gate = proj + ulong(token) * a.width + head * 2 * a.dim + a.dim;
  float largest = -as_type<float>(0x7f7fffffu), total = 0;
  for (uint s = tid; s < splits; s += JOINS) largest = max(largest, from[s * row + a.dim]);
  largest = SIMD_MAX(largest);
  if (lane == 0) most[sg] = largest;
  BARRIER();
  for (uint n = 0; n < JOINS / 32; n++) largest = max(largest, most[n]);
  for (uint s = tid; s < splits; s += JOINS) {
    by[s] = exp(from[s * row + a.dim] - largest);
    total = fma(from[s * row + a.dim + 1], by[s], total);
  }
  total = SIMD_SUM(total);
  if (lane == 0) most[JOINS / 32 + sg] = total;
  BARRIER();
  total = 0;
  for (uint n = 0; n < JOINS / 32; n++) total += most[JOINS / 32 + n];
  const uint turns = JOINS / a.dim, turn = tid / a.dim, i = tid % a.dim;
  float sum = 0;
  if (turn < turns) {
    uint s = turn;
    for (; s + 15 * turns < splits; s += 16 * turns) {
      float v[16];
      UNROLL for (uint n = 0; n < 16; n++) v[n] = from[(s + n * turns) * row + i];
      UNROLL for (uint n = 0; n < 16; n++) sum = fma(v[n], by[s + n * turns], sum);
    }
    for (; s < splits; s += turns) sum = fma(from[s * row + i], by[s], sum);
  }
  mine[tid] = sum;
  BARRIER();
  if (tid < a.dim) {
    for (uint n = 1; n < turns; n++) sum += mine[n * a.dim + tid];
    x[tid] = sum / total;
  }
  hadamard(a.dim, tid, JOINS, x HERE);
  if (tid < a.dim) y[(ulong(token) * a.heads + head) * a.dim + tid] = x[tid] * sigmoid(gate[tid]);
}

#define ATTEND_PART(name, BITS, COLUMNS)                                                                               \
  KERNEL(name, ARGS(AttendArgs, a), IN(float, q, 1), IN(uchar, keys, 2), IN(uchar, values, 3), IN(uint, table, 4),     \
         IN(float, new_keys, 5), IN(float, new_values, 6), OUT(float, parts, 7)) {                                     \
    AWAIT();                                                                                                           \
    if (a.heads / a.kv_heads % 2 == 0)                                                                                 \
      part<BITS, COLUMNS, 2>(a, q, keys, values, table, new_keys, new_values, parts HERE);                             \
    else                                                                                                               \
      part<BITS, COLUMNS, 1>(a, q, keys, values, table, new_keys, new_values, parts HERE);                             \
  }

#define ATTEND_FEW(BITS)                                                                                               \
  KERNEL(qk_norm_rope_q##BITS, ARGS(AttendArgs, a), IN(float, proj, 1), IN(float, q_norm, 2), IN(float, k_norm, 3),    \
         IN(float, turn, 4), OUT(float, q, 5), OUT(uchar, keys, 6), OUT(uchar, values, 7), IN(uint, table, 8),         \
         OUT(float, new_keys, 9), OUT(float, new_values, 10)) {                                                        \
    SHARED(float, x, MOST_DIM);                                                                                        \
    AWAIT();                                                                                                           \
    place_few<BITS>(a, proj, q_norm, k_norm, turn, q, keys, values, table, new_keys, new_values, x HERE);              \
  }                                                                                                                    \
  ATTEND_PART(attention_decode_128_q##BITS, BITS, 4)                                                                             \
  ATTEND_PART(attention_decode_256_q##BITS, BITS, 8)

ATTEND_FEW(8)
ATTEND_FEW(4)
