use super::DeltaRule;
use crate::{
    device::DeviceError,
    ops::{
        cpu::Cpu,
        math::{exp, sigmoid},
        norm::{multiply, normalise},
        simd::{Out, float, wide},
    },
};

/// Rows of S in a task of prefill: with keys of 128 they stay in the first-level cache.
const ROWS: usize = 32;

impl DeltaRule<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (tokens, shape) = (self.tokens, self.shape);
        let (key_heads, value_heads, dk, dv) = (shape.key_heads, shape.value_heads, shape.dk, shape.dv);
        let (channels, values, width, keys) = (shape.channels(), shape.values(), shape.width(), key_heads * dk);
        let Cpu { compute, memory, scratch, .. } = cpu;
        let proj = memory.floats(self.proj.floats(tokens * width));
        let mixed = memory.floats(self.mixed.floats(tokens * channels));
        let (past, stored) = (self.past, self.stored);
        let old = memory.floats(past.mixed.floats(past.rows * channels));
        let old_proj = memory.floats(past.proj.floats(past.rows * width));
        let (rate, bias) = (self.decay.rate.floats(value_heads), self.decay.dt_bias.floats(value_heads));
        let (rate, bias) = (memory.floats(rate), memory.floats(bias));
        let state = memory.floats_mut(self.state.floats(values * dk));
        let out = memory.floats_mut(self.out.floats(tokens * values));

        let (same, gates) = (&mut scratch.same, &mut scratch.gates);
        same.clear();
        gates.clear();
        for token in 0..tokens {
            let (q, k) = mixed[token * channels..][..2 * keys].split_at(keys);
            same.extend(q.chunks_exact(dk).zip(k.chunks_exact(dk)).map(|(q, k)| dot(q, k)));
        }
        for row in old_proj.chunks_exact(width).chain(proj.chunks_exact(width)) {
            let row = &row[channels + values..][..2 * value_heads];
            gates.extend((0..value_heads).map(|head| {
                let step = softplus(row[value_heads + head] + bias[head]);
                [sigmoid(row[head]), exp(rate[head] * step)]
            }));
        }
        let (same, gates) = (&*same, &*gates);
        // Rows of S do not touch each other: a task walks some rows of one head through all tokens.
        let all = past.rows + tokens;
        let rows = if all == 1 { dv } else { dv.min(ROWS) };
        let tasks = dv.div_ceil(rows);
        let (state, base) = (Out(state.as_mut_ptr()), Out(out.as_mut_ptr()));
        compute.threads.run(value_heads * tasks, &|task| {
            let (Out(state), Out(out)) = (state, base);
            let (head, first) = (task / tasks, task % tasks * rows);
            let rows = rows.min(dv - first);
            // SAFETY: these rows of this head belong to this task; the state has `value_heads * dv` of them.
            let mut state = unsafe { std::slice::from_raw_parts_mut(state.add((head * dv + first) * dk), rows * dk) };
            let key_head = head / (value_heads / key_heads);
            let mut ahead;
            for at in 0..all {
                if at == stored {
                    // What follows may be taken back: it is walked on a copy.
                    ahead = state.to_vec();
                    state = &mut ahead;
                }
                let gates = gates[at * value_heads + head];
                let Some(token) = at.checked_sub(past.rows) else {
                    let row = &old[at * channels..][..channels];
                    advance(
                        state,
                        &row[keys + key_head * dk..][..dk],
                        &row[2 * keys + head * dv + first..][..rows],
                        gates,
                    );
                    continue;
                };
                let row = &mixed[token * channels..][..channels];
                let key = Key {
                    q: &row[key_head * dk..][..dk],
                    k: &row[keys + key_head * dk..][..dk],
                    same: same[token * key_heads + key_head],
                };
                let v = &row[2 * keys + head * dv + first..][..rows];
                // SAFETY: these rows of this head's outputs belong to this task.
                let out = unsafe { std::slice::from_raw_parts_mut(out.add(token * values + head * dv + first), rows) };
                step(state, key, v, gates, out);
            }
        });

        let (out, norm) = (&*out, memory.floats(self.norm.floats(dv)));
        let y = memory.floats_mut(self.y.floats(tokens * values));
        compute.threads.run_pieces(y, values, &|token, y| {
            for (o, y) in out[token * values..].chunks_exact(dv).zip(y.chunks_exact_mut(dv)) {
                normalise(o, norm, shape.eps, y);
            }
            multiply(y, &proj[token * width + channels..][..values]);
        });
        Ok(())
    }
}

/// One token's query and key for some heads, and `same = q . k`.
#[derive(Clone, Copy)]
struct Key<'a> {
    q: &'a [f32],
    k: &'a [f32],
    same: f32,
}

wide! {
    /// `s = g s + d k` with `d = beta (v - g s . k)` for some rows of S; `out` gets the new `s . q`, for which `q . k` spares
    /// a second pass: it is `g s . q + d q . k`.
    fn step(state: &mut [f32], key: Key<'_>, v: &[f32], gates: [f32; 2], out: &mut [f32]) {
        let ([beta, g], Key { q, k, same }) = (gates, key);
        for ((s, v), out) in state.chunks_exact_mut(k.len()).zip(v).zip(out) {
            let [known, seen] = float::dot::<V, 2>(s, [k, q]);
            let d = beta * (v - g * known);
            for (s, k) in s.iter_mut().zip(k) {
                *s = g.mul_add(*s, d * k);
            }
            *out = d.mul_add(same, g * seen);
        }
    }
}

wide! {
    /// The same, for a row whose `out` is known.
    fn advance(state: &mut [f32], k: &[f32], v: &[f32], gates: [f32; 2]) {
        let [beta, g] = gates;
        for (s, v) in state.chunks_exact_mut(k.len()).zip(v) {
            let [known] = float::dot::<V, 1>(s, [k]);
            let d = beta * (v - g * known);
            for (s, k) in s.iter_mut().zip(k) {
                *s = g.mul_add(*s, d * k);
            }
        }
    }
}

wide! {
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        float::dot::<V, 1>(a, [b])[0]
    }
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
