//! Packed experts: a record that is read has to be the record that was written. One that is not is put together again from
//! the checkpoint behind the pack.
//!
//! Summing a record takes a seventh of the time in which a fast disk reads it, and more than a hundredth of a token's while a
//! cold server sees its records for the first time. So the CPU computes with a record while another thread sums it, and a
//! layer ends when all of its sums are right; with one that is not, it computes again ([`Asked::next`](super::Asked::next)).
//! No result leaves the layer before.

use super::{
    layout::{PIECES, Piece},
    source::{Files, Source},
};
use std::{
    fmt, io,
    sync::atomic::{AtomicBool, AtomicU8, Ordering},
};

/// Of so many reads of one record the first is checked: damage on a disk stays where it is and meets that one; what happens on
/// the way may meet any.
const EVERY: u8 = 16;

/// The records of one file, which follow each other from its start.
#[derive(Debug)]
pub struct Records {
    /// Bytes from one record to the next.
    stride: u64,
    /// The offset of each piece in a record, and its length.
    places: [(u64, usize); PIECES],
    records: Vec<Record>,
}

#[derive(Debug)]
struct Record {
    crc32: u32,
    /// Reads since it was last found sound.
    reads: AtomicU8,
    /// It could not be read, or its sum was wrong: it is not read again.
    damaged: AtomicBool,
    /// The same expert in the checkpoint.
    pieces: [Piece; PIECES],
}

impl Records {
    /// `experts`: the checksum of each record, up to the end of its last piece, and the expert's places in the checkpoint.
    pub fn new(
        stride: u64,
        places: [(u64, usize); PIECES],
        experts: impl IntoIterator<Item = (u32, [Piece; PIECES])>,
    ) -> Self {
        let (reads, damaged) = (|| AtomicU8::new(0), || AtomicBool::new(false));
        let record = |(crc32, pieces)| Record { crc32, reads: reads(), damaged: damaged(), pieces };
        Self { stride, places, records: experts.into_iter().map(record).collect() }
    }

    /// Bytes of a record that are read and summed.
    fn len(&self) -> usize {
        let ends = self.places.iter().filter(|(_, len)| *len > 0).map(|&(at, len)| at as usize + len);
        ends.max().unwrap_or(0)
    }
}

/// The records of all files of a pack, and the checkpoint that it stands in for.
pub struct Packed {
    files: Vec<Records>,
    checkpoint: Files,
    /// A record was found damaged, and the log says so.
    told: AtomicBool,
}

impl Packed {
    pub fn new(files: Vec<Records>, checkpoint: Files) -> Self {
        Self { files, checkpoint, told: AtomicBool::new(false) }
    }

    fn record(&self, file: u32, offset: u64) -> Option<(&Records, &Record)> {
        let records = self.files.get(file as usize)?;
        let index = offset.checked_div(records.stride).filter(|index| index * records.stride == offset)?;
        Some((records, records.records.get(usize::try_from(index).ok()?)?))
    }

    /// True for a record that [`Packed::mend`] has put together before: reading it again is in vain.
    pub fn is_damaged(&self, file: u32, offset: u64) -> bool {
        self.record(file, offset).is_some_and(|(_, record)| record.damaged.load(Ordering::Relaxed))
    }

    /// Counts a read of `len` bytes at `offset` of `file`; true if it is this record's turn to be [compared](Packed::compare).
    ///
    /// # Errors
    /// This is not a record: packed experts are read whole.
    pub fn is_due(&self, file: u32, offset: u64, len: usize) -> io::Result<bool> {
        let found = self.record(file, offset).filter(|(records, _)| records.len() == len);
        let (_, record) = found.ok_or_else(no_such_record)?;
        Ok(record.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY))
    }

    /// Compares what was read at `offset` of `file` with the record's checksum.
    ///
    /// # Errors
    /// They differ, or this is not a record.
    pub fn compare(&self, file: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (_, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let found = crc32fast::hash(bytes);
        if found == record.crc32 {
            return Ok(());
        }
        // The next read of it is looked at again.
        record.reads.store(0, Ordering::Relaxed);
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("damaged on the disk or on the way: its checksum is {found:08x}, the pack's {:08x}", record.crc32),
        ))
    }

    /// Puts the record at `offset` of `file` together from the checkpoint, through its page cache, of which it keeps
    /// nothing. `into` has room for all of it. Returns the reads and the bytes that this took.
    ///
    /// # Errors
    /// The checkpoint cannot be read either; the text names its file.
    pub fn mend(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<(u64, u64)> {
        let (records, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let (mut reads, mut bytes) = (0, 0);
        for (piece, &(at, len)) in record.pieces.iter().zip(&records.places) {
            let piece_of = |bytes: &mut [u8]| read_piece(&self.checkpoint, piece, bytes);
            let part = into.get_mut(at as usize..at as usize + len).ok_or_else(no_such_record)?;
            reads += piece_of(part).map_err(|error| {
                let path = self.checkpoint.path(piece.file);
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
            bytes += len as u64;
        }
        Ok((reads, bytes))
    }

    /// Remembers that a record is damaged, for a reason. True if that is new; the first of all records is told in the log.
    pub fn mark(&self, file: u32, offset: u64, why: &dyn fmt::Display) -> bool {
        let Some((_, record)) = self.record(file, offset) else { return false };
        let first = !record.damaged.swap(true, Ordering::Relaxed);
        if first && !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                %why,
                "the pack is damaged; what is damaged of it is read from the checkpoint instead, which takes longer. \
                 `moestro pack --verify` finds out more, and a new pack mends it"
            );
        }
        first
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packed").field("files", &self.files.len()).finish_non_exhaustive()
    }
}

fn no_such_record() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the pack has no such record")
}

/// Fills `into` with a piece's bytes. Returns the number of reads.
fn read_piece(files: &Files, piece: &Piece, into: &mut [u8]) -> io::Result<u64> {
    let (mut done, mut reads) = (0, 0);
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match files.read(piece.file, piece.offset + done as u64, rest) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside an expert")),
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        reads += 1;
    }
    files.drop_cached(piece.file, piece.offset, piece.len);
    Ok(reads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Access;
    use std::io::Write;

    /// Two records of two pieces; the second is in the checkpoint from byte 50 on, its pieces in reverse.
    fn packed(record: &[u8; 200]) -> (Packed, tempfile::NamedTempFile) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[0; 50]).unwrap();
        file.write_all(&record[64..]).unwrap();
        file.write_all(&record[..60]).unwrap();
        let files = Files::open(&[file.path().to_owned()], Access::Buffered).unwrap();
        let (mut places, mut pieces) = ([(200, 0); PIECES], [Piece::default(); PIECES]);
        (places[0], places[3]) = ((0, 60), (64, 136));
        (pieces[0], pieces[3]) = (Piece { file: 0, offset: 186, len: 60 }, Piece { file: 0, offset: 50, len: 136 });
        let records = [(0, pieces), (crc32fast::hash(record), pieces)];
        (Packed::new(vec![Records::new(256, places, records)], files), file)
    }

    fn record() -> [u8; 200] {
        std::array::from_fn(|at| if (60..64).contains(&at) { 0 } else { at as u8 })
    }

    #[test]
    fn one_changed_bit_is_noticed_and_a_part_of_a_record_is_none() {
        let record = record();
        let (packed, _file) = packed(&record);
        for bit in 0..200 * 8 {
            let mut changed = record;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(packed.compare(0, 256, &changed).unwrap_err().to_string().contains("checksum"));
        }
        packed.compare(0, 256, &record).unwrap();
        for (file, offset, len) in [(1, 256, 200), (0, 255, 200), (0, 512, 200), (0, 256, 199)] {
            assert!(packed.is_due(file, offset, len).is_err(), "{file} {offset} {len}");
            assert!(packed.compare(file, offset, &record[..len]).is_err(), "{file} {offset} {len}");
        }
    }

    #[test]
    fn a_sound_record_is_looked_at_again_after_a_while() {
        let record = record();
        let (packed, _file) = packed(&record);
        let due = || packed.is_due(0, 256, 200).unwrap();
        let turns: Vec<usize> = (0..600).filter(|_| due()).collect();
        assert!(turns.iter().copied().eq((0..600).step_by(16)), "{turns:?}");
        assert!(packed.compare(0, 256, &[8; 200]).is_err());
        assert!(due() && !due(), "after a wrong sum it is looked at once more");
    }

    #[test]
    fn a_record_is_put_together_from_the_checkpoint_and_marked_once() {
        let record = record();
        let (packed, file) = packed(&record);
        let mut room = [0; 256];
        assert_eq!(packed.mend(0, 256, &mut room).unwrap(), (2, 196));
        assert_eq!(room[..200], record);
        assert_eq!(room[200..], [0; 56], "what is behind it is not written to");
        assert!(!packed.is_damaged(0, 256));
        assert!(packed.mark(0, 256, &"why") && !packed.mark(0, 256, &"why"), "it is new once");
        assert_eq!([0, 255, 256, 512].map(|offset| packed.is_damaged(0, offset)), [false, false, true, false]);
        for (file, offset) in [(0, 512), (0, 1), (1, 256)] {
            assert!(packed.mend(file, offset, &mut room).is_err() && !packed.mark(file, offset, &""));
        }
        assert!(packed.mend(0, 256, &mut room[..199]).is_err(), "there is no room for it");
        file.as_file().set_len(100).unwrap();
        let why = packed.mend(0, 256, &mut room).unwrap_err().to_string();
        assert!(why.contains(&file.path().display().to_string()), "{why}");
    }
}
