//! Quantized weights and activations.

pub mod activations;
mod gpu;
pub(super) mod unpack;
mod weight;

pub(super) use activations::{
    ActivationCache, ActivationFormat, QuantizedRow, QuantizedRows, RowWriter, ValueOrder, format, quantize,
};
pub(super) use gpu::{fast, matrix_words};
pub use weight::{FP8_BLOCK, Float, Weight, WeightFormat, WeightView};
