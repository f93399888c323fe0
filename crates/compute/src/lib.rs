//! Everything that runs for each token: memory shared with GPUs, operations on buffers, and experts read from disk.
//!
//! This crate is compiled in one unit at the highest level, because more units cost decode speed. It imports neither
//! tensors of Candle nor tokenizers nor HTTP, so it compiles while those dependencies do.
//!
//! * [`device`]: memory that CPU, SSD and GPU share, and launches on GPUs. Does not depend on operations.
//! * [`ops`]: one folder per operation, with its CPU code and its GPU launches.
//! * [`experts`]: reads experts from disk into slots, and decides which experts stay. Computes no part of the model.

pub mod device;
pub mod experts;
pub mod ops;
