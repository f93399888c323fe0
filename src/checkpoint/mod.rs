//! Checkpoints: a model's files on disk.
//!
//! * [`index`]: where each tensor lies in the safetensors files. [`names`]: canonical tensor names.
//! * [`trunk`]: how each matrix is quantized, and loading of the weights that stay in memory.
//! * [`norm_encoding`]: whether norms hold w or 1 + w, if neither names nor shapes show it.
//! * `row_table`: a table that is read row by row.
//! * [`licence`]: the licence that the model card names.
//! * [`mtp`]: the head for multi-token prediction.
//! * [`pack`]: a copy of the experts with one record per expert. [`identity`]: the files that a cache was made from.
//! * `hub`: downloads from the Hugging Face hub.

#[cfg(feature = "hub")]
pub mod hub;
pub mod identity;
pub mod index;
pub mod licence;
pub mod mtp;
pub mod names;
pub mod norm_encoding;
pub mod pack;
mod quantization;
mod row_table;
mod trunk;

pub use row_table::{RowFiles, RowTable};
pub use trunk::{Checkpoint, DRAFT_BUFFERS, MatrixLayout, TrunkBuffer, TrunkLoader, expert_pieces, matrix_pieces};
