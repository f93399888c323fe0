// The next token of each row, chosen on the GPU: the k largest logits, then one of them. The CPU's sampler has the same
// order of steps (crates/engine/src/sampler.rs).

#define NO_ID 0xffffffffu

enum { MAX_ROWS = 16 };

// `k` is at most 64. Row i has the `count` values from `places[i] * stride` on.
struct TopKArgs { uint count, k, has_ids, stride; uint places[MAX_ROWS]; };

// The k largest of each 4096 values of a row, the largest first, and their ids. Of equal values, the earlier counts as larger.
// NaN and negative infinity are never selected: if values are missing, negative infinity and NO_ID are written. The id
// of a value is its index, or, with `has_ids`, its entry in `ids`. Grid (ceil(count / 4096), rows), 256 threads.
KERNEL(top_k, ARGS_IN_PLACE(TopKArgs, a), IN(float, values, 1), IN(uint, ids, 2), OUT(float, top, 3), OUT(uint, top_ids, 4)) {
  SHARED(float, value, 8);
  SHARED(uint, at, 8);
  AWAIT();
  const float none = -as_type<float>(0x7f800000u), most = as_type<float>(0x7f7fffffu);
  const uint first = tgid.x * 4096 + tid, blocks = (a.count + 4095) / 4096, to = (tgid.y * blocks + tgid.x) * a.k;
  DEVICE const float* row = values + ulong(a.places[tgid.y]) * a.stride;
  float v[16];
  UNROLL for (uint j = 0; j < 16; j++) {
    const float x = first + 256 * j < a.count ? row[first + 256 * j] : none;
    v[j] = x > most ? most : x > none ? x : none;
  }
  for (uint rank = 0; rank < a.k; rank++) {
    float best = none;
    uint index = NO_ID;
    UNROLL for (uint j = 0; j < 16; j++)
      if (v[j] > best) best = v[j], index = first + 256 * j;
    const float largest = SIMD_MAX(best);
    index = SIMD_MIN(best == largest ? index : NO_ID);
    if (lane == 0) value[sg] = largest, at[sg] = index;
    BARRIER();
    best = value[0], index = at[0];
    for (uint i = 1; i < 8; i++)
      if (value[i] > best || (value[i] == best && at[i] < index)) best = value[i], index = at[i];
    UNROLL for (uint j = 0; j < 16; j++)
      if (first + 256 * j == index) v[j] = none;
    if (tid == 0) {
      top[to + rank] = best;
      top_ids[to + rank] = a.has_ids == 0 || index == NO_ID ? index : ids[a.places[tgid.y] * a.stride + index];
    }
    BARRIER();
  }
}

// `share` is the random number, from 0 to below 1.
struct Choice { uint k; float temperature, top_p, min_p, share; };

// Row i has `stride` candidates, and chooses from the first `choices[i].k`.
struct SampleArgs { uint stride; Choice choices[MAX_ROWS]; };

// One of k candidates of each row, the most likely first: keeps those with at least `min_p` times the probability of the first, and
// of these as few as have `top_p` of the probability of all k. Then takes the one where the running sum of the
// probabilities exceeds `share` of their sum. Grid (rows), 32 threads.
KERNEL(sample, ARGS_IN_PLACE(SampleArgs, args), IN(float, tops, 1), IN(uint, all_ids, 2), OUT(uint, ids, 3)) {
  SHARED(float, weight, 64);
  COPY(Choice, a, args.choices[tgid.x]);
  DEVICE const float* top = tops + tgid.x * args.stride;
  DEVICE const uint* top_ids = all_ids + tgid.x * args.stride;
  AWAIT();
  for (uint i = lane; i < a.k; i += 32)
    weight[i] = top_ids[i] == NO_ID ? 0.0f : exp((top[i] - top[0]) / a.temperature);
  BARRIER();
  if (lane != 0) return;
  float all = 0, kept = 0;
  for (uint i = 0; i < a.k; i++) all += weight[i];
  uint count = 0;
  while (count < a.k && weight[count] >= a.min_p && (count == 0 || a.top_p >= 1.0f || kept < all * a.top_p))
    kept += weight[count], count++;
  float left = kept * a.share;
  uint chosen = 0;
  while (chosen + 1 < count && left >= weight[chosen]) left -= weight[chosen], chosen++;
  ids[tgid.x] = top_ids[chosen];
}
