//! One read: from the disk into its slot, and what stands in for it where a pack is damaged.

use super::{
    super::{Packed, layout::Read},
    End, Failure, Job, Shared,
};
use std::{io, ops::Range, sync::atomic::Ordering, time::Instant};

impl Shared {
    fn range(&self, job: &Job) -> Range<usize> {
        let base = job.slot.index() * self.slot_bytes + job.read.at;
        base..base + job.read.len
    }

    fn failed(&self, read: &Read, source: io::Error) -> Failure {
        self.metrics.ssd_errors.inc();
        Failure { file: read.file, offset: read.offset, len: read.need, source }
    }

    /// Reads one range into its slot. A pack's record that cannot be read, or is not what was written, is put together
    /// from the checkpoint.
    pub(super) fn read(&self, job: &Job) -> End {
        let read = &job.read;
        // SAFETY: the slot's state is Reading, so nobody reads it, and each of its reads has a range of its own and is taken
        // from the queue by one thread. A slot gets another expert only after all its reads have ended.
        let into = unsafe { self.slab.bytes_mut(self.range(job)) };
        let Some(packed) = self.source.packed() else {
            return self.fetch(read, into).map_or_else(|error| End::Failed(self.failed(read, error)), |()| End::Sound);
        };
        let mut why = None;
        if !packed.is_damaged(read.file, read.offset) {
            let due = self.fetch(read, into).and_then(|()| packed.is_due(read.file, read.offset, read.need));
            let read_in = into.get(..read.need).unwrap_or_default();
            match due {
                Ok(true) if job.whole && self.beside.load(Ordering::Relaxed) => return End::Unchecked,
                Ok(true) => why = packed.compare(read.file, read.offset, read_in).err(),
                Ok(false) => {}
                Err(error) => why = Some(error),
            }
            if why.is_none() {
                return End::Sound;
            }
        }
        let why = why.map(|why| self.failed(read, why).source);
        match packed.mend(read.file, read.offset, into) {
            Ok((reads, bytes)) => {
                self.metrics.ssd_reads.inc_by(reads);
                self.metrics.ssd_read_bytes.inc_by(bytes);
                if let Some(why) = why {
                    self.mark(packed, read, &why);
                }
                End::Sound
            }
            Err(error) => {
                let why = why.map(|why| format!("{why}; ")).unwrap_or_default();
                let both = format!("{why}the checkpoint cannot be read either: {error}");
                End::Failed(self.failed(read, io::Error::new(error.kind(), both)))
            }
        }
    }

    /// Compares a record that is [`State::Checking`] with its checksum.
    pub(super) fn compare(&self, job: &Job) -> End {
        let (read, base) = (&job.read, self.range(job).start);
        let Some(packed) = self.source.packed() else { return End::Sound };
        // SAFETY: the slot's state is Checking: nobody writes to it, and it is not given to another expert.
        let bytes = unsafe { self.slab.bytes(base..base + read.need) };
        match packed.compare(read.file, read.offset, bytes) {
            Ok(()) => End::Sound,
            Err(why) => {
                self.mark(packed, read, &self.failed(read, why).source);
                End::Damaged
            }
        }
    }

    /// A record is damaged: from now on the checkpoint stands in for it.
    fn mark(&self, packed: &Packed, read: &Read, why: &io::Error) {
        let (path, offset) = (self.source.path(read.file), read.offset);
        if packed.mark(read.file, offset, &format_args!("{}, record at byte {offset}: {why}", path.display())) {
            self.metrics.pack_damaged_records.inc();
        }
    }

    /// Reads one range, over interruptions and short reads.
    fn fetch(&self, read: &Read, into: &mut [u8]) -> io::Result<()> {
        let block = self.source.block();
        let mut have = 0;
        while have < read.need {
            let begin = Instant::now();
            let result = match into.get_mut(have..) {
                Some(rest) => self.source.read(read.file, read.offset + have as u64, rest),
                None => Ok(0),
            };
            let got = match result {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.metrics.ssd_reads.inc();
            self.metrics.ssd_read_bytes.inc_by(got as u64);
            self.metrics.ssd_read_seconds.observe(begin.elapsed().as_secs_f64());
            if have + got >= read.need {
                break;
            }
            // A direct read goes on at a block's start. Less than a block more than before is the file's end.
            let reached = (have + got) / block * block;
            if reached == have {
                let size = self.source.size(read.file).unwrap_or(0);
                let text =
                    format!("the file ends {} bytes too early (it had {size} when opened)", read.need - have - got);
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
            have = reached;
        }
        Ok(())
    }
}
