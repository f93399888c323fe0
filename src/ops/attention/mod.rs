//! Gated full attention between its projections (spec 2.1), in two operations: [`KvWrite`] norms and turns queries and
//! keys and puts keys and values into the cache, [`Attention`] looks at the cache and applies the gate.

mod cases;
mod cpu;
mod float_kernels;
mod gpu;
mod kv_cache;
mod kv_format;
mod kv_quant;
#[cfg(target_arch = "x86_64")]
mod kv_quant_avx512;
mod kv_quant_cpu;
mod kv_quant_operands;

pub(super) use cases::cases;
pub use gpu::max_splits;
pub use kv_format::{GROUP, KvBits, KvFormat};
pub use kv_quant::{RECENT, rounded_until};

use crate::device::{BufferAccess, Region};

/// Positions in a page of keys and values.
pub const PAGE: usize = 256;
/// Positions of a block of the softmax, which is a page.
const BLOCK: usize = PAGE;
/// Most values of a head that `--kv-bits` takes.
const MAX_HEAD_DIM: usize = 1024;

/// AttentionShape and sizes. A row of the projection is `(query, gate) of each head | keys | values`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    /// Leading dimensions that are rotated.
    pub rope_dim: usize,
    /// Of the query and key norms.
    pub eps: f32,
    /// Positions of a sequence at most.
    pub context: usize,
    pub format: KvFormat,
    /// The recent positions are kept so as well; if, and only if, the cache has fewer than 16 bits.
    pub recent: Option<RecentRing>,
}

/// A ring: position `p` is row `p % room`. The keys and values of `room` positions are looked at before any of them is needed
/// again if `room` is at least `2 * RECENT` more than the rows written at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecentRing {
    pub room: usize,
    pub format: KvFormat,
}

impl AttentionShape {
    pub fn width(&self) -> usize {
        (2 * self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Bytes of the keys (or of the values) of one page.
    pub fn page_bytes(&self) -> usize {
        self.kv_heads * PAGE * self.format.row_bytes(self.dim)
    }

    /// Pages that a whole context takes.
    pub fn pages(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Bytes of the keys (or of the values) of a whole context.
    pub fn cache_bytes(&self) -> usize {
        self.pages() * self.page_bytes()
    }

    /// Bytes of the recent keys (or values).
    pub fn recent_bytes(&self) -> usize {
        self.recent.map_or(0, |recent| self.kv_heads * recent.room * recent.format.row_bytes(self.dim))
    }
}

/// Keys and values in pages `[pages, kv_heads, PAGE, row]`, which sequences share: position `p` is row `p % PAGE` of the page
/// that the table has at `p / PAGE`.
#[derive(Debug, Clone, Copy)]
pub struct KvCache {
    pub keys: Region,
    pub values: Region,
    /// A sequence's pages, one number for each [`PAGE`] positions.
    pub table: Region,
    /// Keys and values of the recent positions, `[kv_heads, room, row]`; empty if the cache has 16 bits or more.
    pub recent: [Region; 2],
}

/// Weights of the query and key norms `[dim]`, and the rotation of each row `[tokens, rope_dim / 2, (cos, sin)]`.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRope {
    pub q_norm: Region,
    pub k_norm: Region,
    pub turn: Region,
}

/// Norms and rotates queries and keys of rows that stand at positions `start..start + tokens`; dimension `j` and
/// `j + rope_dim / 2` turn by `position * theta^(-2j / rope_dim)`.
#[derive(Debug, Clone, Copy)]
pub struct KvWrite<'a> {
    pub shape: &'a AttentionShape,
    pub start: usize,
    pub tokens: usize,
    /// `[tokens, width]`.
    pub proj: Region,
    pub turn: QkNormRope,
    /// `[tokens, heads * dim]`: the queries.
    pub q: Region,
    pub cache: KvCache,
}

/// `softmax(q k^T / sqrt(dim)) v * sigmoid(gate)`; a query sees its own position and those before. Query head `n` uses key and
/// value head `n / (heads / kv_heads)`.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    pub shape: &'a AttentionShape,
    pub start: usize,
    pub tokens: usize,
    /// [`KvWrite`]'s.
    pub q: Region,
    pub cache: KvCache,
    /// The gates are the second `dim` of every two.
    pub proj: Region,
    /// MoeBuffers for flash-decode's partial results, if the device wants any.
    pub partials: Region,
    /// `[tokens, heads * dim]`.
    pub y: Region,
}

impl KvWrite<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (tokens, shape) = (self.tokens, self.shape);
        see(self.proj.floats(tokens * shape.width()), BufferAccess::Read);
        see(self.turn.turn.floats(tokens * shape.rope_dim), BufferAccess::Read);
        see(self.q.floats(tokens * shape.heads * shape.dim), BufferAccess::Write);
        see(self.cache.table, BufferAccess::Read);
        see(self.cache.keys, BufferAccess::ReadWrite);
        see(self.cache.values, BufferAccess::ReadWrite);
        self.cache.recent.iter().for_each(|recent| see(*recent, BufferAccess::ReadWrite));
    }
}

impl Attention<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (tokens, shape) = (self.tokens, self.shape);
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
