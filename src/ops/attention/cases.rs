//! Checks of this operation: GPU against CPU.

use super::{
    Attention, AttentionShape, KvCache, KvFormat, KvWrite, PAGE, QkNormRope, RecentRing,
    kv_quant::{bits, dequantize_rows},
};
use crate::{
    device::{DeviceError, Region},
    ops::{
        Backend,
        check::{CLOSE, HALF, KernelCheck, difference},
    },
};

pub(in crate::ops) fn cases(b: &mut KernelCheck<'_>) -> Result<(), DeviceError> {
    for dim in [128, 256] {
        for format in [KvFormat::F32, KvFormat::Bf16] {
            let shape = AttentionShape {
                heads: 4,
                kv_heads: 2,
                dim,
                rope_dim: 32,
                eps: 1e-6,
                context: 264,
                format,
                recent: None,
            };
            // The rows are on both sides of a split boundary.
            case(b, &shape, 255, 2)?;
        }
        for format in [KvFormat::Eight, KvFormat::Four] {
            quantized_kv(b, dim, format)?;
        }
    }
    Ok(())
}

/// CPU and GPU use the same quantized format. A value halfway between two integers may round to either.
fn quantized_kv(b: &mut KernelCheck<'_>, dim: usize, format: KvFormat) -> Result<(), DeviceError> {
    let recent = Some(RecentRing { room: 320, format: KvFormat::F32 });
    let shape = &AttentionShape { heads: 2, kv_heads: 1, dim, rope_dim: 32, eps: 1e-6, context: 150, format, recent };
    let tokens = 140;
    let proj = b.random(tokens * shape.width())?;
    let turn: Vec<f32> = (0..tokens * shape.rope_dim / 2).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let turn = QkNormRope { q_norm: b.random(dim)?, k_norm: b.random(dim)?, rope_table: b.floats(&turn)? };
    let (q, y) = (b.room(tokens * shape.heads * dim)?, b.room(tokens * shape.heads * dim)?);
    let partials = b.room(shape.partials(tokens - 2, 2))?;
    let mut empty = |bytes: usize| b.bytes(&vec![0; bytes]);
    let cache = KvCache {
        keys: empty(shape.cache_bytes())?,
        values: empty(shape.cache_bytes())?,
        table: Region::default(),
        recent: [empty(shape.recent_bytes())?, empty(shape.recent_bytes())?],
    };
    let table = b.words(&[0])?;
    let cache = KvCache { table, ..cache };
    let op = KvWrite { shape, start: 0, tokens, proj, norm_rope: turn, q, cache };
    b.cpu.execute(&op.into())?;
    let ran = b.launch(op.launch());
    for region in [q, cache.recent[0], cache.recent[1]] {
        let (expected, found) = (b.on_cpu(region)?, b.on_gpu(region)?);
        b.enter(&ran, difference(&found, &expected), CLOSE);
    }
    for region in [cache.keys, cache.values] {
        let mut bytes = [vec![0; region.len], vec![0; region.len]];
        b.cpu.read(region, &mut bytes[0])?;
        b.gpu.read(region, &mut bytes[1])?;
        let [expected, found] = bytes.each_ref().map(|bytes| dequantize_rows(bits(format).unwrap_or(8), bytes, dim));
        b.enter(&ran, difference(&found, &expected), if format == KvFormat::Eight { 0.01 } else { 0.15 });
        let off = expected.iter().zip(&found).filter(|(a, b)| (*a - *b).abs() > 1e-3).count();
        b.enter(&ran, off as f64 / expected.len() as f64, 1e-3);
        // Both devices attend over the GPU's cache.
        b.cpu.write(region, &bytes[1])?;
    }
    for region in [q, cache.recent[0], cache.recent[1]] {
        let found = b.on_gpu(region)?;
        b.cpu.write(region, bytemuck::cast_slice(&found))?;
    }
    // The last two rows, which read the ring and one block of quantized rows.
    let (start, width) = (tokens - 2, shape.heads * dim);
    let (q, proj) = (q.rows(start, 2, width), proj.rows(start, 2, shape.width()));
    let y = y.floats(2 * width);
    let op = Attention { shape, start, tokens: 2, q, cache, proj, partials, y };
    b.cpu.execute(&op.into())?;
    let expected = b.on_cpu(y)?;
    let mut ran = Vec::new();
    for launch in op.launches(2).flatten() {
        ran.extend(b.launch(launch));
    }
    // The CPU rounds queries and weights to 16 bits.
    let found = b.on_gpu(y)?;
    b.enter(&ran, difference(&found, &expected), 1e-3);
    Ok(())
}

/// The CPU stores f32, whatever the GPU's format.
fn case(b: &mut KernelCheck<'_>, shape: &AttentionShape, start: usize, tokens: usize) -> Result<(), DeviceError> {
    let (dim, plain) = (shape.dim, AttentionShape { format: KvFormat::F32, ..*shape });
    let half = shape.format == KvFormat::Bf16;
    let proj = b.random(tokens * shape.width())?;
    let turn: Vec<f32> = (0..tokens * shape.rope_dim / 2).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let turn = QkNormRope { q_norm: b.random(dim)?, k_norm: b.random(dim)?, rope_table: b.floats(&turn)? };
    let queries = tokens * shape.heads * dim;
    let (q, y) = (b.room(queries)?, b.room(queries)?);
    let partials = b.room(shape.partials(start, tokens))?;
    let mut caches = [Region::default(); 2];
    for cache in &mut caches {
        let old = b.random.floats(shape.kv_heads * shape.pages() * PAGE * dim);
        *cache = b.floats(&old)?;
        store(b, *cache, &old, half)?;
    }
    // Page numbers in descending order.
    let table = b.words(&(0..shape.pages() as u32).rev().collect::<Vec<_>>())?;
    let cache = KvCache { keys: caches[0], values: caches[1], table, recent: Default::default() };
    let op = |shape| KvWrite { shape, start, tokens, proj, norm_rope: turn, q, cache };
    b.cpu.execute(&op(&plain).into())?;
    let ran = b.launch(op(shape).launch());
    let expected = b.on_cpu(q)?;
    b.expect(CLOSE, &ran, q, &expected)?;
    for region in caches {
        let (found, expected) = (load(b, region, half)?, b.on_cpu(region)?);
        // One unit in the last place of bf16, where the two round differently.
        b.enter(&ran, difference(&found, &expected), if half { 1.0 / 128.0 } else { CLOSE });
        // Both devices attend over the GPU's cache.
        b.cpu.write(region, bytemuck::cast_slice(&found))?;
    }
    let op = |shape| Attention { shape, start, tokens, q, cache, proj, partials, y };
    let queries = b.on_gpu(q)?;
    b.cpu.write(q, bytemuck::cast_slice(&queries))?;
    b.cpu.execute(&op(&plain).into())?;
    let expected = b.on_cpu(y)?;
    let mut ran = Vec::new();
    for launch in op(shape).launches(tokens).flatten() {
        ran.extend(b.launch(launch));
    }
    // The merged result depends on every partial result, so this checks both kernels.
    b.expect(CLOSE, &ran, y, &expected)?;
    if b.gpu.limits().half {
        for launch in op(shape).halves() {
            let ran = b.launch(launch);
            b.expect(HALF, &ran, y, &expected)?;
        }
    }
    Ok(())
}

/// Stores `values` in the GPU's cache format, and the rounded values on the CPU.
fn store(b: &mut KernelCheck<'_>, region: Region, values: &[f32], half: bool) -> Result<(), DeviceError> {
    if !half {
        return Ok(());
    }
    let bytes: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
    let rounded: Vec<f32> = values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
    b.gpu.write(region, &bytes)?;
    b.cpu.write(region, bytemuck::cast_slice(&rounded))
}

fn load(b: &mut KernelCheck<'_>, region: Region, half: bool) -> Result<Vec<f32>, DeviceError> {
    let values = b.on_gpu(region)?;
    if !half {
        return Ok(values);
    }
    let halves = bytemuck::cast_slice::<f32, u16>(&values);
    Ok(halves[..values.len()].iter().map(|bits| half::bf16::from_bits(*bits).to_f32()).collect())
}
