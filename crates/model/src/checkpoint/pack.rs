//! Packs: copies of a checkpoint's experts with one page-aligned record per expert. Reading an expert from a pack takes
//! one read instead of nine. A pack may also contain the rows of n-gram tables (`row_file.rs`).
//!
//! A pack is a separate directory. The checkpoint is never modified. A pack has one file per layer (`layer-000.experts`
//! and so on) and a manifest:
//!
//! ```text
//! { "format": "moestro experts", "version": 2, "source": FINGERPRINT, "identity": IDENTITY,
//!   "layers": [ { "file": NAME, "stride": BYTES, "pieces": [[OFFSET, LEN]; 9],
//!                 "sha256": [HEX; experts], "crc32": [NUMBER; experts] } ] }
//! ```
//!
//! The record of expert `e` starts at byte `e * stride` of its layer's file. The record has nine pieces (codes, scales
//! and biases of gate, up and down) at the offsets in the manifest, and zeros between the pieces. The stride is a
//! multiple of 16 KiB: the page size of Apple silicon, and a multiple of the block size of common disks.
//!
//! A pack is used only if every expert of the checkpoint has the SHA-256 in the manifest. Three rules avoid most of the
//! hashing:
//! * The [`fingerprint`] of the checkpoint selects candidate packs with few reads.
//! * If the checkpoint's files have the [identity](super::identity) in the manifest, they are the files that
//!   were packed.
//! * Otherwise all experts are hashed once, and the result is remembered for the identity of these files.
//!
//! The CRC-32 of a record is verified when the record is read. A damaged record is rebuilt from the checkpoint.
//!
//! The pack of the checkpoint directory `NAME` is searched for first in the directory `NAME.pack` next to `NAME`, then
//! in the cache directory. If a pack was written to another directory with `--out`, the cache directory has a link to
//! the pack.

mod find;
mod manifest;
mod record;
mod row_file;
mod rows;
mod verify;
mod write;

pub use super::identity::fingerprint;
pub use find::{Pack, all, candidates, default_dir, find, is_complete, link, remove};
pub use row_file::PackedRows;
pub use rows::{find_rows, row_blocks, verify_rows, write_rows, write_with_rows};
pub use verify::verify;
pub use write::{PackSummary, write};

#[cfg(test)]
mod tests;
