//! Tests of the checksums of packed records: damage is detected, reported once, and repaired from the checkpoint.

use moestro_base::platform::Access;
use moestro_compute::experts::{LayerRecords, PIECES, PackRecords, Piece, ShardFiles};
use std::io::Write;

/// A pack of two records with two pieces each. In the checkpoint, the second record starts at byte 50, and its pieces
/// are in reverse order.
fn pack(record: &[u8; 200]) -> (PackRecords, tempfile::NamedTempFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[0; 50]).unwrap();
    file.write_all(&record[64..]).unwrap();
    file.write_all(&record[..60]).unwrap();
    let files = ShardFiles::open(&[file.path().to_owned()], Access::Buffered).unwrap();
    let (mut pieces, mut source) = ([(200, 0); PIECES], [Piece::default(); PIECES]);
    (pieces[0], pieces[3]) = ((0, 60), (64, 136));
    (source[0], source[3]) = (Piece { file: 0, offset: 186, len: 60 }, Piece { file: 0, offset: 50, len: 136 });
    let records = [(0, source), (crc32fast::hash(record), source)];
    (PackRecords::new(vec![LayerRecords::new(256, pieces, records)], files), file)
}

fn record() -> [u8; 200] {
    std::array::from_fn(|at| if (60..64).contains(&at) { 0 } else { at as u8 })
}

#[test]
fn one_flipped_bit_fails_verification() {
    let record = record();
    let (pack, _file) = pack(&record);
    for bit in 0..200 * 8 {
        let mut changed = record;
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(pack.verify(0, 256, &changed).unwrap_err().to_string().contains("checksum"));
    }
    pack.verify(0, 256, &record).unwrap();
    // These ranges are not whole records.
    for (file, offset, len) in [(1, 256, 200), (0, 255, 200), (0, 512, 200), (0, 256, 199)] {
        assert!(pack.count_read(file, offset, len).is_err(), "{file} {offset} {len}");
        assert!(pack.verify(file, offset, &record[..len]).is_err(), "{file} {offset} {len}");
    }
}

#[test]
fn every_sixteenth_read_is_verified() {
    let record = record();
    let (pack, _file) = pack(&record);
    let count_read = || pack.count_read(0, 256, 200).unwrap();
    let turns: Vec<usize> = (0..600).filter(|_| count_read()).collect();
    assert!(turns.iter().copied().eq((0..600).step_by(16)), "{turns:?}");
    assert!(pack.verify(0, 256, &[8; 200]).is_err());
    assert!(count_read() && !count_read(), "one more verification after a mismatch");
}

#[test]
fn damaged_record_is_rebuilt_and_marked_once() {
    let record = record();
    let (pack, file) = pack(&record);
    let mut buffer = [0; 256];
    assert_eq!(pack.rebuild(0, 256, &mut buffer).unwrap(), (2, 196));
    assert_eq!(buffer[..200], record);
    assert_eq!(buffer[200..], [0; 56], "bytes after the record are untouched");
    assert!(!pack.is_damaged(0, 256));
    assert!(pack.mark_damaged(0, 256, &"why") && !pack.mark_damaged(0, 256, &"why"), "new only once");
    assert_eq!([0, 255, 256, 512].map(|offset| pack.is_damaged(0, offset)), [false, false, true, false]);
    for (file, offset) in [(0, 512), (0, 1), (1, 256)] {
        assert!(pack.rebuild(file, offset, &mut buffer).is_err() && !pack.mark_damaged(file, offset, &""));
    }
    assert!(pack.rebuild(0, 256, &mut buffer[..199]).is_err(), "the buffer is too small");
    file.as_file().set_len(100).unwrap();
    let why = pack.rebuild(0, 256, &mut buffer).unwrap_err().to_string();
    let name = file.path().file_name().unwrap().to_str().unwrap();
    assert!(why.starts_with(name), "{why}");
}
