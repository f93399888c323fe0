//! Checks of `attention`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver, Region},
    ops::{
        Backend, SequenceRows,
        attention::{
            Attention, AttentionRows, AttentionShape, KvCache, KvFormat, KvWrite, PAGE, QkNormRope, RecentRing,
            kv_quant::{bits, dequantize_rows},
            max_splits,
        },
        check::{CLOSE, HALF, KernelCheck, difference},
    },
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    for dim in [128, 256] {
        for format in [KvFormat::F32, KvFormat::I16] {
            // Two, three and four query heads share a key.
            let (heads, kv_heads) = match (dim, format) {
                (128, KvFormat::F32) => (4, 2),
                (128, _) => (6, 2),
                _ => (8, 1),
            };
            let shape =
                AttentionShape { heads, kv_heads, dim, rope_dim: 32, eps: 1e-6, context: 264, format, recent: None };
            // The rows are on both sides of a split boundary.
            case(b, &shape, 255, 2)?;
            rows_of_sequences(b, &shape)?;
        }
        for format in [KvFormat::Eight, KvFormat::Four] {
            quantized_kv(b, dim, format)?;
        }
    }
    Ok(())
}

/// Checks that rows of two sequences give the same bytes in one launch as in one launch per row.
fn rows_of_sequences(b: &mut KernelCheck<'_, impl Driver>, shape: &AttentionShape) -> Result<(), DeviceError> {
    // Row 0 belongs to sequence 1, row 1 to sequence 0.
    let dim = shape.dim;
    let starts = [261, 40];
    let values = shape.heads * shape.dim;
    let proj = b.random(2 * shape.width())?;
    let rope: Vec<f32> = (0..shape.rope_dim).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let norm_rope = QkNormRope { q_norm: b.random(dim)?, k_norm: b.random(dim)?, rope_table: b.floats(&rope)? };
    let q = b.buffer(2 * values)?;
    let together = b.buffer(2 * values)?;
    let alone = b.buffer(2 * values)?;
    let partials = b.buffer(2 * shape.heads * max_splits(shape.context) * (dim + 2))?;
    let pages = 2 * shape.pages();
    let mut caches = [Region::default(); 2];
    for cache in &mut caches {
        let old = b.random.floats(if shape.recent.is_some() { 0 } else { shape.kv_heads * pages * PAGE * dim });
        let empty = vec![0; 2 * shape.cache_bytes()];
        *cache = b.bytes(&if old.is_empty() { empty } else { encode_rows(shape.format, &old, dim) })?;
    }
    let ring = 2 * shape.recent_bytes() / 4;
    let recent = [b.random(ring)?, b.random(ring)?];
    let table = b.words(&(0..pages as u32).rev().collect::<Vec<_>>())?;
    let cache = KvCache { keys: caches[0], values: caches[1], table, recent };
    let rows = SequenceRows { starts: [40, 261], table: b.words(&[1, 261, 0, 40])? };
    let write = KvWrite { shape, start: 0, tokens: 2, proj, norm_rope, q, cache };
    let attention = Attention { shape, start: 0, tokens: 2, q, cache, proj, partials, y: together };
    let mut ran = Vec::new();
    let on_tiles = b.gpu.attends_on_tiles();
    for launch in (AttentionRows { write, attention, rows }).launches(2, on_tiles) {
        ran.extend(b.launch(launch));
    }
    for (row, start) in starts.into_iter().enumerate() {
        let number = 1 - row;
        let of = |region: Region, width: usize| region.rows(row, 1, width);
        let table = table.rows(number, 1, shape.pages());
        let recent = recent.map(|ring| ring.part(number * shape.recent_bytes(), shape.recent_bytes()));
        let cache = KvCache { table, recent, ..cache };
        let proj = of(proj, shape.width());
        let q = of(q, values);
        let y = of(alone, values);
        let norm_rope = QkNormRope { rope_table: of(norm_rope.rope_table, shape.rope_dim), ..norm_rope };
        b.launch(KvWrite { shape, start, tokens: 1, proj, norm_rope, q, cache }.launch());
        let attention = Attention { shape, start, tokens: 1, q, cache, proj, partials, y };
        for launch in attention.launches(1, on_tiles).flatten() {
            b.launch(launch);
        }
    }
    let found = b.on_gpu(together)?;
    let expected = b.on_gpu(alone)?;
    b.record(&ran, if found == expected { 0.0 } else { f64::INFINITY }, CLOSE);
    Ok(())
}

/// Checks the 8-bit and 4-bit caches, whose format is the same on CPU and GPU. A value halfway between two integers may
/// round to either.
fn quantized_kv(b: &mut KernelCheck<'_, impl Driver>, dim: usize, format: KvFormat) -> Result<(), DeviceError> {
    let recent = Some(RecentRing { capacity: 320, format: KvFormat::F32 });
    let heads = if dim == 256 { 4 } else { 2 };
    let shape = &AttentionShape { heads, kv_heads: 1, dim, rope_dim: 32, eps: 1e-6, context: 150, format, recent };
    let tokens = 140;
    let proj = b.random(tokens * shape.width())?;
    let rope: Vec<f32> = (0..tokens * shape.rope_dim / 2).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let norm_rope = QkNormRope { q_norm: b.random(dim)?, k_norm: b.random(dim)?, rope_table: b.floats(&rope)? };
    let q = b.buffer(tokens * shape.heads * dim)?;
    let y = b.buffer(tokens * shape.heads * dim)?;
    let partials = b.buffer(shape.partials(tokens - 2, 2))?;
    let mut empty = |bytes: usize| b.bytes(&vec![0; bytes]);
    let cache = KvCache {
        keys: empty(shape.cache_bytes())?,
        values: empty(shape.cache_bytes())?,
        table: Region::default(),
        recent: [empty(shape.recent_bytes())?, empty(shape.recent_bytes())?],
    };
    let table = b.words(&[0])?;
    let cache = KvCache { table, ..cache };
    let op = KvWrite { shape, start: 0, tokens, proj, norm_rope, q, cache };
    b.cpu.execute(&op.into())?;
    let ran = b.launch(op.launch());
    for region in [q, cache.recent[0], cache.recent[1]] {
        let expected = b.on_cpu(region)?;
        let found = b.on_gpu(region)?;
        b.record(&ran, difference(&found, &expected), CLOSE);
    }
    for region in [cache.keys, cache.values] {
        let mut bytes = [vec![0; region.len], vec![0; region.len]];
        b.cpu.read(region, &mut bytes[0])?;
        b.gpu.read(region, &mut bytes[1])?;
        let [expected, found] = bytes.each_ref().map(|bytes| decode_rows(format, bytes, dim));
        b.record(&ran, difference(&found, &expected), if format == KvFormat::Eight { 0.01 } else { 0.15 });
        let off = expected.iter().zip(&found).filter(|(a, b)| (*a - *b).abs() > 1e-3).count();
        b.record(&ran, off as f64 / expected.len() as f64, 1e-3);
        // Both devices attend over the GPU's cache.
        b.cpu.write(region, &bytes[1])?;
    }
    for region in [q, cache.recent[0], cache.recent[1]] {
        let found = b.on_gpu(region)?;
        b.cpu.write(region, bytemuck::cast_slice(&found))?;
    }
    // Computes attention for the last two rows, which read the ring and one block of quantized rows.
    let start = tokens - 2;
    let width = shape.heads * dim;
    let q = q.rows(start, 2, width);
    let proj = proj.rows(start, 2, shape.width());
    let y = y.floats(2 * width);
    let op = Attention { shape, start, tokens: 2, q, cache, proj, partials, y };
    b.cpu.execute(&op.into())?;
    let expected = b.on_cpu(y)?;
    let mut ran = Vec::new();
    for launch in op.launches(2, false).flatten() {
        ran.extend(b.launch(launch));
    }
    // The CPU rounds queries and softmax weights to 16 bits, the GPU does not.
    let found = b.on_gpu(y)?;
    b.record(&ran, difference(&found, &expected), 1e-3);
    rows_of_sequences(b, &AttentionShape { context: 264, ..*shape })
}

/// Checks writing to a cache of 16 or 32 bits and attending over it. The format is the same on both devices.
fn case(
    b: &mut KernelCheck<'_, impl Driver>,
    shape: &AttentionShape,
    start: usize,
    tokens: usize,
) -> Result<(), DeviceError> {
    let dim = shape.dim;
    let proj = b.random(tokens * shape.width())?;
    let rope: Vec<f32> = (0..tokens * shape.rope_dim / 2).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let norm_rope = QkNormRope { q_norm: b.random(dim)?, k_norm: b.random(dim)?, rope_table: b.floats(&rope)? };
    let queries = tokens * shape.heads * dim;
    let q = b.buffer(queries)?;
    let y = b.buffer(queries)?;
    let partials = b.buffer(shape.partials(start, tokens))?;
    let mut caches = [Region::default(); 2];
    for cache in &mut caches {
        let old = b.random.floats(shape.kv_heads * shape.pages() * PAGE * dim);
        *cache = b.bytes(&encode_rows(shape.format, &old, dim))?;
    }
    // Page numbers in descending order.
    let table = b.words(&(0..shape.pages() as u32).rev().collect::<Vec<_>>())?;
    let cache = KvCache { keys: caches[0], values: caches[1], table, recent: Default::default() };
    let op = KvWrite { shape, start, tokens, proj, norm_rope, q, cache };
    b.cpu.execute(&op.into())?;
    let ran = b.launch(op.launch());
    let expected = b.on_cpu(q)?;
    b.expect(CLOSE, &ran, q, &expected)?;
    for region in caches {
        let mut bytes = [vec![0; region.len], vec![0; region.len]];
        b.cpu.read(region, &mut bytes[0])?;
        b.gpu.read(region, &mut bytes[1])?;
        let [expected, found] = bytes.each_ref().map(|bytes| decode_rows(shape.format, bytes, dim));
        // A value halfway between two integers may round to either.
        let allowed = if shape.format == KvFormat::I16 { 1.0 / 32_000.0 } else { CLOSE };
        b.record(&ran, difference(&found, &expected), allowed);
        // Both devices attend over the GPU's cache.
        b.cpu.write(region, &bytes[1])?;
    }
    let queries = b.on_gpu(q)?;
    b.cpu.write(q, bytemuck::cast_slice(&queries))?;
    let op = Attention { shape, start, tokens, q, cache, proj, partials, y };
    b.cpu.execute(&op.into())?;
    let expected = b.on_cpu(y)?;
    // Every start runs these checks, so they leave out a second run of the same kernel, and a kernel that this GPU does
    // not use.
    let has_two = b.gpu.attends_on_tiles() && shape.fits_tiles();
    for &on_tiles in if has_two { &[false, true][..] } else { &[false] } {
        let mut ran = Vec::new();
        for launch in op.launches(tokens, on_tiles).flatten() {
            ran.extend(b.launch(launch));
        }
        // The merged result depends on every partial result, so this checks both kernels. The CPU rounds the queries to
        // 16 bits if the cache has integers.
        let allowed = if shape.format == KvFormat::I16 { 1e-3 } else { CLOSE };
        b.expect(allowed, &ran, y, &expected)?;
    }
    if b.gpu.limits().uses_half_precision {
        for launch in op.half_launches(usize::MAX) {
            let ran = b.launch(launch);
            b.expect(HALF, &ran, y, &expected)?;
        }
    }
    Ok(())
}

/// Encodes blocks of rows of `dim` values in a cache format of at least 16 bits.
fn encode_rows(format: KvFormat, values: &[f32], dim: usize) -> Vec<u8> {
    if format == KvFormat::F32 {
        return bytemuck::cast_slice(values).to_vec();
    }
    let mut bytes = vec![0; values.len() / dim * format.row_bytes(dim)];
    for (rows, to) in values.chunks_exact(PAGE * dim).zip(bytes.chunks_exact_mut(PAGE * format.row_bytes(dim))) {
        let (codes, scales) = to.split_at_mut(PAGE * format.code_bytes(dim));
        let to = codes.chunks_exact_mut(2 * dim).zip(scales.chunks_exact_mut(4));
        for (row, (integers, scale)) in rows.chunks_exact(dim).zip(to) {
            let max = row.iter().fold(0f32, |max, value| max.max(value.abs()));
            for (value, to) in row.iter().zip(integers.chunks_exact_mut(2)) {
                to.copy_from_slice(&((value * (32_639.0 / max)).round_ties_even() as i16).to_le_bytes());
            }
            scale.copy_from_slice(&(max / 32_639.0).to_le_bytes());
        }
    }
    bytes
}

/// Decodes blocks of rows of `dim` values from a cache format.
fn decode_rows(format: KvFormat, bytes: &[u8], dim: usize) -> Vec<f32> {
    if format == KvFormat::F32 {
        return bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    }
    let block = |block: &[u8]| -> Vec<f32> {
        let (codes, scales) = block.split_at(PAGE * format.code_bytes(dim));
        if let Some(bits) = bits(format) {
            return dequantize_rows(bits, [codes, scales], dim);
        }
        let rows = codes.chunks_exact(2 * dim).zip(scales.chunks_exact(4));
        rows.flat_map(|(integers, scale)| {
            let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            integers.chunks_exact(2).map(move |b| f32::from(i16::from_le_bytes([b[0], b[1]])) * scale)
        })
        .collect()
    };
    bytes.chunks_exact(PAGE * format.row_bytes(dim)).flat_map(block).collect()
}
