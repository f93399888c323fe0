//! Attention to the blocks of positions that an indexer selects for each query.
//!
//! A block is `ratio` consecutive positions. A block is closed once its last token was computed. A closed block has one
//! key:
//!
//! ```text
//! [q: heads x dim | raw: dim] = index projection
//! q = rope(rms(q) * q_norm) per head                                       at the query's position
//! K_b = rope(rms(mean of the block's raw) * k_norm)                        at the block's first position
//! score_b = sum over heads of relu(q . K_b) / sqrt(dim)                    for the closed blocks
//! ```
//! A query attends to the open block and to the `blocks` closed blocks with the highest scores. Of equal scores, the
//! lower block is selected. If there are at most `blocks` closed blocks, the query attends to all of them. All heads of
//! a query use the same selection.

mod cpu;
mod gpu;
mod select;

use super::{Attention, AttentionRows, KvWrite, QkNormRope, SequenceRows, attention::PAGE};
use crate::device::{BufferAccess, DeviceError, Region};

/// Maximum number of bytes that the CPU needs for the scores, queries and selections of one call.
pub const CPU_SCRATCH: usize = 8 << 20;

/// Sizes of an indexer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IndexerShape {
    /// Number of query heads. There is one key head.
    pub heads: usize,
    pub dim: usize,
    /// Number of leading dimensions of a head that RoPE rotates.
    pub rope_dim: usize,
    /// Number of positions in a block.
    pub ratio: usize,
    /// Maximum number of closed blocks that a query attends to.
    pub blocks: usize,
    /// Epsilon of the query and key norms.
    pub eps: f32,
}

impl IndexerShape {
    /// Number of floats of a projected row.
    pub fn width(&self) -> usize {
        (self.heads + 1) * self.dim
    }

    /// Number of floats of a row of [`IndexCache::recent`].
    pub fn recent_width(&self) -> usize {
        self.dim + self.rope_dim
    }

    /// Number of bytes of the block keys in the first `rows` positions of a page.
    pub fn key_bytes(&self, rows: usize) -> usize {
        rows.div_ceil(self.ratio) * self.dim * 4
    }

    /// The row of [`IndexCache::keys`] that has the key of `block`. The key is in the page of the block's last
    /// position, because the block may start in an earlier page, which other sequences may share. `None` if `table`
    /// does not have that page.
    fn key_row(&self, table: &[u32], block: usize) -> Option<usize> {
        let last = (block + 1) * self.ratio - 1;
        let page = *table.get(last / PAGE)? as usize;
        Some(page * PAGE.div_ceil(self.ratio) + last % PAGE / self.ratio)
    }
}

/// The indexer's state for one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub struct IndexCache {
    /// Keys of closed blocks in pages, f32 `[pages, ceil(PAGE / ratio), dim]`. The page table of the KV cache also
    /// lists these pages.
    pub keys: Region,
    /// A ring of the last positions, f32 `[capacity, recent_width]`: the raw key and the RoPE rotation of position `p`
    /// are in row `p % capacity`. The ring has room for the positions of one call and for one block before them.
    pub recent: Region,
    /// Number of positions in the ring of one sequence.
    pub capacity: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct BlockAttention<'a> {
    /// The attention operation. Each query attends only to the positions that the indexer selects for it.
    pub attention: Attention<'a>,
    pub indexer: &'a IndexerShape,
    /// Index projections, `[tokens, width]`.
    pub index: Region,
    /// The weights of the indexer's two norms, `[dim]` each, and the RoPE rotation of each row.
    pub norm_rope: QkNormRope,
    pub cache: IndexCache,
}

/// [`KvWrite`] and [`BlockAttention`] for one row of each of several sequences. `start` is ignored. The regions of the
/// page table and of [`IndexCache::recent`] hold those of all sequences, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct BlockAttentionRows<'a> {
    pub write: KvWrite<'a>,
    pub attend: BlockAttention<'a>,
    pub rows: SequenceRows,
}

impl<'a> BlockAttentionRows<'a> {
    /// The same without the indexer.
    fn attention_rows(&self) -> AttentionRows<'a> {
        AttentionRows { write: self.write, attention: self.attend.attention, rows: self.rows }
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let BlockAttention { attention, indexer, index, cache, .. } = self.attend;
        self.attention_rows().touches(see);
        see(index.floats(attention.tokens * indexer.width()), BufferAccess::Read);
        see(cache.keys, BufferAccess::ReadWrite);
        see(cache.recent, BufferAccess::ReadWrite);
    }
}

/// Buffers of the selection, reused by all calls.
#[derive(Default)]
pub(in crate::ops) struct SelectionScratch {
    pub queries: Vec<f32>,
    pub scores: Vec<f32>,
    /// `[tokens, blocks]`: the closed blocks that each query attends to, in ascending order.
    pub selected: Vec<u32>,
}

impl BlockAttention<'_> {
    /// Number of blocks that are closed for a query at `position`, and number of closed blocks that the query attends
    /// to.
    pub(in crate::ops) fn closed(&self, position: usize) -> (usize, usize) {
        let closed = (position + 1) / self.indexer.ratio;
        (closed, closed.min(self.indexer.blocks))
    }

    /// This operation for rows `first..first + count` only.
    fn part(&self, first: usize, count: usize) -> Self {
        let rope_table = self.norm_rope.rope_table.rows(first, count, self.indexer.rope_dim);
        let index = self.index.rows(first, count, self.indexer.width());
        let norm_rope = QkNormRope { rope_table, ..self.norm_rope };
        Self { attention: self.attention.part(first, count), index, norm_rope, ..*self }
    }

    /// Checks that the ring holds the rows of this call, of which each sequence has `tokens`, and a block before them.
    fn check_ring(&self, tokens: usize) -> Result<(), DeviceError> {
        let positions = self.cache.capacity;
        if positions < tokens + self.indexer.ratio {
            let why = format!("a ring of {positions} positions is too short for {tokens} tokens of an indexer");
            return Err(DeviceError::Failed(why));
        }
        Ok(())
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.attention.tokens;
        self.attention.touches(see);
        see(self.index.floats(tokens * self.indexer.width()), BufferAccess::Read);
        see(self.norm_rope.rope_table.floats(tokens * self.indexer.rope_dim), BufferAccess::Read);
        see(self.cache.keys, BufferAccess::ReadWrite);
        see(self.cache.recent, BufferAccess::ReadWrite);
    }
}
