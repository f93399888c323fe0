//! Models: their files, their architecture and the memory that they need.
//!
//! * [`checkpoint`]: a model's files: names, quantization, packs, downloads.
//! * [`model`]: the architecture. Read [`model::reference`] first: plain tensors, one function per formula.
//!   `model::forward` is the same architecture as operations on buffers.
//! * [`plan`]: the memory plan, a pure function of a model's dimensions, the machine's limits and the user's options.

pub mod checkpoint;
pub mod error;
pub mod model;
pub mod plan;
