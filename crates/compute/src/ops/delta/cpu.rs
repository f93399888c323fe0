//! The delta rule on the CPU.

use super::{DeltaNet, DeltaNetRows, DeltaRule};
use crate::{
    device::{DeviceError, Region},
    ops::{
        Backend, Conv, DeltaShape, OutputGate,
        cpu::Cpu,
        norm::{multiply_sigmoid, multiply_silu, normalise},
        simd::{
            OutPtr, Vector, float,
            math::{exp, sigmoid},
            wide,
        },
    },
};
use std::ops::Range;

/// Number of rows of S in a prefill task. With keys of 128 values, the rows, keys and queries of a block stay in L1.
const ROWS: usize = 32;
/// Number of tokens in a block of a prefill task.
const TOKENS: usize = 32;

impl DeltaNetRows<'_> {
    /// The matrix products compute all rows at once, which reads each weight once. Convolution and delta rule run row by
    /// row on the state of the row's sequence. If `y` shares memory with `mixed`, a row of `y` overlaps no later row of
    /// `mixed`.
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let DeltaNet { in_proj, conv, rule, out_proj } = self.net;
        let shape = rule.shape;
        let channels = rule.shape.channels();
        let values = rule.shape.values();
        cpu.execute(&in_proj.into())?;
        for row in 0..rule.tokens {
            let [number, _] = cpu.memory.sequence(&self.rows, row);
            let of = |region: Region, width: usize| region.rows(row, 1, width);
            let proj = of(rule.proj, shape.width());
            let mixed = of(rule.mixed, channels);
            let state = conv.state.rows(number, 1, (shape.conv_width - 1) * channels);
            cpu.execute(&Conv { tokens: 1, proj, committed: 1, state, out: mixed, ..conv }.into())?;
            let state = rule.state.rows(number, 1, values * shape.key_dim);
            let out = of(rule.out, values);
            let y = of(rule.y, values);
            cpu.execute(&DeltaRule { tokens: 1, proj, mixed, committed: 1, state, out, y, ..rule }.into())?;
        }
        cpu.execute(&out_proj.into())
    }
}

impl DeltaRule<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens;
        let shape = self.shape;
        let key_heads = shape.key_heads;
        let value_heads = shape.value_heads;
        let key_dim = shape.key_dim;
        let value_dim = shape.value_dim;
        let channels = shape.channels();
        let values = shape.values();
        let width = shape.width();
        let keys = key_heads * key_dim;
        let Cpu { compute, memory, scratch, .. } = cpu;
        let proj = memory.floats(self.proj.floats(tokens * width));
        let mixed = memory.floats(self.mixed.floats(tokens * channels));
        let replay = self.replay;
        let committed = self.committed;
        let old = memory.floats(replay.mixed.floats(replay.rows * channels));
        let old_proj = memory.floats(replay.proj.floats(replay.rows * width));
        let rate = self.decay.rate.floats(value_heads);
        let bias = self.decay.dt_bias.floats(value_heads);
        let rate = memory.floats(rate);
        let bias = memory.floats(bias);
        let state = memory.floats_mut(self.state.floats(values * key_dim));
        let out = memory.floats_mut(self.out.floats(tokens * values));

        let all = replay.rows + tokens;
        // One new token and nothing to replay.
        let is_single = all == 1 && tokens == 1;
        // The gates of a token and head: `[beta, g]`.
        let gate = |at: usize, head: usize| {
            let (rows, at) = if at < replay.rows { (old_proj, at) } else { (proj, at - replay.rows) };
            let row = &rows[at * width + channels + values..][..2 * value_heads];
            [sigmoid(row[head]), exp(rate[head] * softplus(row[value_heads + head] + bias[head]))]
        };
        let query_key = |token: usize, head: usize| {
            let (q, k) = mixed[token * channels..][..2 * keys].split_at(keys);
            dot(&q[head * key_dim..][..key_dim], &k[head * key_dim..][..key_dim])
        };
        let qk = &mut scratch.qk;
        let gates = &mut scratch.gates;
        qk.resize(key_heads * tokens, 0.0);
        gates.resize(value_heads * all, [0.0; 2]);
        if !is_single {
            // Computed here because several tasks of a head use the same values. With one token, each task computes its
            // own values.
            compute.threads.run_pieces(gates, all, &|head, gates| {
                gates.iter_mut().enumerate().for_each(|(at, gates)| *gates = gate(at, head));
            });
            compute.threads.run_pieces(qk, tokens, &|head, qk| {
                qk.iter_mut().enumerate().for_each(|(token, qk)| *qk = query_key(token, head));
            });
        }
        let qk = &*qk;
        let gates = &*gates;
        let norm = memory.floats(self.norm.floats(value_dim));
        let y = memory.floats_mut(self.y.floats(tokens * values));
        let base_y = OutPtr(y.as_mut_ptr());
        // If `y` overlaps the input of other heads, it is written after all heads are done.
        let norm_in_task = is_single && !self.y.overlaps(self.mixed);
        // The gated norm of a head's output.
        let gated_norm = |token: usize, head: usize, o: &[f32], y: &mut [f32]| {
            normalise(o, norm, shape.eps, y);
            let z = &proj[token * width + channels + head * value_dim..][..value_dim];
            match shape.gate {
                OutputGate::Silu => multiply_silu(y, z),
                OutputGate::Sigmoid => multiply_sigmoid(y, z),
            }
        };
        // Rows of S are independent: a task computes some rows of one head for all tokens.
        let rows = if all == 1 { value_dim } else { value_dim.min(ROWS) };
        let tasks = value_dim.div_ceil(rows);
        let state = OutPtr(state.as_mut_ptr());
        let base = OutPtr(out.as_mut_ptr());
        compute.threads.run(value_heads * tasks, &|task| {
            let (OutPtr(state), OutPtr(out)) = (state, base);
            let head = task / tasks;
            let first = task % tasks * rows;
            let rows = rows.min(value_dim - first);
            // SAFETY: these rows of this head belong to this task. The state has `value_heads * value_dim` rows.
            let state = unsafe {
                std::slice::from_raw_parts_mut(state.add((head * value_dim + first) * key_dim), rows * key_dim)
            };
            let key_head = head / (value_heads / key_heads);
            let (own_qk, own_gates);
            let (qk, gates) = if is_single {
                own_qk = [query_key(0, key_head)];
                own_gates = [gate(0, head)];
                (&own_qk[..], &own_gates[..])
            } else {
                (&qk[key_head * tokens..][..tokens], &gates[head * all..][..all])
            };
            let inputs = HeadInputs { shape, replay: replay.rows, old, mixed, qk, gates, head, first };
            let at = head * value_dim + first;
            // The output of these rows for a token.
            // SAFETY: these outputs belong to this task.
            let out = |token: usize| unsafe { std::slice::from_raw_parts_mut(out.add(token * values + at), rows) };
            update_rows(state, &inputs, all, committed, out);
            if norm_in_task {
                // SAFETY: this head of the only token belongs to this task.
                let y = unsafe { std::slice::from_raw_parts_mut(base_y.add(at).0, value_dim) };
                gated_norm(0, head, out(0), y);
            }
        });
        if !norm_in_task {
            let out = &*out;
            compute.threads.run_pieces(y, values, &|token, y| {
                let heads = out[token * values..].chunks_exact(value_dim).zip(y.chunks_exact_mut(value_dim));
                heads.enumerate().for_each(|(head, (o, y))| gated_norm(token, head, o, y));
            });
        }
        Ok(())
    }
}

/// Updates rows of S with all tokens, the replayed ones first. `out` gives the memory for the output of a new token.
/// If `committed` is less than `tokens`, the later tokens may be rejected, so they do not change S.
fn update_rows<'a>(
    state: &mut [f32],
    inputs: &HeadInputs<'_>,
    tokens: usize,
    committed: usize,
    out: impl Fn(usize) -> &'a mut [f32],
) {
    let rows = state.len() / inputs.shape.key_dim;
    let replay = inputs.replay;
    // Tokens that may be rejected are not split into blocks.
    let block = if committed < tokens { tokens } else { tokens.min(TOKENS) };
    let mut results = [0.0; ROWS * TOKENS];
    let results = results.get_mut(..rows * block).unwrap_or_default();
    let in_registers = !results.is_empty()
        && (0..tokens).step_by(block).all(|from| {
            let some = from..tokens.min(from + block);
            let is_done = step_in_registers(state, inputs, some.clone(), committed, results);
            for (at, result) in some.zip(results.chunks(rows)).filter(|(at, _)| is_done && *at >= replay) {
                out(at - replay).copy_from_slice(result);
            }
            is_done
        });
    if in_registers {
        return;
    }
    let mut copy;
    let mut state = state;
    for index in 0..tokens {
        if index == committed {
            copy = state.to_vec();
            state = &mut copy;
        }
        let token = inputs.token(index);
        match token.read {
            Some(query) => step(state, query, token.k, &token.v[..rows], token.gates, out(index - replay)),
            None => replay_step(state, token.k, &token.v[..rows], token.gates),
        }
    }
}

/// Inputs of some rows of a head's S, from row `first` on: `replay` replayed tokens, then new tokens.
struct HeadInputs<'a> {
    shape: &'a DeltaShape,
    replay: usize,
    old: &'a [f32],
    mixed: &'a [f32],
    /// `q . k` of each new token of this head.
    qk: &'a [f32],
    /// `[beta, g]` of each token of this head, replayed tokens first.
    gates: &'a [[f32; 2]],
    head: usize,
    first: usize,
}

/// One token's inputs for some rows of one head. `v` starts at the first of these rows.
struct HeadToken<'a> {
    k: &'a [f32],
    v: &'a [f32],
    gates: [f32; 2],
    /// `None` for a replayed token, whose output is not needed.
    read: Option<ReadQuery<'a>>,
}

/// A query, and its product with the key of the same token.
#[derive(Clone, Copy)]
struct ReadQuery<'a> {
    q: &'a [f32],
    qk: f32,
}

impl<'a> HeadInputs<'a> {
    #[inline(always)]
    fn token(&self, at: usize) -> HeadToken<'a> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = *self.shape;
        let channels = self.shape.channels();
        let keys = key_heads * key_dim;
        let key_head = self.head / (value_heads / key_heads);
        let (rows, row) = if at < self.replay { (self.old, at) } else { (self.mixed, at - self.replay) };
        let row = &rows[row * channels..][..channels];
        let query = |token: usize| ReadQuery { q: &row[key_head * key_dim..][..key_dim], qk: self.qk[token] };
        HeadToken {
            k: &row[keys + key_head * key_dim..][..key_dim],
            v: &row[2 * keys + self.head * value_dim + self.first..][..value_dim - self.first],
            gates: self.gates[at],
            read: at.checked_sub(self.replay).map(query),
        }
    }
}

/// Number of 16-value vectors in a key. Only keys of this size stay in registers.
const KEY_VECTORS: usize = 8;
/// Maximum number of rows of S that stay in registers together.
const MAX_ROWS: usize = 3;

wide! {
    /// Updates rows of S with the tokens `at`, at most [`MAX_ROWS`] rows at a time, which stay in registers. Stores the
    /// rows as they are before token `committed`, or after the last token if `committed` is later. `out` receives the
    /// results of [`step`], `[tokens, rows]`. Returns false and does nothing if there are too few registers.
    fn step_in_registers(state: &mut [f32], inputs: &HeadInputs<'_>, at: Range<usize>, committed: usize, out: &mut [f32]) -> bool {
        let (state, rest) = state.as_chunks_mut::<16>();
        if !V::HAS_32_REGISTERS || inputs.shape.key_dim != 16 * KEY_VECTORS || !rest.is_empty() {
            return false;
        }
        let rows = state.len() / KEY_VECTORS;
        for (part, state) in state.chunks_mut(MAX_ROWS * KEY_VECTORS).enumerate() {
            let row = part * MAX_ROWS;
            let at = at.clone();
            match state.len() / KEY_VECTORS {
                MAX_ROWS => step_rows::<V, MAX_ROWS>(state, inputs, at, committed, out, row, rows),
                2 => step_rows::<V, 2>(state, inputs, at, committed, out, row, rows),
                _ => step_rows::<V, 1>(state, inputs, at, committed, out, row, rows),
            }
        }
        true
    }
}

/// [`step_in_registers`] for `R` of `rows` rows, from `row` on. Performs the same operations in the same order as
/// [`step`] and [`replay_step`].
#[inline(always)]
fn step_rows<V: Vector, const R: usize>(
    state: &mut [[f32; 16]],
    inputs: &HeadInputs<'_>,
    tokens: Range<usize>,
    committed: usize,
    out: &mut [f32],
    row: usize,
    rows: usize,
) {
    let store = |s: &[[V; KEY_VECTORS]; R], state: &mut [[f32; 16]]| {
        for (s, to) in s.iter().flatten().zip(state) {
            s.store(to);
        }
    };
    let mut s = [[V::splat(0.0); KEY_VECTORS]; R];
    for (s, from) in s.iter_mut().flatten().zip(&*state) {
        *s = V::load(from);
    }
    for (index, at) in tokens.clone().enumerate() {
        if at == committed {
            store(&s, state);
        }
        let HeadToken { k, v, gates: [beta, g], read } = inputs.token(at);
        let k = &k.as_chunks::<16>().0[..KEY_VECTORS];
        let mut known = [V::splat(0.0); R];
        let mut d = [0.0; R];
        if let Some(ReadQuery { q, qk }) = read {
            let q = &q.as_chunks::<16>().0[..KEY_VECTORS];
            let mut seen = [V::splat(0.0); R];
            for c in 0..KEY_VECTORS {
                let k = V::load(&k[c]);
                let q = V::load(&q[c]);
                for r in 0..R {
                    known[r] = s[r][c].fma(k, known[r]);
                    seen[r] = s[r][c].fma(q, seen[r]);
                }
            }
            for r in 0..R {
                d[r] = beta * (v[row + r] - g * known[r].sum());
                out[index * rows + row + r] = d[r].mul_add(qk, g * seen[r].sum());
            }
        } else {
            for c in 0..KEY_VECTORS {
                let k = V::load(&k[c]);
                for r in 0..R {
                    known[r] = s[r][c].fma(k, known[r]);
                }
            }
            for r in 0..R {
                d[r] = beta * (v[row + r] - g * known[r].sum());
            }
        }
        let g = V::splat(g);
        let d = d.map(V::splat);
        let none = V::splat(-0.0);
        for c in 0..KEY_VECTORS {
            let k = V::load(&k[c]);
            for r in 0..R {
                // A fused multiply-add of -0 rounds the product `d k` on its own, as [`step`] does.
                s[r][c] = g.fma(s[r][c], d[r].fma(k, none));
            }
        }
    }
    if committed >= tokens.end {
        store(&s, state);
    }
}

wide! {
    /// `s = g s + d k` with `d = beta (v - g s . k)` for some rows of S. `out` receives the new `s . q`, computed as
    /// `g s . q + d q . k` to save a second pass.
    fn step(state: &mut [f32], key: ReadQuery<'_>, k: &[f32], v: &[f32], gates: [f32; 2], out: &mut [f32]) {
        let ([beta, g], ReadQuery { q, qk }) = (gates, key);
        for ((s, v), out) in state.chunks_exact_mut(k.len()).zip(v).zip(out) {
            let [known, seen] = float::dot::<V, 2>(s, [k, q]);
            let d = beta * (v - g * known);
            for (s, k) in s.iter_mut().zip(k) {
                *s = g.mul_add(*s, d * k);
            }
            *out = d.mul_add(qk, g * seen);
        }
    }
}

wide! {
    /// The update of [`step`] without its output.
    fn replay_step(state: &mut [f32], k: &[f32], v: &[f32], gates: [f32; 2]) {
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

impl DeltaNet<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { in_proj, conv, rule, out_proj } = *self;
        cpu.execute(&in_proj.into())?;
        cpu.execute(&conv.into())?;
        cpu.execute(&rule.into())?;
        cpu.execute(&out_proj.into())
    }
}
