//! The indexer on the CPU: keys of closed blocks, scores, and the selection of each query.

use super::{BlockAttention, SelectionScratch};
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, CpuMemory, refuse},
        norm::normalise,
        simd::{float, wide},
    },
};
use std::cell::RefCell;

/// Number of blocks in one task of scores.
const TASK_BLOCKS: usize = 512;
/// Maximum number of scores in the buffer. Rows are computed in groups whose scores fit into the buffer.
const MAX_SCORES: usize = 1 << 20;

thread_local! {
    /// The scores of a query, as integers in the same order.
    static RANKS: RefCell<Vec<i32>> = RefCell::default();
}

/// Applies RoPE to the leading `pairs.len()` dimensions of `x`. The `j`-th `(cos, sin)` of `pairs` rotates dimensions
/// `j` and `j + pairs.len() / 2`.
fn rotate(x: &mut [f32], pairs: &[f32]) {
    let (low, high) = x[..pairs.len()].split_at_mut(pairs.len() / 2);
    for ((low, high), pair) in low.iter_mut().zip(high).zip(pairs.chunks_exact(2)) {
        (*low, *high) = (*low * pair[0] - *high * pair[1], *high * pair[0] + *low * pair[1]);
    }
}

impl BlockAttention<'_> {
    /// Writes the rows to the ring. For each block that the rows complete, computes the block's key and writes the key
    /// to the block's page.
    pub(super) fn close_blocks(&self, memory: &CpuMemory) -> Result<(), DeviceError> {
        let shape = self.indexer;
        let start = self.attention.start;
        let tokens = self.attention.tokens;
        let dim = shape.dim;
        let width = shape.width();
        let wide = shape.recent_width();
        let capacity = self.cache.capacity;
        self.check_ring(tokens)?;
        let index = memory.floats(self.index.floats(tokens * width));
        let rotation = memory.floats(self.norm_rope.rope_table.floats(tokens * shape.rope_dim));
        let recent = memory.floats_mut(self.cache.recent);
        for token in 0..tokens {
            let raw = &index[token * width + shape.heads * dim..][..dim];
            let rotation = &rotation[token * shape.rope_dim..];
            let (to, to_rotation) = recent[(start + token) % capacity * wide..][..wide].split_at_mut(dim);
            to.copy_from_slice(raw);
            to_rotation.copy_from_slice(&rotation[..shape.rope_dim]);
        }
        let norm = memory.floats(self.norm_rope.k_norm.floats(dim));
        let table = memory.words(self.attention.cache.table);
        let keys = memory.floats_mut(self.cache.keys);
        let mut mean = vec![0.0; dim];
        for block in start / shape.ratio..(start + tokens) / shape.ratio {
            let first = block * shape.ratio;
            mean.fill(0.0);
            for position in first..first + shape.ratio {
                let raw = &recent[position % capacity * wide..][..dim];
                mean.iter_mut().zip(raw).for_each(|(mean, raw)| *mean += raw);
            }
            mean.iter_mut().for_each(|mean| *mean /= shape.ratio as f32);
            let Some(row) = shape.key_row(table, block) else { return refuse(format!("no page for block {block}")) };
            let key = &mut keys[row * dim..][..dim];
            normalise(&mean, norm, shape.eps, key);
            rotate(key, &recent[first % capacity * wide + dim..][..shape.rope_dim]);
        }
        Ok(())
    }

    /// Selects the closed blocks that each query attends to.
    pub(super) fn select(&self, cpu: &Cpu, scratch: &mut SelectionScratch) {
        let shape = self.indexer;
        let start = self.attention.start;
        let tokens = self.attention.tokens;
        let memory = &cpu.memory;
        let threads = &cpu.compute.threads;
        let width = shape.width();
        let heads = shape.heads * shape.dim;
        let index = memory.floats(self.index.floats(tokens * width));
        let rotation = memory.floats(self.norm_rope.rope_table.floats(tokens * shape.rope_dim));
        let norm = memory.floats(self.norm_rope.q_norm.floats(shape.dim));
        let table = memory.words(self.attention.cache.table);
        let keys = memory.floats(self.cache.keys);
        let SelectionScratch { queries, scores, selected } = scratch;

        queries.resize(tokens * heads, 0.0);
        threads.run_pieces(queries, heads, &|token, q| {
            for (q, x) in q.chunks_exact_mut(shape.dim).zip(index[token * width..].chunks_exact(shape.dim)) {
                normalise(x, norm, shape.eps, q);
                rotate(q, &rotation[token * shape.rope_dim..][..shape.rope_dim]);
            }
        });
        selected.resize(tokens * shape.blocks, 0);
        let (max, _) = self.closed(start + tokens - 1);
        let row = max.next_multiple_of(TASK_BLOCKS);
        let together = (MAX_SCORES / row.max(1)).clamp(1, tokens);
        for (group, selected) in selected.chunks_mut(together * shape.blocks).enumerate() {
            let first = group * together;
            let count = selected.len() / shape.blocks;
            let queries = &queries[first * heads..];
            let scale = 1.0 / (shape.dim as f32).sqrt();
            scores.resize(count * row, 0.0);
            threads.run_pieces(scores, TASK_BLOCKS, &|task, scores| {
                let token = task * TASK_BLOCKS / row;
                let block = task * TASK_BLOCKS % row;
                let (closed, chosen) = self.closed(start + first + token);
                // A query that attends to all closed blocks needs no scores.
                let end = if closed == chosen { block } else { closed.clamp(block, block + scores.len()) };
                for (score, block) in scores.iter_mut().zip(block..end) {
                    let row = shape.key_row(table, block).unwrap_or_default();
                    let key = &keys[row * shape.dim..][..shape.dim];
                    *score = block_score(&queries[token * heads..][..heads], key) * scale;
                }
            });
            let scores = &*scores;
            threads.run_pieces(selected, shape.blocks, &|token, selected| {
                let (closed, chosen) = self.closed(start + first + token);
                choose(&scores[token * row..][..closed], &mut selected[..chosen]);
            });
        }
    }
}

/// Writes the indices of the highest scores to `chosen`, in ascending order. Of equal scores, the lower index is
/// chosen.
fn choose(scores: &[f32], chosen: &mut [u32]) {
    if chosen.len() >= scores.len() || chosen.is_empty() {
        chosen.iter_mut().zip(0..).for_each(|(chosen, index)| *chosen = index);
        return;
    }
    // Integers in the order of `f32::total_cmp`. They are selected without a branch for each comparison.
    let rank = |score: &f32| {
        let bits = score.to_bits() as i32;
        bits ^ ((bits >> 31) as u32 >> 1) as i32
    };
    RANKS.with_borrow_mut(|ranks| {
        ranks.clear();
        ranks.extend(scores.iter().map(rank));
        let count = ranks.len();
        let (_, lowest, higher) = ranks.select_nth_unstable(count - chosen.len());
        let lowest = *lowest;
        let mut equal = chosen.len() - higher.iter().filter(|rank| **rank > lowest).count();
        let mut indices = scores.iter().zip(0..).filter_map(|(score, index)| {
            let rank = rank(score);
            let is_equal = rank == lowest && equal > 0;
            equal -= usize::from(is_equal);
            (rank > lowest || is_equal).then_some(index)
        });
        chosen.iter_mut().zip(&mut indices).for_each(|(chosen, index)| *chosen = index);
    });
}

wide! {
    /// The sum over heads of `relu(q . key)`.
    fn block_score(queries: &[f32], key: &[f32]) -> f32 {
        let mut sum = 0.0;
        let mut heads = queries.chunks_exact(4 * key.len());
        for heads in &mut heads {
            let [first, second] = [0, 2].map(|head| heads[head * key.len()..].split_at(key.len()));
            let queries = [first.0, &first.1[..key.len()], second.0, &second.1[..key.len()]];
            sum = float::dot::<V, 4>(key, queries).into_iter().fold(sum, |sum, product| sum + product.max(0.0));
        }
        for q in heads.remainder().chunks_exact(key.len()) {
            let [product] = float::dot::<V, 1>(key, [q]);
            sum += product.max(0.0);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::mutate::Dice;

    #[test]
    fn equal_scores_choose_lower_blocks() {
        let mut chosen = [0; 3];
        choose(&[0.0, 2.0, 0.0, 1.0, 0.0, 0.0], &mut chosen);
        assert_eq!(chosen, [0, 1, 3]);
        choose(&[0.0, 0.0, 0.0], &mut chosen);
        assert_eq!(chosen, [0, 1, 2]);
    }

    #[test]
    fn choice_equals_sorted_head() {
        let mut dice = Dice(1);
        for case in 0..300 {
            let count = 1 + case * 7 % 200;
            // Few different values, so that many are equal.
            let values = &[0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, 0.5, 2.0, -3.0][..1 + case % 8];
            let scores: Vec<f32> = (0..count).map(|_| *dice.pick(values)).collect();
            let mut sorted: Vec<u32> = (0..count as u32).collect();
            sorted.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
            let mut chosen = vec![0; 1 + case % count];
            choose(&scores, &mut chosen);
            let mut expected = sorted[..chosen.len()].to_vec();
            expected.sort_unstable();
            assert_eq!(chosen, expected, "{scores:?}");
        }
    }
}
