//! Checks of `block_attention`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver, Region},
    ops::{
        Attention, AttentionShape, Backend, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing,
        attention::PAGE,
        block_attention::{BlockAttention, IndexCache, IndexerShape},
        check::{CLOSE, KernelCheck, difference},
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
    case(b, &shape, KvFormat::I16, &calls[..3], false)?;
    // The last rows attend to blocks before, in and across the start of the recent positions.
    case(b, &IndexerShape { blocks: 40, ..shape }, KvFormat::Eight, &[200, 30, 1], false)?;
    case(b, &IndexerShape { blocks: 40, ..shape }, KvFormat::Four, &[200, 1], false)?;
    // There are only three different block keys. Therefore many blocks have the lowest selected score.
    case(b, &shape, KvFormat::F32, &[100, 1], true)?;
    // About half of the scores are 0, and more than half are selected. The last lanes of a product are empty.
    let single = IndexerShape { heads: 1, dim: 20, rope_dim: 4, ratio: 8, blocks: 12, eps: 1e-6 };
    case(b, &single, KvFormat::F32, &[170, 1], false)?;
    // The length of a block does not divide a page, so a block crosses pages. It closes in a later call.
    let odd = IndexerShape { ratio: 3, ..shape };
    case(b, &odd, KvFormat::F32, &[100, 156, 1, 1, 40], false)
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
    let dim = if is_quantized { 64 } else { 40 };
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
    let partials = b.buffer(MAX_PART * indexer.gpu_scratch(CONTEXT))?;
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
    for (part, _) in op.parts(MAX_PART, None) {
        let [rows, score, select, attend] = part.part_launches(None).map(|launch| b.launch(launch));
        let first = part.attention.start - op.attention.start;
        let count = part.attention.tokens;
        let [queries, selected, scores] = part.scratch(None);
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
        b.expect(CLOSE, &attend, part.attention.y, &expected)?;
    }
    Ok(())
}
