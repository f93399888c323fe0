// The router: softmax over all experts, the k best, their weights renormalised (which is the softmax of the
// chosen scores) unless the model wants them as they are.
// Ties go to the lower id. Chosen ids become slots through `table` where every expert is resident, so the CPU need not know.
// Weight k of a token is the shared expert's: sigmoid of its gate, which stands `gate_at` in the row of scores.
//
// Grid (tokens), 32 threads.

enum { MOST_EXPERTS = 1024 };

struct RouteArgs { uint experts, k, width, gate_at, shared, renormalise; };

KERNEL(route, ARGS(RouteArgs, a), IN(float, scores, 1), IN(uint, table, 2), OUT(uint, ids, 3), OUT(uint, slots, 4),
       OUT(float, weights, 5)) {
  SHARED(float, score, MOST_EXPERTS);
  const uint token = tgid.x;
  DEVICE const float* row = scores + ulong(token) * a.width;
  for (uint e = lane; e < a.experts; e += 32) score[e] = row[e];  // each lane reads back only what it wrote
  float best0 = 0, sum = 0;
  for (uint rank = 0; rank < a.k; rank++) {
    float best = -as_type<float>(0x7f800000u);
    uint id = a.experts - 1;
    for (uint e = lane; e < a.experts; e += 32)
      if (score[e] > best) best = score[e], id = e;
    const float top = SIMD_MAX(best);
    id = SIMD_MIN(best == top ? id : 0xffffffffu);
    id = min(id, a.experts - 1);  // NaN scores choose something that exists
    if (id % 32 == lane) score[id] = -as_type<float>(0x7f800000u);
    if (rank == 0) best0 = top;
    const float w = exp(top - best0);
    sum += w;
    if (lane == 0) {
      ids[token * a.k + rank] = id;
      slots[token * a.k + rank] = table[id];
      weights[token * (a.k + 1) + rank] = w;
    }
  }
  if (a.renormalise == 0) {
    sum = 0;
    for (uint e = lane; e < a.experts; e += 32) sum += exp(row[e] - best0);
    sum = SIMD_SUM(sum);
  }
  if (lane != 0) return;
  for (uint rank = 0; rank < a.k; rank++) weights[token * (a.k + 1) + rank] /= sum;
  weights[token * (a.k + 1) + a.k] = a.shared != 0 ? 1.0f / (1.0f + exp(-row[a.gate_at])) : 0.0f;
}
