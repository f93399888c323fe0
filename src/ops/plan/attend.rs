//! Gated attention between its projections: `kernels/attend.metal`.

use super::{Binding, Dispatch, Region, floats};

/// Positions one threadgroup looks at.
pub const SPLIT: usize = 256;

/// Heads and sizes. A row of the projection is `(query, gate) of each head | keys | values`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attend {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    /// Leading dimensions that are rotated.
    pub rotary: usize,
    /// Of the query and key norms.
    pub eps: f32,
    /// Positions the cache has room for.
    pub context: usize,
    /// Keys and values are bf16 instead of f32.
    pub half: bool,
}

/// The cache `[kv_heads, context, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct Cache {
    pub keys: Region,
    pub values: Region,
}

impl Attend {
    pub fn width(&self) -> usize {
        (2 * self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Bytes of keys (or of values).
    pub fn cache_bytes(&self) -> usize {
        self.kv_heads * self.context * self.dim * if self.half { 2 } else { 4 }
    }

    fn splits(&self, start: usize, tokens: usize) -> usize {
        (start + tokens).div_ceil(SPLIT)
    }

    /// Floats of scratch that [`attend`] needs for `tokens` rows from position `start`.
    pub fn scratch(&self, start: usize, tokens: usize) -> usize {
        tokens * self.heads * self.splits(start, tokens) * (self.dim + 2)
    }

    fn args(&self, start: usize, tokens: usize) -> Vec<u32> {
        assert!(self.dim <= 256 && self.heads / self.kv_heads <= 32, "heads of {}", self.dim);
        assert!(start + tokens <= self.context, "position {} of {}", start + tokens, self.context);
        let words = [tokens, self.width(), self.heads, self.kv_heads, self.dim, self.rotary, start, self.context];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(self.splits(start, tokens) as u32);
        args.extend([self.eps.to_bits(), (1.0 / (self.dim as f32).sqrt()).to_bits()]);
        args
    }
}

/// Weights of the query and key norms `[dim]`, and the rotation of each row `[tokens, rotary / 2, (cos, sin)]`.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub q_norm: Region,
    pub k_norm: Region,
    pub turn: Region,
}

/// Norms and rotates; queries go to `q` `[tokens, heads * dim]`, keys and values into the cache.
pub fn attend_place(
    op: &Attend,
    start: usize,
    tokens: usize,
    proj: Region,
    turn: Turn,
    q: Region,
    cache: Cache,
) -> Dispatch {
    Dispatch {
        kernel: if op.half { "attend_place_bf16" } else { "attend_place" },
        args: op.args(start, tokens),
        bindings: vec![
            Binding::read(floats(proj, tokens * op.width())),
            Binding::read(floats(turn.q_norm, op.dim)),
            Binding::read(floats(turn.k_norm, op.dim)),
            Binding::read(floats(turn.turn, tokens * op.rotary)),
            Binding::write(floats(q, tokens * op.heads * op.dim)),
            Binding::update(cache.keys.first(op.cache_bytes())),
            Binding::update(cache.values.first(op.cache_bytes())),
        ],
        grid: [(op.heads + 2 * op.kv_heads) as u32, tokens as u32, 1],
        threads: 32,
    }
}

/// Attention over the cache, in parts of 256 positions: `parts` is scratch of [`Attend::scratch`] floats.
pub fn attend(op: &Attend, start: usize, tokens: usize, q: Region, cache: Cache, parts: Region) -> Dispatch {
    Dispatch {
        kernel: match (op.dim <= 128, op.half) {
            (true, false) => "attend_128",
            (true, true) => "attend_128_bf16",
            (false, false) => "attend_256",
            (false, true) => "attend_256_bf16",
        },
        args: op.args(start, tokens),
        bindings: vec![
            Binding::read(floats(q, tokens * op.heads * op.dim)),
            Binding::read(cache.keys.first(op.cache_bytes())),
            Binding::read(cache.values.first(op.cache_bytes())),
            Binding::write(floats(parts, op.scratch(start, tokens))),
        ],
        grid: [op.splits(start, tokens) as u32, op.kv_heads as u32, tokens as u32],
        threads: 32 * (op.heads / op.kv_heads) as u32,
    }
}

/// Joins the parts and applies the gate: `y` `[tokens, heads * dim]`.
pub fn attend_join(op: &Attend, start: usize, tokens: usize, proj: Region, parts: Region, y: Region) -> Dispatch {
    Dispatch {
        kernel: "attend_join",
        args: op.args(start, tokens),
        bindings: vec![
            Binding::read(floats(proj, tokens * op.width())),
            Binding::read(floats(parts, op.scratch(start, tokens))),
            Binding::write(floats(y, tokens * op.heads * op.dim)),
        ],
        grid: [op.heads as u32, tokens as u32, 1],
        threads: 128,
    }
}
