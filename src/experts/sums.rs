//! Checksums of packed experts: a record that is read has to be the record that was written.

use std::{
    io,
    sync::atomic::{AtomicU8, Ordering},
};

/// Of so many reads of one record the first is checked. Summing takes a seventh of the time that a fast disk reads in,
/// and damage on a disk stays where it is: it meets the first read, a later one may meet what happens on the way.
const EVERY: u8 = 16;

/// The records of one file, which follow each other from its start.
#[derive(Debug)]
pub struct Records {
    /// Bytes from one record to the next.
    stride: u64,
    /// Bytes of a record that are summed: its pieces.
    len: usize,
    /// CRC-32 of each, and how often it was read since it was last found sound.
    sums: Vec<(u32, AtomicU8)>,
}

impl Records {
    pub fn new(stride: u64, len: usize, sums: Vec<u32>) -> Self {
        Self { stride, len, sums: sums.into_iter().map(|sum| (sum, AtomicU8::new(0))).collect() }
    }
}

/// The records of all files of a pack.
#[derive(Debug)]
pub struct Sums {
    files: Vec<Records>,
}

impl Sums {
    pub fn new(files: Vec<Records>) -> Self {
        Self { files }
    }

    /// Compares what was read at `offset` of `file` with the record's checksum, if it is this record's turn.
    ///
    /// # Errors
    /// They differ, or this is not a record: packed experts are read whole.
    pub fn check(&self, file: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let damaged = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let sum = self.files.get(file as usize).and_then(|records| {
            let index = offset.checked_div(records.stride).filter(|index| index * records.stride == offset)?;
            records.sums.get(usize::try_from(index).ok()?).filter(|_| bytes.len() == records.len)
        });
        let Some((sum, reads)) = sum else { return damaged("the pack has no such record".into()) };
        if !reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
            return Ok(());
        }
        let found = crc32fast::hash(bytes);
        if found == *sum {
            return Ok(());
        }
        // The next read of it is looked at again.
        reads.store(0, Ordering::Relaxed);
        damaged(format!(
            "damaged on the disk or on the way: its checksum is {found:08x}, the pack's {sum:08x}; \
             `moestro pack --verify` finds out more, and a new pack mends it"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(record: &[u8]) -> Sums {
        Sums::new(vec![Records::new(256, 200, vec![0, crc32fast::hash(record)])])
    }

    #[test]
    fn one_changed_bit_is_noticed_and_a_part_of_a_record_is_none() {
        let record: Vec<u8> = (0..200u8).collect();
        let sums = sums(&record);
        for bit in 0..200 * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(sums.check(0, 256, &changed).unwrap_err().to_string().contains("checksum"));
        }
        for (file, offset, len) in [(1, 256, 200), (0, 0, 200), (0, 255, 200), (0, 512, 200), (0, 256, 199)] {
            assert!(sums.check(file, offset, &record[..len]).is_err(), "{file} {offset} {len}");
        }
    }

    #[test]
    fn a_sound_record_is_looked_at_again_after_a_while() {
        let record = [7; 200];
        let sums = sums(&record);
        sums.check(0, 256, &record).unwrap();
        let noticed = (1..=1024).filter(|_| sums.check(0, 256, &[8; 200]).is_err()).count();
        assert_eq!(noticed, 1024 - 15, "from its next turn on it is looked at each time");
    }
}
