//! RMS norm, and the gate of a delta-net layer.

mod cpu;
mod gpu;

pub(super) use cpu::{multiply_sigmoid, multiply_silu, normalise};
pub use gpu::rms_norm;
pub(super) use gpu::rms_norms;
