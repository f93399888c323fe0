//! Gated full attention without its projections. [`KvWrite`] normalises and rotates queries and keys and stores keys
//! and values in the cache. [`Attention`] reads the cache and applies the output gate.

mod cpu;
mod float_kernels;
mod gpu;
mod kv_cache;
mod kv_format;
pub(super) mod kv_quant;
#[cfg(target_arch = "x86_64")]
mod kv_quant_avx512;
mod kv_quant_cpu;
mod kv_quant_operands;

pub(super) use cpu::KvSelection;
pub use gpu::max_splits;
pub(super) use gpu::prompt_work;
pub(super) use kv_cache::{KvElement, KvView};
pub use kv_format::{GROUP, KvBits, KvFormat};
pub use kv_quant::{RECENT, recent_start};

use super::SequenceRows;
use crate::device::{BufferAccess, Region};

/// Number of positions in one page of keys and values.
pub const PAGE: usize = 256;
/// Number of positions in one block of the softmax. One block is one page.
const BLOCK: usize = PAGE;
/// Largest head dimension that `--kv-bits` supports.
const MAX_HEAD_DIM: usize = 1024;

/// Sizes of an attention layer. A projected row is `(query, gate) of each head | keys | values`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    /// Number of leading dimensions of a head that RoPE rotates.
    pub rope_dim: usize,
    /// Epsilon of the query and key norms.
    pub eps: f32,
    /// Maximum number of positions of a sequence.
    pub context: usize,
    pub format: KvFormat,
    /// Exact copy of the most recent positions. Present exactly if the cache has fewer than 16 bits.
    pub recent: Option<RecentRing>,
}

/// A ring buffer of recent positions: position `p` is row `p % capacity`. If `capacity` is at least `2 * RECENT` plus
/// the rows of one write, no row is overwritten before its last read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecentRing {
    pub capacity: usize,
    pub format: KvFormat,
}

impl AttentionShape {
    pub fn width(&self) -> usize {
        (2 * self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Number of bytes of the keys (or of the values) in one page.
    pub fn page_bytes(&self) -> usize {
        self.kv_heads * PAGE * self.format.row_bytes(self.dim)
    }

    /// Number of pages that a full context needs.
    pub fn pages(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Number of bytes of the keys (or of the values) of a full context.
    pub fn cache_bytes(&self) -> usize {
        self.pages() * self.page_bytes()
    }

    /// Number of bytes of the keys (or of the values) in the ring.
    pub fn recent_bytes(&self) -> usize {
        self.recent.map_or(0, |recent| self.kv_heads * recent.capacity * recent.format.row_bytes(self.dim))
    }
}

/// Keys and values in pages that several sequences share. A page has a block of [`PAGE`] rows for each key head, in the
/// layout of `kv_format.rs`. Position `p` is row `p % PAGE` of the blocks of page `table[p / PAGE]`.
#[derive(Debug, Clone, Copy)]
pub struct KvCache {
    pub keys: Region,
    pub values: Region,
    /// Page numbers of one sequence, one u32 for each [`PAGE`] positions.
    pub table: Region,
    /// Keys and values of the recent positions: a block of `capacity` rows for each key head. Empty if the cache has 16 bits or more.
    pub recent: [Region; 2],
}

/// Weights of the query and key norms, `[dim]`, and the RoPE table, `[tokens, rope_dim / 2, (cos, sin)]`.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRope {
    pub q_norm: Region,
    pub k_norm: Region,
    pub rope_table: Region,
}

/// Normalises and rotates the queries and keys of positions `start..start + tokens`, and stores keys and values.
/// RoPE rotates dimensions `j` and `j + rope_dim / 2` by `position * theta^(-2j / rope_dim)`.
#[derive(Debug, Clone, Copy)]
pub struct KvWrite<'a> {
    pub shape: &'a AttentionShape,
    pub start: usize,
    pub tokens: usize,
    /// Projections, `[tokens, width]`.
    pub proj: Region,
    pub norm_rope: QkNormRope,
    /// Receives the queries, `[tokens, heads * dim]`.
    pub q: Region,
    pub cache: KvCache,
}

/// `softmax(q k^T / sqrt(dim)) v * sigmoid(gate)`, causal. Query head `n` uses key and value head `n / (heads /
/// kv_heads)`.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    pub shape: &'a AttentionShape,
    pub start: usize,
    pub tokens: usize,
    /// Queries from [`KvWrite`].
    pub q: Region,
    pub cache: KvCache,
    /// Projections. The gate of a head follows its query.
    pub proj: Region,
    /// Partial results of flash decoding. Empty if the device needs none.
    pub partials: Region,
    /// Output, `[tokens, heads * dim]`.
    pub y: Region,
}

/// [`KvWrite`] and [`Attention`] for one row of each of several sequences. `start` is ignored. `table` and `recent`
/// hold the page tables and rings of all sequences, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRows<'a> {
    pub write: KvWrite<'a>,
    pub attention: Attention<'a>,
    pub rows: SequenceRows,
}

impl AttentionRows<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        self.write.touches(see);
        see(self.attention.partials, BufferAccess::Write);
        let values = self.attention.shape.heads * self.attention.shape.dim;
        see(self.attention.y.floats(self.attention.tokens * values), BufferAccess::Write);
        see(self.rows.table, BufferAccess::Read);
    }
}

impl KvWrite<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        see(self.proj.floats(tokens * shape.width()), BufferAccess::Read);
        see(self.norm_rope.rope_table.floats(tokens * shape.rope_dim), BufferAccess::Read);
        see(self.q.floats(tokens * shape.heads * shape.dim), BufferAccess::Write);
        see(self.cache.table, BufferAccess::Read);
        see(self.cache.keys, BufferAccess::ReadWrite);
        see(self.cache.values, BufferAccess::ReadWrite);
        self.cache.recent.iter().for_each(|recent| see(*recent, BufferAccess::ReadWrite));
    }
}

impl Attention<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        let queries = tokens * shape.heads * shape.dim;
        see(self.q.floats(queries), BufferAccess::Read);
        see(self.proj.floats(tokens * shape.width()), BufferAccess::Read);
        see(self.cache.table, BufferAccess::Read);
        see(self.cache.keys, BufferAccess::Read);
        see(self.cache.values, BufferAccess::Read);
        self.cache.recent.iter().for_each(|recent| see(*recent, BufferAccess::Read));
        see(self.partials, BufferAccess::Write);
        see(self.y.floats(queries), BufferAccess::Write);
    }
}
