//! Checksums of packed experts: a record that is read has to be the record that was written.

use std::io;

/// The records of one file, which follow each other from its start.
#[derive(Debug)]
pub struct Records {
    /// Bytes from one record to the next.
    stride: u64,
    /// Bytes of a record that are summed: its pieces.
    len: usize,
    /// CRC-32 of each.
    sums: Vec<u32>,
}

impl Records {
    pub fn new(stride: u64, len: usize, sums: Vec<u32>) -> Self {
        Self { stride, len, sums }
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

    /// Compares what was read at `offset` of `file` with the record's checksum.
    ///
    /// # Errors
    /// They differ, or this is not a record: packed experts are read whole.
    pub fn check(&self, file: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let damaged = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let sum = self.files.get(file as usize).and_then(|records| {
            let index = offset.checked_div(records.stride).filter(|index| index * records.stride == offset)?;
            records.sums.get(usize::try_from(index).ok()?).filter(|_| bytes.len() == records.len)
        });
        let Some(&sum) = sum else { return damaged("the pack has no such record".into()) };
        match crc32fast::hash(bytes) {
            found if found == sum => Ok(()),
            found => damaged(format!(
                "damaged on the disk or on the way: its checksum is {found:08x}, the pack's {sum:08x}; \
                 `moestro pack --verify` finds out more, and a new pack mends it"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_bit_is_noticed_and_a_part_of_a_record_is_none() {
        let record: Vec<u8> = (0..200u8).collect();
        let sums = Sums::new(vec![Records::new(256, 200, vec![0, crc32fast::hash(&record)])]);
        sums.check(0, 256, &record).unwrap();
        for bit in 0..200 * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(sums.check(0, 256, &changed).unwrap_err().to_string().contains("checksum"));
        }
        for (file, offset, len) in [(1, 256, 200), (0, 0, 200), (0, 255, 200), (0, 512, 200), (0, 256, 199)] {
            assert!(sums.check(file, offset, &record[..len]).is_err(), "{file} {offset} {len}");
        }
    }
}
