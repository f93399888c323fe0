//! The operations of a forward pass. Each folder holds one operation: its arguments as a value ([`Op`]), its CPU
//! code and its GPU launches. A [`Backend`] executes operations: [`Cpu`] immediately, [`GpuBackend`] as launches.
//!
//! | file or folder | what it holds |
//! |---|---|
//! | `op`, `backend`, `cpu`, `gpu` | operations as values; the interface of a backend, and the two backends |
//! | `attention` ... `streams` | one operation or a few: `mod` has the meaning, `cpu` and `gpu` the code |
//! | `sequence_rows`, `delta_shape` | rows of several sequences in one launch; sizes of a delta-net layer |
//! | `decoded_product` | a product of a decoded row, for which a device may have several kernels |
//! | `quant` | weight formats, their unpacking, and quantized activations |
//! | `simd`, `linear/products` | vectors for each instruction set; products for each: scalar, AVX2, AVX-512, NEON |
//! | `activation`, `logits`, `draft_attention` | activation functions; sums over logits; attention of drafts |
//! | `check` | compares devices and instruction sets for `doctor` and tests, on the inputs in `check/cases` |
//!
//! Imports between the folders run one way: `quant` uses `simd`, `linear` uses both, other operations use `linear`, and
//! `check` uses all. `tests/house.rs` lists the few exceptions.

pub mod activation;
pub mod attention;
mod backend;
pub mod block_attention;
pub mod check;
pub mod conv;
mod cpu;
mod decoded_product;
pub mod delta;
mod delta_shape;
pub mod draft_attention;
pub mod embedding;
pub mod experts;
mod gpu;
pub mod linear;
pub mod logits;
pub mod mlp;
pub mod ngram;
pub mod norm;
mod op;
pub mod quant;
pub mod router;
mod sample;
mod sequence_rows;
pub mod simd;
pub mod streams;

pub use attention::{
    Attention, AttentionRows, AttentionShape, KvBits, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing,
};
pub use backend::{Backend, BackendLimits, ReservedBuffer};
pub use block_attention::{BlockAttention, BlockAttentionRows, IndexCache, IndexerShape};
pub use conv::Conv;
pub use cpu::Cpu;
pub use decoded_product::DecodedProduct;
pub use delta::{Decay, DeltaNet, DeltaNetRows, DeltaRule};
pub use delta_shape::{DeltaShape, OutputGate, Replay};
pub use embedding::Embedding;
pub use experts::{
    CombineExperts, ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, MoeBuffers, MoeWeights, NO_SLOT,
    SharedExpert,
};
pub use gpu::{Comparison, DecodedAttention, GpuBackend, compare_kernels, limits as gpu_limits, time_attention};
pub use linear::{HalfBuffers, Linear, Norm, RowSource, RowTiles};
pub use mlp::Mlp;
pub use ngram::{InjectShape, InjectWeights, NgramInject, NgramInjectRows};
pub use op::{ModelPart, Op};
pub use quant::{FP8_BLOCK, Float, Weight, WeightFormat, WeightView};
pub use router::Router;
pub use sample::{Sample, TokenChoice};
pub use sequence_rows::SequenceRows;
pub use streams::{ReadStreams, StreamBuffers, StreamMix, StreamShape, WriteStreams};

#[cfg(test)]
mod tests;
