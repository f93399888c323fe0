// The router: softmax over all experts and the k largest. With `renormalise`, the weights of the k experts sum to 1,
// which equals the softmax of the k selected scores.
//
// Equal scores select the lower id. `table` maps ids to slots, so that the CPU need not see the ids before the experts
// run. If a selected expert has no slot, the router sets the skip flag (quant.metal). weights[k] of a token is
// the weight of the shared expert: sigmoid of its gate, in column `gate_at` of the scores.
//
// At most 1024 experts, and at most 31 per token. Grid (tokens), 32 threads.

struct RouteArgs { uint can_skip, experts, k, width, gate_at, shared, renormalise; };

// The choice of one token. Lane l holds the scores of experts l, l + 32, ...: COLUMNS scores.
template <uint COLUMNS>
FN void select_top_k(CONSTANT RouteArgs& a, DEVICE const float* row, DEVICE const uint* table, DEVICE uint* ids,
                     DEVICE uint* slots, DEVICE float* weights, DEVICE uint* skip THREAD_IDS_PARAM) {
  const float none = -as_type<float>(0x7f800000u), shared_gate = a.shared != 0 ? row[a.gate_at] : 0.0f;
  float score[COLUMNS];
  UNROLL for (uint j = 0; j < COLUMNS; j++) score[j] = lane + 32 * j < a.experts ? row[lane + 32 * j] : none;
  float first = 0, sum = 0, mine = 0;
  uint selected = 0;
  for (uint rank = 0; rank < a.k; rank++) {
    float best = none;
    uint id = a.experts - 1;
    UNROLL for (uint j = 0; j < COLUMNS; j++)
      if (score[j] > best) best = score[j], id = lane + 32 * j;
    const float top = SIMD_MAX(best);
    id = SIMD_MIN(best == top ? id : 0xffffffffu);
    id = min(id, a.experts - 1);  // NaN scores must still select an existing expert
    UNROLL for (uint j = 0; j < COLUMNS; j++)
      if (lane + 32 * j == id) score[j] = none;
    if (rank == 0) first = top;
    const float w = exp(top - first);
    sum += w;
    if (lane == rank) mine = w, selected = id;
  }
  if (a.renormalise == 0) {
    sum = 0;
    for (uint e = lane; e < a.experts; e += 32) sum += exp(row[e] - first);
    sum = SIMD_SUM(sum);
  }
  const uint slot = lane < a.k ? table[selected] : 0;
  if (lane < a.k) ids[lane] = selected, slots[lane] = slot, weights[lane] = mine / sum;
  if (a.can_skip != 0 && slot == NO_SLOT) *skip = 1;
  if (lane == 0) weights[a.k] = a.shared != 0 ? 1.0f / (1.0f + exp(-shared_gate)) : 0.0f;
}

KERNEL(router, ARGS(RouteArgs, a), IN(float, scores, 1), IN(uint, table, 2), OUT(uint, ids, 3), OUT(uint, slots, 4),
       OUT(float, weights, 5), OUT(uint, skip, 6)) {
  PREFETCH(table, a.experts * 4);
  AWAIT();
  DEVICE const float* row = scores + ulong(tgid.x) * a.width;
  DEVICE uint* to = ids + tgid.x * a.k;
  DEVICE float* weight = weights + tgid.x * (a.k + 1);
  if (a.experts <= 256) select_top_k<8>(a, row, table, to, slots + tgid.x * a.k, weight, skip THREAD_IDS);
  else if (a.experts <= 512) select_top_k<16>(a, row, table, to, slots + tgid.x * a.k, weight, skip THREAD_IDS);
  else select_top_k<32>(a, row, table, to, slots + tgid.x * a.k, weight, skip THREAD_IDS);
}
