//! The additions of DFlash2: convolutions around attention and feed-forward whose kernels depend on their input, and a
//! selector. The selector scores how well each candidate token follows the previous token.

use super::config::Dflash2;

/// A causal convolution along the block: `out[i, c] = sum over t of (base[t, c] + dynamic[i, t, c / group]) x[i - t,
/// c]`. Rows before the block count as zero. `x` is `[rows, hidden]`, `base` is `[taps, hidden]`, and `dynamic` returns
/// a row's `[taps, hidden / group]`.
pub fn convolve<'a>(x: &[f32], base: &[f32], dflash2: &Dflash2, dynamic: impl Fn(usize) -> &'a [f32]) -> Vec<f32> {
    let hidden = base.len() / dflash2.taps;
    let groups = hidden / dflash2.group;
    let mut out = vec![0.0; x.len()];
    for (row, out) in out.chunks_exact_mut(hidden).enumerate() {
        let dynamic = dynamic(row);
        for tap in 0..dflash2.taps.min(row + 1) {
            let x = &x[(row - tap) * hidden..][..hidden];
            let base = &base[tap * hidden..][..hidden];
            let dynamic = &dynamic[tap * groups..][..groups];
            for (channel, out) in out.iter_mut().enumerate() {
                *out += (base[channel] + dynamic[channel / dflash2.group]) * x[channel];
            }
        }
    }
    out
}

/// Returns the `count` largest values of `row` with their indices, in no particular order.
pub fn greatest(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut found: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    if count < found.len() {
        found.select_nth_unstable_by(count, |a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        found.truncate(count);
    }
    found
}

/// Adds `sum over r of predecessor[r] * hidden[r] * successor[r]` to each candidate's score. The sum says how well the
/// candidate follows the previous token. `successors` is `[candidates, rank]`.
pub fn select(candidates: &mut [(u32, f32)], predecessor: &[f32], hidden: &[f32], successors: &[f32]) {
    let query: Vec<f32> = predecessor.iter().zip(hidden).map(|(a, b)| a * b).collect();
    for ((_, score), successor) in candidates.iter_mut().zip(successors.chunks_exact(query.len().max(1))) {
        *score += query.iter().zip(successor).map(|(a, b)| a * b).sum::<f32>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolution_uses_kernels_of_each_row() {
        let dflash2 = Dflash2 { taps: 2, group: 2, rank: 1, candidates: 1 };
        let x = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0];
        let base = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5];
        let dynamic = [[0.0, 1.0, 9.0, 9.0], [0.0, 0.0, 0.5, 1.5]];
        let out = convolve(&x, &base, &dflash2, |row| &dynamic[row]);
        assert_eq!(out, [1.0, 2.0, 6.0, 8.0, 11.0, 22.0, 36.0, 48.0]);
    }

    #[test]
    fn select_reorders_the_greatest_candidates() {
        let mut found = greatest(&[0.1, 5.0, -2.0, 3.0], 2);
        found.sort_by_key(|(id, _)| *id);
        assert_eq!(found, [(1, 5.0), (3, 3.0)]);
        assert_eq!(greatest(&[1.0], 16), [(0, 1.0)]);
        // The previous token changes the order: 5 + 1 against 3 + 2, then 5 + 1 against 3 + 3 * 2.
        for (predecessor, scores) in [([1.0, 1.0], [6.0, 5.0]), ([3.0, 1.0], [6.0, 9.0])] {
            let mut scored = found.clone();
            select(&mut scored, &predecessor, &[1.0, 1.0], &[0.0, 1.0, 2.0, 0.0]);
            assert_eq!(scored, [(1, scores[0]), (3, scores[1])]);
        }
        select(&mut [], &[], &[], &[]);
    }
}
