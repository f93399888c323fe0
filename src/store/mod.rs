//! See `lib.rs`.
pub mod synth;
