//! Checkpoints as files: [`index`] finds tensors in safetensors, [`names`] bends their names to ours, [`trunk`] says how each is
//! quantised and gathers what stays in memory, [`pack`] writes an expert's bytes side by side, [`hub`] downloads,
//! [`identity`] says which files these are, [`mtp`] where a head for multi-token prediction lies.

#[cfg(feature = "hub")]
pub mod hub;
pub mod identity;
pub mod index;
pub mod mtp;
pub mod names;
pub mod pack;
mod quantization;
mod trunk;

pub use trunk::{BUFFERS, Checkpoint, DRAFT_BUFFERS, MatrixLayout, TrunkLoader, expert_pieces, matrix_pieces};
