//! One file for each operation Candle lacks: fast CPU code, its plain reference, its Metal dispatch.

pub mod linear;
pub mod quant;
pub mod simd;
pub mod weight;

pub use linear::linear;
pub use weight::{Codes, Float, Weight, WeightView};
