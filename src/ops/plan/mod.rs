//! What to launch: each op's GPU side as [`Dispatch`] values, built from shapes. Nothing here runs anything.

mod attend;
mod delta;
mod experts;
mod layer;
mod linear;
mod route;
mod token;

pub use attend::{Attend, Cache, SPLIT, Turn, attend, attend_join, attend_place};
pub use delta::{Decay, Delta, conv, delta, gated_norm};
pub use experts::{
    Experts, Jobs, Piece, Slots, experts_combine, experts_down, experts_down_rows, experts_up, experts_up_rows, swiglu,
};
pub use layer::{Ffn, Layer, Memory, Mixer, Mixture, PARTS, Scratch, TOGETHER};
pub use linear::{Linear, Norm, linear};
pub use route::{Chosen, Route, dequantise, embed, rms_norm, route};
pub use token::{Cost, Net, Residence, Step, cost, head, layer, pass};

use super::{Codes, Float};
use crate::device::{Binding, Dispatch, Region};

/// NONE as a slot: this place is not part of this launch.
pub const NONE: u32 = u32::MAX;

/// A weight matrix `[rows, cols]` that stays in memory, as the kernels see it. Parts start at 16-byte boundaries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matrix {
    pub codes: Codes,
    pub rows: usize,
    pub cols: usize,
    pub gain: f32,
    /// Codes, scales, biases; the latter two empty where the encoding has none.
    pub parts: [Region; 3],
}

impl Matrix {
    fn words(&self) -> [u32; 5] {
        matrix_words(self.codes, self.rows, self.gain)
    }

    fn bindings(&self) -> [Binding; 3] {
        // An empty part still needs a buffer to be bound.
        self.parts.map(|part| Binding::read(if part.len == 0 { self.parts[0].first(0) } else { part }))
    }
}

/// `struct Matrix` of `kernels/codes.metal`.
fn matrix_words(codes: Codes, rows: usize, gain: f32) -> [u32; 5] {
    let real = |float| match float {
        Float::F32 => 0,
        Float::F16 => 1,
        Float::Bf16 => 2,
    };
    let (format, scale) = match codes {
        Codes::Affine { bits, scale, .. } => (bits.into(), real(scale)),
        Codes::Mxfp4 => (20, 0),
        Codes::Nvfp4 => (21, 0),
        Codes::Mxfp8 => (22, 0),
        Codes::Dense(float) => (30, real(float)),
    };
    [rows as u32, format, codes.group() as u32, scale, gain.to_bits()]
}

/// Whether the kernels have their fast path for this encoding: affine, one of `bits`, group 64, bf16 scales.
fn fast(codes: Codes, gain: f32, cols: usize, bits: &[u8]) -> bool {
    matches!(codes, Codes::Affine { bits: b, group: 64, scale: Float::Bf16 } if bits.contains(&b))
        && gain == 1.0
        && cols.is_multiple_of(64)
}

fn floats(region: Region, count: usize) -> Region {
    region.first(count * 4)
}
