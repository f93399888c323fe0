//! Checks of `block_attention`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver, Region},
    ops::{
        Attention, AttentionShape, Backend, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing, SequenceRows,
        attention::PAGE,
        block_attention::{BlockAttention, BlockAttentionRows, IndexCache, IndexerShape},
        check::{CLOSE, HALF, KernelCheck, difference},
    },
};

/// Maximum number of positions of the sequence, which has two pages.
const CONTEXT: usize = 320;
/// Maximum number of rows in one call.
const MAX_CALL: usize = 210;
/// Number of recent positions that a quantized cache also has exactly.
const RING: usize = 384;
/// Maximum number of rows in one part of a call. The rows of a part are launched together.
const MAX_PART: usize = 60;

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let shape = IndexerShape { heads: 4, dim: 16, rope_dim: 8, ratio: 4, blocks: 6, eps: 1e-6 };
    // In order: rows that attend to all blocks, a prompt whose later rows attend to selected blocks, a block that
    // closes token by token, a prompt that is launched in parts and crosses a page, and decoding.
    let calls = [11, 36, 1, 1, 1, 210, 1, 1, 1, 1];
    case(b, &shape, KvFormat::F32, &calls, false)?;
    // On matrix units, a row attends in several steps, and a head has more columns than a part of the score.
    let many = IndexerShape { blocks: 40, ..shape };
    case(b, &many, KvFormat::I16, &[180, 20, 1], false)?;
    // The last rows attend to blocks before, in and across the start of the recent positions.
    case(b, &many, KvFormat::Eight, &[200, 30, 1], false)?;
    case(b, &many, KvFormat::Four, &[200, 1], false)?;
    // There are only three different block keys. Therefore many blocks have the lowest selected score.
    case(b, &shape, KvFormat::F32, &[100, 1], true)?;
    // About half of the scores are 0, and more than half are selected. The last lanes of a product are empty.
    let single = IndexerShape { heads: 1, dim: 20, rope_dim: 4, ratio: 8, blocks: 12, eps: 1e-6 };
    case(b, &single, KvFormat::F32, &[170, 1], false)?;
    // The length of a block does not divide a page, so a block crosses pages. It closes in a later call.
    let odd = IndexerShape { ratio: 3, ..shape };
    case(b, &odd, KvFormat::F32, &[100, 156, 1, 1, 40], false)?;
    rows_of_sequences(b, &shape)
}

/// Checks one row of each of two sequences. Both rows complete a block.
fn rows_of_sequences(b: &mut KernelCheck<'_, impl Driver>, indexer: &IndexerShape) -> Result<(), DeviceError> {
    let shape = &AttentionShape {
        heads: 4,
        kv_heads: 2,
        dim: 40,
        rope_dim: indexer.rope_dim,
        eps: 1e-6,
        context: CONTEXT,
        format: KvFormat::F32,
        recent: None,
    };
    let pages = 2 * shape.pages();
    let words: Vec<u32> = (0..pages as u32).rev().collect();
    let keys_of_cache = pages * shape.page_bytes() / 4;
    let cache = KvCache {
        keys: b.random(keys_of_cache)?,
        values: b.random(keys_of_cache)?,
        table: b.words(&words)?,
        recent: Default::default(),
    };
    let capacity = 4 * indexer.ratio;
    let index_cache = IndexCache {
        keys: b.random(pages * indexer.key_bytes(PAGE) / 4)?,
        recent: b.random(2 * capacity * indexer.recent_width())?,
        capacity,
    };
    // Row 0 belongs to sequence 1, row 1 to sequence 0.
    let rows = SequenceRows { starts: [39, 263], table: b.words(&[1, 263, 0, 39])? };
    let turn: Vec<f32> = (0..shape.rope_dim).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let rope_table = b.floats(&turn)?;
    let mut norms = |width: usize| {
        Ok::<_, DeviceError>(QkNormRope { q_norm: b.random(width)?, k_norm: b.random(width)?, rope_table })
    };
    let [norm_rope, of_index] = [norms(shape.dim)?, norms(indexer.dim)?];
    let proj = b.random(2 * shape.width())?;
    let index = b.random(2 * indexer.width())?;
    let [q, y] = [b.buffer(2 * shape.heads * shape.dim)?, b.buffer(2 * shape.heads * shape.dim)?];
    let partials = b.buffer(2 * indexer.gpu_scratch(shape, CONTEXT))?;
    let write = KvWrite { shape, start: 0, tokens: 2, proj, norm_rope, q, cache };
    let attention = Attention { shape, start: 0, tokens: 2, q, cache, proj, partials, y };
    let attend = BlockAttention { attention, indexer, index, norm_rope: of_index, cache: index_cache };
    let ran = b.run(&BlockAttentionRows { write, attend, rows })?;
    let [write, index_rows, _, _, _, merge] = ran[..] else { return Ok(()) };
    let regions = [(write, cache.keys), (index_rows, index_cache.keys), (index_rows, index_cache.recent), (merge, y)];
    for (kernel, region) in regions {
        let expected = b.on_cpu(region)?;
        b.expect(CLOSE, &[kernel], region, &expected)?;
    }
    Ok(())
}

/// Checks consecutive calls with these numbers of rows. If `alike` is true, three blocks repeat and RoPE rotates
/// nothing.
fn case(
    b: &mut KernelCheck<'_, impl Driver>,
    indexer: &IndexerShape,
    format: KvFormat,
    calls: &[usize],
    alike: bool,
) -> Result<(), DeviceError> {
    let heads = 4;
    let kv_heads = 2;
    let is_quantized = matches!(format, KvFormat::Eight | KvFormat::Four);
    let dim = match format {
        KvFormat::F32 => 40,
        KvFormat::I16 => 200,
        KvFormat::Eight | KvFormat::Four => 64,
    };
    let rope_dim = indexer.rope_dim;
    let recent = is_quantized.then_some(RecentRing { capacity: RING, format: KvFormat::F32 });
    let shape = &AttentionShape { heads, kv_heads, dim, rope_dim, eps: 1e-6, context: CONTEXT, format, recent };
    let table = b.words(&[1, 0])?;
    let mut zeros = |bytes: usize| b.bytes(&vec![0; bytes]);
    let [keys, values] = [zeros(shape.cache_bytes())?, zeros(shape.cache_bytes())?];
    let recent = [zeros(shape.recent_bytes())?, zeros(shape.recent_bytes())?];
    let cache = KvCache { keys, values, table, recent };
    let index_cache = IndexCache {
        keys: b.bytes(&vec![0; shape.pages() * indexer.key_bytes(PAGE)])?,
        recent: b.bytes(&vec![0; (MAX_CALL + indexer.ratio) * indexer.recent_width() * 4])?,
        capacity: MAX_CALL + indexer.ratio,
    };
    let mut norms = [Region::default(); 4];
    for (norm, width) in norms.iter_mut().zip([dim, dim, indexer.dim, indexer.dim]) {
        *norm = b.random(width)?;
    }
    let repeated = b.random.floats(3 * indexer.ratio * indexer.width());
    let partials = b.buffer(MAX_PART * indexer.gpu_scratch(shape, CONTEXT))?;
    let mut start = 0;
    for tokens in calls.iter().copied() {
        let angle = |at: usize| if alike { 0.0 } else { (at / (rope_dim / 2) * (1 + at % (rope_dim / 2))) as f32 };
        let turn = (start * rope_dim / 2..(start + tokens) * rope_dim / 2).map(angle);
        let rope_table = b.floats(&turn.flat_map(|angle| [angle.cos(), angle.sin()]).collect::<Vec<_>>())?;
        let norm_rope = |at: usize| QkNormRope { q_norm: norms[at], k_norm: norms[at + 1], rope_table };
        let index = if alike {
            let row = |at: usize| repeated.chunks_exact(indexer.width()).cycle().nth(at).unwrap_or_default();
            b.floats(&(start..start + tokens).flat_map(row).copied().collect::<Vec<_>>())?
        } else {
            b.random(tokens * indexer.width())?
        };
        let proj = b.random(tokens * shape.width())?;
        let values = tokens * heads * dim;
        let q = b.buffer(values)?;
        let y = b.buffer(values)?;
        let write = KvWrite { shape, start, tokens, proj, norm_rope: norm_rope(0), q, cache };
        b.cpu.execute(&write.into())?;
        // Both devices attend over the CPU's queries, keys and values.
        for region in [q, cache.keys, cache.values, cache.recent[0], cache.recent[1]] {
            let mut bytes = vec![0; region.len];
            b.cpu.read(region, &mut bytes)?;
            b.gpu.write(region, &bytes)?;
        }
        let attention = Attention { shape, start, tokens, q, cache, proj, partials, y };
        let op = BlockAttention { attention, indexer, index, norm_rope: norm_rope(2), cache: index_cache };
        compare(b, &op)?;
        start += tokens;
    }
    Ok(())
}

/// Runs the operation on both devices. Selections must be equal.
fn compare(b: &mut KernelCheck<'_, impl Driver>, op: &BlockAttention<'_>) -> Result<(), DeviceError> {
    b.cpu.execute(&op.into())?;
    let on_cpu = std::mem::take(&mut b.cpu.scratch.selection);
    let shape = op.indexer;
    let tokens = op.attention.tokens;
    let width = shape.heads * shape.dim;
    let row_scores = on_cpu.scores.len() / tokens;
    for (part, _) in op.parts(MAX_PART, false, None) {
        let [rows, score, select, attend, merge] = part.part_launches(None).map(|launch| b.launch(launch));
        let first = part.attention.start - op.attention.start;
        let count = part.attention.tokens;
        let [queries, selected, _, scores] = part.scratch(false, None);
        b.expect(CLOSE, &rows, queries, &on_cpu.queries[first * width..][..count * width])?;
        let selected = b.on_gpu(selected)?;
        let scores = b.on_gpu(scores)?;
        for row in 0..count {
            let (closed, chosen) = part.closed(part.attention.start + row);
            let found = selected[row * shape.blocks..][..chosen].iter().map(|block| block.to_bits());
            let equal = found.eq(on_cpu.selected[(first + row) * shape.blocks..][..chosen].iter().copied());
            b.record(&select, if equal { 0.0 } else { f64::INFINITY }, CLOSE);
            // Rows that attend to all closed blocks have no scores.
            if closed > chosen {
                let found = &scores[row * (scores.len() / count)..][..closed];
                let expected = &on_cpu.scores[(first + row) * row_scores..][..closed];
                b.record(&score, difference(found, expected), CLOSE);
            }
        }
        for region in [op.cache.keys, op.cache.recent] {
            // Later parts write more of these regions, so the regions are compared after the last part.
            if first + count == tokens {
                let expected = b.on_cpu(region)?;
                b.expect(CLOSE, &rows, region, &expected)?;
            }
        }
        let expected = b.on_cpu(part.attention.y)?;
        b.expect(CLOSE, &[attend, merge].concat(), part.attention.y, &expected)?;
        if b.gpu.limits().uses_half_precision && op.attention.shape.recent.is_none() {
            let ran = b.launch(part.half_launch());
            b.expect(HALF, &ran, part.attention.y, &expected)?;
        }
    }
    Ok(())
}
