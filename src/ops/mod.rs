//! One file for each operation Candle lacks: fast CPU code, its plain reference, its Metal dispatch.

pub mod plan;
pub mod weight;

pub use weight::{Codes, Float, Weight, WeightView};
