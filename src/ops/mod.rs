//! One file for each operation Candle lacks: fast CPU code, its plain reference, its Metal dispatch.

pub mod attend;
pub mod combine;
pub mod conv;
pub mod delta;
pub mod embed;
pub mod experts;
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

pub use attend::{attend, gate};
pub use combine::combine;
pub use conv::conv;
pub use delta::{DeltaHeads, delta_rule};
pub use embed::embed;
pub use experts::{Assignment, ExpertView, Job, experts};
pub use linear::linear;
pub use norm::{gated_norm, rms_norm};
pub use rope::{HeadNorm, Rotation, queries, remember};
pub use route::{Routes, route};
pub use weight::{Codes, Float, Weight, WeightView};

#[cfg(test)]
mod tests;
