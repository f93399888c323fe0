//! Checkpoints: the files of a model.
//!
//! * `weight_files`: chooses the safetensors files of a checkpoint. [`index`]: offset, shape and type of each tensor in
//!   them. [`names`]: canonical tensor names.
//! * `quantization`: infers the format of a matrix from its shapes, and compares it with `config.json`.
//! * [`trunk`]: finds the tensors of each matrix, and loads the weights that stay in memory.
//! * [`norm_encoding`]: detects by their values whether norms store w or 1 + w.
//! * `row_table`: a table that is read row by row and never loaded.
//! * [`licence`]: reads the licence from the model card.
//! * [`mtp`]: finds the head for multi-token prediction.
//! * [`pack`]: copies of the experts with one aligned record per expert, and of the rows of n-gram tables.
//! * [`identity`]: identifies the checkpoint files from which a cache was made.
//! * `hub`: downloads from the Hugging Face hub.

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
mod weight_files;

pub use row_table::{RowFiles, RowTable};
pub use trunk::{Checkpoint, MatrixLayout, TrunkBuffer, TrunkLoader, expert_pieces, matrix_pieces};
