//! The operations of a forward pass: one folder each, with its arguments as a value ([`Op`]), its CPU code and its
//! launches. [`Cpu`] and [`OnGpu`] run them.

pub mod attend;
pub mod check;
pub mod conv;
mod cpu;
pub mod delta;
pub mod embed;
pub mod experts;
mod gpu;
mod math;
pub mod mlp;
pub mod norm;
pub mod project;
pub mod quant;
pub mod route;
mod run;
pub mod simd;
mod weight;

pub use attend::{Attend, Cache, CacheWrite, Heads, Newest, Turn};
pub use conv::Conv;
pub use cpu::Cpu;
pub use delta::{Decay, Delta, DeltaNet, DeltaRule, Past};
pub use embed::Embed;
pub use experts::{Combine, Experts, Group, Mixture, NONE, Room, Shared, Slots, Stack, Which};
pub use gpu::{OnGpu, limits as gpu_limits};
pub use mlp::Mlp;
pub use project::{Halves, Norm, Project};
pub use route::Route;
pub use run::{CacheFormat, KvBits, Limits, Op, Part, Run};
pub(crate) use simd::wide;
pub use weight::{Codes, Float, Weight, WeightView};

#[cfg(test)]
mod tests;
