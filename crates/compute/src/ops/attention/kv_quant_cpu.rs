//! Attention over 8-bit and 4-bit rows in integer arithmetic. Queries and softmax weights are rounded to 16 bits. Sums
//! within a group are exact. The f32 arithmetic that follows has one order, so all processors give the same bytes. This
//! is the portable version. [`super::kv_quant_avx512`] gives the same bytes.

use super::{
    BLOCK, GROUP, MAX_HEAD_DIM,
    kv_quant::{CodeRows, QuantizedKv, unpack_row},
    kv_quant_operands::{MAX_WEIGHT, QuantizedQueries, ValueScales},
};
use crate::ops::simd::{
    Isa,
    math::{ROUND, rounded},
    wide,
};
use std::ops::Range;

/// Scores of a block: `scores[n][i] = q[first + n] . key[seen.start + i]`. Both ends of `seen` are multiples of 32.
/// Also prefetches the block's values.
pub(super) fn qk<const N: usize>(
    queries: &QuantizedQueries,
    first: usize,
    [keys, values]: [&QuantizedKv<'_>; 2],
    head: usize,
    seen: Range<usize>,
    scores: &mut [[f32; BLOCK]; N],
) {
    let [rows, next] = [keys, values].map(|cache| cache.rows(head, seen.start, seen.len()));
    match Isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has AVX-512 with VNNI. `rows` are whole rows, and their number is a multiple of 32.
        Isa::Avx512 if seen.len().is_multiple_of(32) => unsafe {
            super::kv_quant_avx512::qk(queries, first, keys, [rows, next], scores)
        },
        _ => {
            let _ = next;
            plain_qk(queries, first, keys, rows, scores);
        }
    }
}

wide! {
    fn plain_qk[const N: usize](
        queries: &QuantizedQueries,
        first: usize,
        keys: &QuantizedKv<'_>,
        rows: CodeRows<'_>,
        scores: &mut [[f32; BLOCK]; N],
    ) {
        let mut integers = [0i16; MAX_HEAD_DIM];
        let mut scales = [0f32; MAX_HEAD_DIM / GROUP];
        let integers = &mut integers[..keys.dim];
        let scales = &mut scales[..keys.dim / GROUP];
        for (index, row) in rows.iter(keys).enumerate() {
            unpack_row(keys.bits, row, integers, scales);
            for (n, scores) in scores.iter_mut().enumerate() {
                let row = (first + n) * keys.dim..(first + n + 1) * keys.dim;
                let query = queries.high[row.clone()].chunks_exact(GROUP).zip(queries.low[row].chunks_exact(GROUP));
                let mut sum = 0f32;
                for (((high, low), key), scale) in query.zip(integers.chunks_exact(GROUP)).zip(&*scales) {
                    let digits = high.iter().zip(low).map(|(high, low)| 256 * i32::from(*high) + i32::from(*low));
                    let dot: i32 = digits.zip(key).map(|(query, key)| query * i32::from(*key)).sum();
                    sum = (dot as f32).mul_add(*scale, sum);
                }
                scores[index] = sum * queries.scales[first + n];
            }
        }
    }
}

/// Weighted values of a block: `sums[n] = sum over i of weights[n][i] * value[seen.start + i]`, `[N, width]`. Both ends
/// of `seen` are multiples of 64. Also prefetches the keys of the next page.
#[allow(clippy::too_many_arguments)] // The shape of a block.
pub(super) fn pv<const N: usize>(
    sums: &mut [f32],
    width: usize,
    weights: &[[f32; BLOCK]; N],
    [keys, values]: [&QuantizedKv<'_>; 2],
    head: usize,
    seen: Range<usize>,
    value_scales: &mut ValueScales,
) {
    let rows = values.rows(head, seen.start, seen.len());
    let next = keys.next_page_rows(head, seen.start, seen.len());
    let groups = values.dim / GROUP;
    value_scales.each.resize(groups.max(value_scales.each.len()), [0.0; BLOCK]);
    value_scales.back.resize(groups.max(value_scales.back.len()), 0.0);
    match Isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has AVX-512 with VNNI. `rows` are whole rows, and their number is a multiple of 64.
        // `sums` has N rows.
        Isa::Avx512 if seen.len().is_multiple_of(64) && values.dim.is_multiple_of(64) => unsafe {
            super::kv_quant_avx512::pv(sums, width, weights, values, [rows, next], value_scales);
        },
        _ => {
            let _ = next;
            plain_pv(sums, width, weights, values, rows, value_scales);
        }
    }
}

wide! {
    fn plain_pv[const N: usize](
        sums: &mut [f32],
        width: usize,
        weights: &[[f32; BLOCK]; N],
        values: &QuantizedKv<'_>,
        rows: CodeRows<'_>,
        value_scales: &mut ValueScales,
    ) {
        let dim = values.dim;
        let count = rows.codes.len() / values.code_row;
        let mut integers = [0i16; MAX_HEAD_DIM];
        let mut scales = [0f32; MAX_HEAD_DIM / GROUP];
        let integers = &mut integers[..dim];
        let scales = &mut scales[..dim / GROUP];
        for (index, row) in rows.iter(values).enumerate() {
            unpack_row(values.bits, row, integers, scales);
            for (group, scale) in scales.iter().enumerate() {
                value_scales.each[group][index] = *scale;
            }
        }
        for group in 0..dim / GROUP {
            value_scales.finish(group, count);
        }
        let mut totals = [[0i32; MAX_HEAD_DIM]; N];
        for (index, row) in rows.iter(values).enumerate() {
            unpack_row(values.bits, row, integers, scales);
            for (weights, total) in weights.iter().zip(&mut totals) {
                let weight = weights[index];
                if weight == 0.0 {
                    continue;
                }
                for group in 0..dim / GROUP {
                    let weight = rounded(weight.mul_add(value_scales.each[group][index], ROUND));
                    let weight = weight.clamp(0, MAX_WEIGHT as i32);
                    let range = group * GROUP..(group + 1) * GROUP;
                    for (total, value) in total[range.clone()].iter_mut().zip(&integers[range]) {
                        *total = total.wrapping_add(weight * i32::from(*value));
                    }
                }
            }
        }
        for (n, total) in totals.iter().enumerate() {
            let sums = &mut sums[n * width..][..dim];
            for (at, (sum, total)) in sums.iter_mut().zip(total).enumerate() {
                *sum = *total as f32 * value_scales.back[at / GROUP];
            }
        }
    }
}
