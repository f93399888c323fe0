//! Quantised weights and activations.

pub mod activations;
mod gpu;
pub(super) mod unpack;
mod weight;

pub(super) use activations::{Digits, Format, Order, Quantised, QuantisedRows, Writer, format, quantise};
pub(super) use gpu::{fast, matrix_words};
pub use weight::{Float, Weight, WeightFormat, WeightView};
