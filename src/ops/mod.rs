//! One file for each operation Candle lacks: fast CPU code, its plain reference, its Metal dispatch.

pub mod combine;
pub mod experts;
pub mod linear;
pub mod math;
pub mod plan;
pub mod quant;
pub mod simd;
pub mod weight;

pub use combine::combine;
pub use experts::{Assignment, ExpertView, Job, experts};
pub use linear::linear;
pub use weight::{Codes, Float, Weight, WeightView};

#[cfg(test)]
mod tests;
