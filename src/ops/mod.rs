//! One file for each operation Candle lacks: fast CPU code, its plain reference, its Metal dispatch.

pub mod attend;
pub mod bytes;
pub mod cache;
pub mod check;
pub mod combine;
pub mod conv;
pub mod delta;
pub mod embed;
pub mod experts;
pub mod gate;
pub mod linear;
pub mod math;
pub mod norm;
pub mod plan;
pub mod quant;
pub mod rope;
pub mod route;
pub mod simd;
pub mod view;
pub mod weight;

pub use attend::attend;
pub use cache::{cache_row, remember};
pub use combine::combine;
pub use conv::conv;
pub use delta::{DeltaHeads, delta_rule};
pub use embed::embed;
pub use experts::{Assignment, ExpertView, Job, experts};
pub use gate::gate;
pub use linear::linear;
pub use norm::{gated_norm, rms_norm};
pub use rope::{HeadNorm, Rotation, queries};
pub use route::{Routes, route};
pub use weight::{Codes, Float, Weight, WeightView};

#[cfg(test)]
mod tests;
