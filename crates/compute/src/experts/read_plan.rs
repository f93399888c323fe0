//! Read plans: the byte ranges of an expert on disk, and the range of the slot that each read fills.

use std::ops::Range;

/// Number of pieces of one expert: codes, scales and biases of gate, up and down.
pub const PIECES: usize = 9;

/// Alignment of slots and of reads within a slot, in bytes: one cache line, so that kernels can load whole lines.
const ALIGN: usize = 64;

/// Maximum number of bytes between two pieces that share one read. Reading such a gap is cheaper than a second read.
const MAX_GAP: u64 = 256;

/// A contiguous byte range of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Piece {
    /// Index into the store's files.
    pub file: u32,
    /// Offset in bytes from the start of the file.
    pub offset: u64,
    /// Length in bytes. 0 if the encoding has no such piece, for example no biases.
    pub len: usize,
}

/// The pieces of one layer's experts on disk.
pub type LayerExperts = Vec<[Piece; PIECES]>;

/// The pieces of every expert on disk. `layers[layer][expert]` lists codes, scales and biases of gate, then up, then
/// down.
#[derive(Debug, Clone, Default)]
pub struct ExpertMap {
    pub layers: Vec<LayerExperts>,
}

impl ExpertMap {
    /// Number of experts in all layers.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Total size on disk of all experts in bytes.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|piece| piece.len as u64).sum()
    }

    /// Size of a slot in bytes if reads are aligned to `block`. Largest for [`moestro_base::platform::MAX_BLOCK`].
    pub fn slot_bytes(&self, block: usize) -> usize {
        let most = self.layers.iter().flatten().map(|pieces| ReadPlan::new(pieces, block).slot_bytes).max();
        most.unwrap_or(0).next_multiple_of(block.max(ALIGN))
    }
}

/// One read: fills a range of a slot from a range of a file. Both ranges are aligned to the block size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadRange {
    pub file: u32,
    /// Offset in bytes from the start of the file.
    pub offset: u64,
    /// Number of bytes to request, a multiple of the block size. The file may end earlier.
    pub len: usize,
    /// Number of bytes that the read must return: up to the end of the last piece.
    pub needed: usize,
    /// Destination, in bytes from the start of the slot.
    pub at: usize,
}

/// The reads that fill a slot with one expert. Pieces that are adjacent on disk share a read.
///
/// For each read, the offset in the slot is congruent to the file offset modulo the block size, as direct I/O requires.
#[derive(Debug, Clone, Default)]
pub struct ReadPlan {
    reads: [ReadRange; PIECES],
    count: usize,
    /// Range of each piece, in bytes from the start of the slot.
    pub spans: [Range<usize>; PIECES],
    /// Number of bytes from the start of the slot to the end of the last read.
    pub slot_bytes: usize,
}

impl ReadPlan {
    /// Plans the reads of `pieces`. `block` is the alignment of offset, length and address of every read, a power of
    /// two.
    pub fn new(pieces: &[Piece; PIECES], block: usize) -> Self {
        let mut order: [usize; PIECES] = std::array::from_fn(|i| i);
        order.sort_unstable_by_key(|&i| (pieces[i].file, pieces[i].offset, i));
        let mut plan = Self::default();
        let mask = block as u64 - 1;
        for i in order {
            let piece = pieces[i];
            if piece.len == 0 {
                continue;
            }
            let end = piece.offset + piece.len as u64;
            let joins = plan.reads[..plan.count].last().filter(|read| {
                let reached = read.offset + read.needed as u64;
                read.file == piece.file && piece.offset <= reached + MAX_GAP.max(mask)
            });
            let (offset, at, reached) = match joins {
                Some(read) => (read.offset, read.at, read.offset + read.needed as u64),
                None => {
                    plan.count += 1;
                    (piece.offset & !mask, plan.slot_bytes.next_multiple_of(block.max(ALIGN)), 0)
                }
            };
            let needed = (end.max(reached) - offset) as usize;
            let len = needed.next_multiple_of(block);
            plan.reads[plan.count - 1] = ReadRange { file: piece.file, offset, len, needed, at };
            let start = at + (piece.offset - offset) as usize;
            plan.spans[i] = start..start + piece.len;
            plan.slot_bytes = at + len;
        }
        plan
    }

    pub fn reads(&self) -> &[ReadRange] {
        &self.reads[..self.count]
    }
}
