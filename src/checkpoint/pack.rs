//! Packed experts: one page-aligned record per expert, so that a miss is one read instead of nine.
//!
//! A pack is a directory of its own; the checkpoint is never written to. It holds one file a layer, `layer-000.experts`
//! and so on, and a manifest:
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
//! A pack may stand in for a checkpoint only if every expert has the SHA-256 that the manifest says; [`fingerprint`]
//! finds the packs that come into question without reading much. All experts are hashed while packing, when all are
//! read anyway. Later the checkpoint's [`identity`](super::identity) stands for that: as long as the files are the very ones that were
//! hashed, nothing is read; if they are not, they are hashed once more. A record's CRC-32 is compared when it is read;
//! one that is damaged is read from the checkpoint.
//!
//! A pack is looked for as `NAME.pack` beside the checkpoint directory `NAME`, then in the cache directory; where `--out`
//! put it elsewhere, the cache holds a link to it.

mod find;
mod fingerprint;
mod manifest;
mod record;
mod verify;
mod write;

pub use find::{Pack, candidates, default_dir, find, link};
pub use fingerprint::fingerprint;
pub use verify::verify;
pub use write::{PackSummary, write};

#[cfg(test)]
mod tests;
