//! The operations of a forward pass: one folder each, with its arguments as a value ([`Op`]), its CPU code and its
//! launches. A [`Backend`] executes them: [`Cpu`] or [`GpuBackend`].

pub mod attention;
mod backend;
pub mod check;
pub mod conv;
mod cpu;
pub mod delta;
pub mod embedding;
pub mod experts;
mod gpu;
pub mod linear;
pub mod mlp;
pub mod norm;
mod op;
pub mod quant;
pub mod router;
pub mod simd;

pub use attention::{Attend, Cache, CacheFormat, CacheWrite, Heads, KvBits, Newest, Turn};
pub use backend::{Backend, Limits};
pub use conv::Conv;
pub use cpu::Cpu;
pub use delta::{Decay, Delta, DeltaNet, DeltaRule, Past};
pub use embedding::Embed;
pub use experts::{Combine, Experts, Group, Mixture, NONE, Room, Shared, Slots, Stack, Which};
pub use gpu::{GpuBackend, limits as gpu_limits};
pub use linear::{Halves, Norm, Project};
pub use mlp::Mlp;
pub use op::{Op, Part};
pub use quant::{Codes, Float, Weight, WeightView};
pub use router::Route;
pub(crate) use simd::wide;

#[cfg(test)]
mod tests;
