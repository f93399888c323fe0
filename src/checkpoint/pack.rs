//! Packs: one page-aligned record per expert, so that a miss is one read instead of nine. The rows of n-gram tables are packed
//! in the same way (`row_file.rs`).
//!
//! A pack is a separate directory; the checkpoint is never modified. It holds one file per layer (`layer-000.experts` and
//! so on) and a manifest:
//!
//! ```text
//! { "format": "moestro experts", "version": 2, "source": FINGERPRINT, "identity": IDENTITY,
//!   "layers": [ { "file": NAME, "stride": BYTES, "pieces": [[OFFSET, LEN]; 9],
//!                 "sha256": [HEX; experts], "crc32": [NUMBER; experts] } ] }
//! ```
//!
//! Expert `e` of a layer is the record at byte `e * stride`: its nine pieces (codes, scales, biases of gate, up, down)
//! at the manifest's offsets, the rest zero. The stride is a multiple of 16 KiB, the largest page in use.
//!
//! A pack replaces a checkpoint's experts only if every expert has the SHA-256 in the manifest. The [`fingerprint`]
//! finds candidate packs without reading much. All experts are hashed while packing. After that, the
//! [identity](super::identity) of the checkpoint's files replaces those hashes: nothing is read as long as the files
//! have the same identity. If they have another one, they are hashed again. A record's CRC-32 is verified when it is
//! read. A damaged record is rebuilt from the checkpoint.
//!
//! The search looks for `NAME.pack` next to the checkpoint directory `NAME`, then in the cache directory. If `--out`
//! named another directory, the cache directory has a link to it.

mod find;
mod manifest;
mod record;
mod row_file;
mod rows;
mod verify;
mod write;

pub use super::identity::fingerprint;
pub use find::{Pack, candidates, default_dir, find, link};
pub use row_file::{PackedRows, RowRead};
pub use rows::{find_rows, row_blocks, verify_rows, write_rows};
pub use verify::verify;
pub use write::{PackSummary, write};

#[cfg(test)]
mod tests;
