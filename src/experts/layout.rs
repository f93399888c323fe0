//! The places of an expert's bytes on disk, and in the slot that they are read into.

use std::ops::Range;

/// Parts of one expert: codes, scales and biases of gate, up and down.
pub const PIECES: usize = 9;

/// Slots and the reads into them start at multiples of this, so that kernels may load whole cache lines.
const ALIGN: usize = 64;

/// Bytes between two pieces that are worth reading rather than asking twice.
const GAP: u64 = 256;

/// One contiguous byte range of one file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Piece {
    /// Index into the store's files.
    pub file: u32,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// 0 where the encoding has no such part.
    pub len: usize,
}

/// The pieces of one layer's experts, on disk.
pub type LayerExperts = Vec<[Piece; PIECES]>;

/// The pieces of every expert: `layers[layer][expert]` is gate's codes, scales, biases, then up's, then down's.
#[derive(Debug, Clone, Default)]
pub struct ExpertMap {
    pub layers: Vec<LayerExperts>,
}

impl ExpertMap {
    /// Experts of all layers together.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Bytes of all experts together, as stored.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|piece| piece.len as u64).sum()
    }

    /// Bytes one slot takes if reads must be aligned to `block` ([`crate::platform::MAX_BLOCK`] is the worst case).
    pub fn slot_bytes(&self, block: usize) -> usize {
        let room = self.layers.iter().flatten().map(|pieces| Layout::new(pieces, block).room).max();
        room.unwrap_or(0).next_multiple_of(block.max(ALIGN))
    }
}

/// One read: a range of a file into a range of a slot, both aligned to the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    pub file: u32,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes asked for; the file may end before.
    pub len: usize,
    /// Bytes that have to arrive: up to the end of the last piece.
    pub need: usize,
    /// Bytes from the start of the slot.
    pub at: usize,
}

/// The reads that bring one expert into a slot. Pieces that touch on disk are one read. A piece keeps its offset modulo
/// the block, so that a direct read needs no copy: the slot is as unaligned as the file is.
#[derive(Debug, Clone)]
pub struct Layout {
    reads: [Read; PIECES],
    count: usize,
    /// Each piece's bytes, from the start of the slot.
    pub spans: [Range<usize>; PIECES],
    /// Bytes of a slot this takes.
    pub room: usize,
}

impl Layout {
    /// Of an expert without bytes.
    pub fn empty() -> Self {
        let none = Read { file: 0, offset: 0, len: 0, need: 0, at: 0 };
        Self { reads: [none; PIECES], count: 0, spans: std::array::from_fn(|_| 0..0), room: 0 }
    }

    /// `block`: a power of two that offset, length and address of a read must be multiples of.
    pub fn new(pieces: &[Piece; PIECES], block: usize) -> Self {
        let mut order: [usize; PIECES] = std::array::from_fn(|i| i);
        order.sort_unstable_by_key(|&i| (pieces[i].file, pieces[i].offset, i));
        let mut layout = Self::empty();
        let mask = block as u64 - 1;
        for i in order {
            let piece = pieces[i];
            if piece.len == 0 {
                continue;
            }
            let end = piece.offset + piece.len as u64;
            let joins = layout.reads[..layout.count].last().filter(|read| {
                let reached = read.offset + read.need as u64;
                read.file == piece.file && piece.offset <= reached + GAP.max(mask)
            });
            let (offset, at, reached) = match joins {
                Some(read) => (read.offset, read.at, read.offset + read.need as u64),
                None => {
                    layout.count += 1;
                    (piece.offset & !mask, layout.room.next_multiple_of(block.max(ALIGN)), 0)
                }
            };
            let need = (end.max(reached) - offset) as usize;
            let len = need.next_multiple_of(block);
            layout.reads[layout.count - 1] = Read { file: piece.file, offset, len, need, at };
            let start = at + (piece.offset - offset) as usize;
            layout.spans[i] = start..start + piece.len;
            layout.room = at + len;
        }
        layout
    }

    pub fn reads(&self) -> &[Read] {
        &self.reads[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(offset: u64, len: usize) -> Piece {
        Piece { file: 0, offset, len }
    }

    #[test]
    fn a_packed_expert_is_one_read_and_an_unpacked_one_is_nine() {
        let mut packed = [Piece::default(); PIECES];
        let mut apart = [Piece::default(); PIECES];
        for i in 0..PIECES {
            packed[i] = piece(4096 + i as u64 * 1000, 1000);
            apart[i] = piece(77 + i as u64 * 1_000_000, 32768);
        }
        let layout = Layout::new(&packed, 512);
        assert_eq!(layout.reads(), [Read { file: 0, offset: 4096, len: 9216, need: 9000, at: 0 }]);
        let layout = Layout::new(&apart, 512);
        assert_eq!(layout.reads().len(), 9);
        assert!(layout.reads().iter().all(|read| read.len == 32768 + 512));
    }

    #[test]
    fn the_real_dimensions_cost_less_than_two_in_a_hundred() {
        // 35B: three projections of 524288 bytes of codes, 32768 of scales and of biases, at odd offsets.
        let lens = [524288, 32768, 32768, 524288, 32768, 32768, 524288, 32768, 32768];
        let pieces: [Piece; PIECES] = std::array::from_fn(|i| piece(9731 + i as u64 * 200_000_001, lens[i]));
        let read: usize = Layout::new(&pieces, 512).reads().iter().map(|read| read.len).sum();
        let asked: usize = lens.iter().sum();
        assert!(read as f64 <= asked as f64 * 1.005, "{read} of {asked}");
    }

    proptest! {
        #[test]
        fn every_piece_lands_whole_and_alone(
            raw in proptest::collection::vec((0u32..3, 0u64..100_000, 0usize..5000), PIECES),
            shift in 0u32..4,
        ) {
            let block = [1usize, 512, 1024, 4096][shift as usize];
            let pieces: [Piece; PIECES] = std::array::from_fn(|i| Piece { file: raw[i].0, offset: raw[i].1, len: raw[i].2 });
            let layout = Layout::new(&pieces, block);
            let mut end = 0;
            for read in layout.reads() {
                prop_assert_eq!((read.offset as usize % block, read.len % block, read.at % block), (0, 0, 0));
                prop_assert!(read.at >= end && read.need <= read.len && read.len < read.need + block);
                end = read.at + read.len;
            }
            prop_assert!(end <= layout.room);
            for (piece, span) in pieces.iter().zip(&layout.spans) {
                prop_assert_eq!(span.len(), piece.len);
                if piece.len > 0 {
                    let read = layout.reads().iter().find(|r| span.start >= r.at && span.end <= r.at + r.need);
                    let read = read.expect("each piece lies in one read");
                    prop_assert_eq!(read.file, piece.file);
                    prop_assert_eq!(read.offset + (span.start - read.at) as u64, piece.offset);
                }
            }
        }
    }
}
