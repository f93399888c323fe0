//! The delta net and attention between their projections.

use super::{Bench, CLOSE, Trouble, difference, rows, values};
use crate::{
    device::{Gpu, Region},
    ops::{
        self, DeltaHeads, HeadNorm, Rotation,
        plan::{self, Attend, Cache, Decay, Delta, Turn},
    },
};
use candle_core::{Device, Tensor};

const EPS: f32 = 1e-6;

pub fn delta_net<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    delta(b, Delta { key_heads: 1, value_heads: 2, dk: 128, dv: 32, eps: EPS })?;
    delta(b, Delta { key_heads: 1, value_heads: 1, dk: 256, dv: 16, eps: EPS })
}

fn delta<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, op: Delta) -> Result<(), Trouble> {
    let (tokens, width, channels, count) = (3, op.width(), op.channels(), op.values());
    let proj = b.random.floats(tokens * width);
    let (taps, before) = (b.random.floats(4 * channels), b.random.floats(3 * channels));
    let (rate, bias) = (b.random.floats(op.value_heads), b.random.floats(op.value_heads));
    let rate: Vec<f32> = rate.iter().map(|a| -a.exp()).collect();
    let (state, w) = (b.random.floats(count * op.dk), b.random.floats(op.dv));

    // The CPU.
    let all = rows(&proj, width)?;
    let heads = DeltaHeads {
        key_heads: op.key_heads,
        value_heads: op.value_heads,
        key_dim: op.dk,
        value_dim: op.dv,
        decay: rate.clone(),
        dt_bias: bias.clone(),
    };
    let conv_state = rows(&before, channels)?;
    let mixed = ops::conv(&b.compute, &all.narrow(1, 0, channels)?, &rows(&taps, channels)?, &conv_state)?;
    let gates = all.narrow(1, channels + count, 2 * op.value_heads)?;
    let heads_state = Tensor::from_slice(&state, (op.value_heads, op.dv, op.dk), &Device::Cpu)?;
    let o = ops::delta_rule(&b.compute, &heads, &mixed, &gates, &heads_state)?;
    let z = all.narrow(1, channels, count)?;
    let y = ops::gated_norm(&b.compute, &o, &z, &rows(&w, op.dv)?.flatten_all()?, EPS)?;
    let o = values(&o.transpose(0, 1)?.contiguous()?)?;
    // The GPU's convolution goes on to the norms of q and k, which the CPU's delta rule takes itself.
    let mut mixed = values(&mixed)?;
    for row in mixed.chunks_mut(channels) {
        for (index, head) in row[..2 * op.key_heads * op.dk].chunks_mut(op.dk).enumerate() {
            let norm = (head.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() + 1e-6).sqrt();
            let scale = if index < op.key_heads { (op.dk as f64).sqrt().recip() } else { 1.0 };
            head.iter_mut().for_each(|v| *v = (f64::from(*v) * scale / norm) as f32);
        }
    }

    // The GPU.
    let (proj_at, taps_at, conv_at) = (b.floats(&proj)?, b.floats(&taps)?, b.floats(&before)?);
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.floats(&bias)? };
    let (state_at, w_at) = (b.floats(&state)?, b.floats(&w)?);
    let (mixed_at, out, y_at) = (b.room(tokens * channels)?, b.room(tokens * count)?, b.room(tokens * count)?);
    let results = [(mixed_at, &mixed[..]), (conv_at, &values(&conv_state)?)];
    b.check(&plan::conv(&op, tokens, proj_at, taps_at, conv_at, mixed_at), &results)?;
    let results = [(out, &o[..]), (state_at, &values(&heads_state)?)];
    b.check(&plan::delta(&op, tokens, proj_at, mixed_at, decay, state_at, out), &results)?;
    b.check(&plan::gated_norm(&op, tokens, out, proj_at, w_at, y_at), &[(y_at, &values(&y)?)])
}

pub fn attention<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    for dim in [128, 256] {
        for half in [false, true] {
            // The rows lie on both sides of the border of a part.
            let op = Attend { heads: 4, kv_heads: 2, dim, rotary: 32, eps: EPS, context: 264, half };
            attend(b, op, 255, 2)?;
        }
    }
    Ok(())
}

fn attend<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, op: Attend, start: usize, tokens: usize) -> Result<(), Trouble> {
    let (width, dim, room) = (op.width(), op.dim, op.kv_heads * op.context * op.dim);
    let proj = b.random.floats(tokens * width);
    let norms = [b.random.floats(dim), b.random.floats(dim)];
    let round = |v: &mut f32| *v = if op.half { half::bf16::from_f32(*v).to_f32() } else { *v };
    let mut old = [b.random.floats(room), b.random.floats(room)];
    old.iter_mut().flatten().for_each(round);
    let rotation = Rotation::new(start, tokens, op.rotary, 1e4);

    // Norms, rotation and the cache on the CPU.
    let [q_norm, k_norm] = [0, 1].map(|i| HeadNorm { weight: &norms[i], eps: EPS });
    let all = rows(&proj, width)?;
    let q_gate = all.narrow(1, 0, 2 * op.heads * dim)?;
    let (k, v) = (op.heads * 2 * dim, op.kv_heads * dim);
    let q = ops::queries(&b.compute, &q_gate, q_norm, &rotation)?;
    let cache = |data: &[f32]| Tensor::from_slice(data, (op.kv_heads, op.context, dim), &Device::Cpu);
    let (keys, vals) = (cache(&old[0])?, cache(&old[1])?);
    ops::remember(&keys, &all.narrow(1, k, v)?, start, Some((k_norm, &rotation)))?;
    ops::remember(&vals, &all.narrow(1, k + v, v)?, start, None)?;

    // The same on the GPU.
    let store = |b: &mut Bench<'_, G>, data: &[f32]| match op.half {
        true => b.bytes(&data.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect::<Vec<_>>()),
        false => b.floats(data),
    };
    let at = Cache { keys: store(b, &old[0])?, values: store(b, &old[1])? };
    let turn: Vec<f32> = rotation.pairs().iter().flat_map(|(cos, sin)| [*cos, *sin]).collect();
    let turn = Turn { q_norm: b.floats(&norms[0])?, k_norm: b.floats(&norms[1])?, turn: b.floats(&turn)? };
    let (proj_at, q_at) = (b.floats(&proj)?, b.room(tokens * op.heads * dim)?);
    let dispatch = plan::attend_place(&op, start, tokens, proj_at, turn, q_at, at);
    b.check(&dispatch, &[(q_at, &values(&q)?)])?;
    let mut seen = Vec::new();
    for (region, tensor) in [(at.keys, &keys), (at.values, &vals)] {
        let found = read_cache(b, region, op.half)?;
        // A unit of bf16's last place where the two round differently.
        b.enter(dispatch.kernel, difference(&found, &values(tensor)?), if op.half { 1.0 / 128.0 } else { CLOSE });
        seen.push(cache(&found)?);
    }

    // Attention over the GPU's own cache, on both.
    let o = ops::attend(&b.compute, &q, &seen[0], &seen[1], start)?;
    let y = ops::gate(&b.compute, &o, &q_gate, dim)?;
    let (parts, y_at) = (b.room(op.scratch(start, tokens))?, b.room(tokens * op.heads * dim)?);
    let attend = plan::attend(&op, start, tokens, q_at, at, parts);
    if b.run(&attend) {
        let join = plan::attend_join(&op, start, tokens, proj_at, parts, y_at);
        let y = values(&y)?;
        b.check(&join, &[(y_at, &y)])?;
        // What the join made of its parts speaks for the parts, too.
        let found = b.gpu.read_floats(y_at)?;
        b.enter(attend.kernel, difference(&found, &y), CLOSE);
    }
    Ok(())
}

fn read_cache<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, region: Region, half: bool) -> Result<Vec<f32>, Trouble> {
    if !half {
        return Ok(b.gpu.read_floats(region)?);
    }
    let bytes = b.read(region)?;
    Ok(bytes.chunks_exact(2).map(|v| half::bf16::from_le_bytes([v[0], v[1]]).to_f32()).collect())
}
