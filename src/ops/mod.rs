//! The operations of a forward pass. Each folder holds one operation: its arguments as a value ([`Op`]), its CPU
//! code and its GPU launches. A [`Backend`] executes operations: [`Cpu`] immediately, [`GpuBackend`] as launches.

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

pub use attention::{Attention, AttentionShape, KvBits, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing};
pub use backend::{Backend, BackendLimits};
pub use conv::Conv;
pub use cpu::Cpu;
pub use delta::{Decay, DeltaNet, DeltaRule, DeltaShape, Replay};
pub use embedding::Embedding;
pub use experts::{
    CombineExperts, ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, MoeBuffers, MoeWeights, NO_SLOT,
    SharedExpert,
};
pub use gpu::{GpuBackend, limits as gpu_limits};
pub use linear::{HalfBuffers, Linear, Norm};
pub use mlp::Mlp;
pub use op::{ModelPart, Op};
pub use quant::{Float, Weight, WeightFormat, WeightView};
pub use router::Router;
pub(crate) use simd::wide;

#[cfg(test)]
mod tests;
