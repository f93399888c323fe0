//! Tests of read plans, which combine the pieces of an expert into aligned reads.

use moestro_compute::experts::{
    PIECES, Piece,
    read_plan::{ReadPlan, ReadRange},
};
use proptest::prelude::*;

fn piece(offset: u64, len: usize) -> Piece {
    Piece { file: 0, offset, len }
}

#[test]
fn packed_expert_needs_one_read_unpacked_nine() {
    let mut packed = [Piece::default(); PIECES];
    let mut apart = [Piece::default(); PIECES];
    for i in 0..PIECES {
        packed[i] = piece(4096 + i as u64 * 1000, 1000);
        apart[i] = piece(77 + i as u64 * 1_000_000, 32768);
    }
    let plan = ReadPlan::new(&packed, 512);
    assert_eq!(plan.reads(), [ReadRange { file: 0, offset: 4096, len: 9216, needed: 9000, at: 0 }]);
    let plan = ReadPlan::new(&apart, 512);
    assert_eq!(plan.reads().len(), 9);
    assert!(plan.reads().iter().all(|read| read.len == 32768 + 512));
}

#[test]
fn real_dimensions_read_under_one_percent_extra() {
    // An expert of the 35B has three projections. Each projection has 524,288 bytes of codes, 32,768 bytes of scales
    // and 32,768 bytes of biases, at odd offsets.
    let lens = [524288, 32768, 32768, 524288, 32768, 32768, 524288, 32768, 32768];
    let pieces: [Piece; PIECES] = std::array::from_fn(|i| piece(9731 + i as u64 * 200_000_001, lens[i]));
    let read: usize = ReadPlan::new(&pieces, 512).reads().iter().map(|read| read.len).sum();
    let needed: usize = lens.iter().sum();
    assert!(read as f64 <= needed as f64 * 1.005, "{read} of {needed}");
}

proptest! {
    #[test]
    fn every_piece_lands_whole_in_one_read(
        raw in proptest::collection::vec((0u32..3, 0u64..100_000, 0usize..5000), PIECES),
        shift in 0u32..4,
    ) {
        let block = [1usize, 512, 1024, 4096][shift as usize];
        let pieces: [Piece; PIECES] = std::array::from_fn(|i| Piece { file: raw[i].0, offset: raw[i].1, len: raw[i].2 });
        let plan = ReadPlan::new(&pieces, block);
        let mut end = 0;
        for read in plan.reads() {
            prop_assert_eq!((read.offset as usize % block, read.len % block, read.at % block), (0, 0, 0));
            prop_assert!(read.at >= end && read.needed <= read.len && read.len < read.needed + block);
            end = read.at + read.len;
        }
        prop_assert!(end <= plan.slot_bytes);
        for (piece, span) in pieces.iter().zip(&plan.spans) {
            prop_assert_eq!(span.len(), piece.len);
            if piece.len > 0 {
                let read = plan.reads().iter().find(|r| span.start >= r.at && span.end <= r.at + r.needed);
                let read = read.expect("each piece lies in one read");
                prop_assert_eq!(read.file, piece.file);
                prop_assert_eq!(read.offset + (span.start - read.at) as u64, piece.offset);
            }
        }
    }
}
