// Kernels with planted faults. The host run must report each of them.

struct FaultArgs { uint n; };

KERNEL(fine, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  SHARED(float, part, 64);
  part[tid] = x[tid];
  BARRIER();
  y[tid] = part[63 - tid] + SIMD_SUM(1.0f) + SIMD_MAX(float(lane)) + float(SIMD_MIN(lane + 5u));
}
KERNEL(reads_too_far, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[tid] = x[tid + 1]; }
KERNEL(reads_too_early, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[tid] = (x - 1)[tid]; }
KERNEL(writes_too_far, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[tid + (tid == 63 ? 1 : 0)] = x[tid]; }
KERNEL(overruns_threadgroup_memory, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  SHARED(float, part, 63);
  part[tid] = x[tid];
  y[tid] = part[tid];
}
KERNEL(some_skip_the_barrier, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  if (sg == 0) BARRIER();
  y[tid] = x[tid];
}
KERNEL(some_return_before_the_barrier, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  y[tid] = x[tid];
  if (lane == 7) return;
  BARRIER();
}
KERNEL(meets_at_two_barriers, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  if (tid < 32) {
    BARRIER();
  } else {
    BARRIER();
  }
  y[tid] = x[tid];
}
KERNEL(some_skip_the_sum, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  y[tid] = lane < 16 ? SIMD_SUM(x[tid]) : 0.0f;
}
KERNEL(races, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  AWAIT();
  SHARED(float, part, 64);
  part[tid] = x[tid];
  y[tid] = tid == 0 ? x[0] : part[63 - tid];
}
KERNEL(races_across_threadgroups, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[0] = x[tid] + float(tgid.x); y[tid] = y[0]; }
KERNEL(shifts_too_far, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[tid] = x[tid] + float(1u << (a.n + tid)); }
KERNEL(is_wrong, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); y[tid] = tid == 41 ? x[tid] * 1.0001f : x[tid]; }
KERNEL(reads_before_the_copy, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  SHARED(uint, copied, 64);
  ASYNC_COPY(copied + tid, (DEVICE const uint*)x + tid);
  ASYNC_COMMIT();
  ASYNC_COPY(copied + tid, (DEVICE const uint*)x + tid);
  ASYNC_COMMIT();
  AWAIT();
  if (a.n != 0) { ASYNC_WAIT(1); }
  y[tid] = as_type<float>(copied[tid]);
}
KERNEL(leaves_out_one, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { AWAIT(); if (tid != 13) y[tid] = x[tid]; }
KERNEL(does_not_wait, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) { y[tid] = x[tid]; }
KERNEL(some_do_not_wait, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  if (tid != 40) AWAIT();
  y[tid] = x[tid];
}
KERNEL(asks_for_too_much, ARGS(FaultArgs, a), IN(float, x, 1), OUT(float, y, 2)) {
  PREFETCH(x, 260);
  AWAIT();
  y[tid] = x[tid];
}
