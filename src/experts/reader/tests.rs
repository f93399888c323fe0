//! The pool on a source that reads when it is told to.

use super::{super::slots::Slots, super::source::Source, *};
use crate::{
    experts::{Files, PIECES, Packed, Piece, Records},
    platform::Access,
};
use std::path::PathBuf;

const SLOT: usize = 16 << 10;

/// The reads begun so far, by their offsets, and how many of them may end.
#[derive(Default)]
pub(in crate::experts) struct Gate {
    state: Mutex<(Vec<u64>, usize)>,
    bell: Condvar,
}

impl Gate {
    pub(in crate::experts) fn open(&self, reads: usize) {
        self.state.lock().1 += reads;
        self.bell.notify_all();
    }

    /// The offsets of the reads begun, once there are so many.
    pub(in crate::experts) fn begun(&self, reads: usize) -> Vec<u64> {
        let mut state = self.state.lock();
        while state.0.len() < reads {
            let waited = self.bell.wait_for(&mut state, Duration::from_secs(20));
            assert!(!waited.timed_out(), "{:?}, and not {reads}", state.0);
        }
        state.0.clone()
    }
}

/// Every byte is its offset's page. What lies at or behind `broken` cannot be read.
pub(in crate::experts) struct Gated {
    pub(in crate::experts) gate: Arc<Gate>,
    pub(in crate::experts) broken: u64,
}

impl Source for Gated {
    fn read(&self, _: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut state = self.gate.state.lock();
        state.0.push(offset);
        self.gate.bell.notify_all();
        while state.1 == 0 {
            self.gate.bell.wait(&mut state);
        }
        state.1 -= 1;
        if offset >= self.broken {
            return Err(io::Error::other("broken"));
        }
        into.fill((offset / 4096) as u8);
        Ok(into.len())
    }

    fn size(&self, _: u32) -> Option<u64> {
        Some(1 << 40)
    }

    fn path(&self, _: u32) -> PathBuf {
        "gated".into()
    }

    fn block(&self) -> usize {
        1
    }
}

struct Pool {
    reader: Reader,
    states: States,
    gate: Arc<Gate>,
    slab: Arc<Slab>,
    metrics: Arc<Metrics>,
}

fn pool(threads: usize) -> Pool {
    let gate = Arc::<Gate>::default();
    let slab = Arc::new(Slab::new(8 * SLOT).unwrap());
    let states = Slots::new(8, 8).states().clone();
    let source = Box::new(Gated { gate: gate.clone(), broken: 100 * 4096 });
    let metrics = Metrics::new("0", "cpu");
    let reader = Reader::new(source, slab.clone(), states.clone(), SLOT, threads, metrics.clone()).unwrap();
    Pool { reader, states, gate, slab, metrics }
}

/// An expert of `reads` reads of one page, from page `first` on, every other page.
fn expert(first: u64, reads: usize) -> Layout {
    let piece = |nth: usize| Piece { file: 0, offset: (first + 2 * nth as u64) * 4096, len: 512 };
    Layout::new(&std::array::from_fn::<_, PIECES, _>(|nth| if nth < reads { piece(nth) } else { Piece::default() }), 1)
}

impl Pool {
    fn demand(&self, slot: u32, layout: Layout) {
        self.states.set(SlotId(slot), State::Reading);
        self.reader.demand(SlotId(slot), layout);
    }

    fn later(&self, slot: u32, layout: Layout) {
        self.states.set(SlotId(slot), State::Queued);
        self.reader.later(SlotId(slot), layout);
    }

    fn pages(&self, reads: usize) -> Vec<u64> {
        self.gate.begun(reads).iter().map(|offset| offset / 4096).collect()
    }

    fn landed(&self, experts: u64) {
        while self.reader.landed() < experts {
            self.reader.wait(self.reader.landed());
        }
    }
}

#[test]
fn what_is_asked_for_comes_first_and_what_is_taken_back_never() {
    let pool = pool(1);
    assert!(!pool.reader.is_busy());
    pool.demand(0, expert(0, 1));
    assert_eq!(pool.pages(1), [0]);
    for slot in 1..4 {
        pool.later(slot, expert(10 * u64::from(slot), 1));
    }
    pool.demand(4, expert(40, 1));
    pool.reader.hurry(SlotId(3));
    assert!(pool.reader.cancel(SlotId(1)) && !pool.reader.cancel(SlotId(1)), "once");
    assert!(![0, 3, 4].iter().any(|slot| pool.reader.cancel(SlotId(*slot))), "they have been started");
    assert!(pool.reader.is_busy());
    pool.gate.open(4);
    pool.landed(4);
    assert_eq!(pool.pages(4), [0, 40, 30, 20]);
    let states = [0, 1, 2, 3, 4].map(|slot| pool.states.get(SlotId(slot)));
    assert_eq!(states, [State::Ready, State::Queued, State::Ready, State::Ready, State::Ready]);
    pool.reader.wait(3);
    assert!(!pool.reader.is_busy());
    assert_eq!((pool.metrics.ssd_reads.get(), pool.metrics.ssd_read_bytes.get()), (4, 4 * 512));
    // SAFETY: all reads have ended.
    let bytes = unsafe { pool.slab.bytes(3 * SLOT..3 * SLOT + 512) };
    assert!(bytes.iter().all(|byte| *byte == 30), "each in its slot");
}

#[test]
fn a_pool_whose_only_read_is_under_way_is_busy() {
    let pool = pool(1);
    pool.demand(0, expert(0, 1));
    assert_eq!(pool.pages(1), [0]);
    let busy = pool.reader.is_busy();
    pool.gate.open(1);
    pool.landed(1);
    assert_eq!((busy, pool.reader.is_busy()), (true, false));
}

#[test]
fn half_of_the_threads_are_kept_for_what_is_asked_for() {
    for (threads, share) in [(1, 1), (2, 1), (3, 2), (4, 2)] {
        let pool = pool(threads);
        for slot in 0..4 {
            pool.later(slot, expert(10 * u64::from(slot), 1));
        }
        pool.gate.begun(share);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(pool.pages(share).len(), share, "{threads} threads");
        if threads > share {
            pool.demand(4, expert(40, 1));
            assert_eq!(pool.pages(share + 1)[share], 40);
        }
        pool.gate.open(5);
        pool.landed(4 + u64::from(threads > share));
        assert!((0..4).all(|slot| pool.states.get(SlotId(slot)) == State::Ready));
    }
}

#[test]
fn an_expert_that_is_hurried_moves_all_that_is_left_of_it() {
    let pool = pool(1);
    pool.later(0, expert(0, 3));
    assert_eq!(pool.pages(1), [0]);
    pool.later(1, expert(10, 2));
    pool.reader.hurry(SlotId(0));
    pool.demand(2, expert(20, 1));
    pool.gate.open(2);
    assert_eq!(pool.pages(3), [0, 2, 4]);
    assert_eq!((pool.reader.landed(), pool.states.get(SlotId(0))), (0, State::Reading), "a read of it is under way");
    pool.gate.open(4);
    pool.landed(3);
    assert_eq!(pool.pages(6), [0, 2, 4, 20, 10, 12]);
}

#[test]
fn a_failure_is_told_once_and_forgotten_with_the_next_expert() {
    let pool = pool(2);
    pool.gate.open(100);
    // The second of its reads fails.
    pool.demand(5, expert(98, 2));
    pool.landed(1);
    assert_eq!(pool.states.get(SlotId(5)), State::Failed);
    assert_eq!(pool.metrics.ssd_errors.get(), 1);
    let failure = pool.reader.failure(SlotId(5)).unwrap();
    assert_eq!((failure.file, failure.offset, failure.len), (0, 100 * 4096, 512));
    assert!(pool.reader.failure(SlotId(5)).is_none() && pool.reader.failure(SlotId(4)).is_none());
    pool.demand(5, expert(7, 2));
    pool.landed(2);
    assert_eq!(pool.states.get(SlotId(5)), State::Ready);
    // One without bytes is there at once.
    pool.demand(6, Layout::empty());
    assert_eq!((pool.reader.landed(), pool.states.get(SlotId(6))), (3, State::Ready));
    assert!(!pool.reader.is_busy());
}

/// Gives a hundred bytes at most at a time; each byte says where it is.
struct Short;

impl Source for Short {
    fn read(&self, _: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        assert_eq!((offset % 64, into.len() % 64), (0, 0));
        let got = into.len().min(100);
        (offset..).zip(&mut into[..got]).for_each(|(at, byte)| *byte = (at * 7 + at / 256) as u8);
        Ok(got)
    }

    fn size(&self, _: u32) -> Option<u64> {
        None
    }

    fn path(&self, _: u32) -> PathBuf {
        "short".into()
    }

    fn block(&self) -> usize {
        64
    }
}

#[test]
fn short_reads_go_on_at_a_blocks_start() {
    let (slab, states) = (Arc::new(Slab::new(SLOT).unwrap()), Slots::new(1, 1).states().clone());
    let metrics = Metrics::new("0", "cpu");
    let reader = Reader::new(Box::new(Short), slab.clone(), states.clone(), SLOT, 1, metrics.clone()).unwrap();
    let mut pieces = [Piece::default(); PIECES];
    pieces[0] = Piece { file: 0, offset: 1000, len: 500 };
    let layout = Layout::new(&pieces, 64);
    let span = layout.spans[0].clone();
    states.set(SlotId(0), State::Reading);
    reader.demand(SlotId(0), layout);
    reader.wait(0);
    assert_eq!(states.get(SlotId(0)), State::Ready);
    // SAFETY: the read has ended.
    let bytes = unsafe { slab.bytes(span) };
    assert!((1000u64..).zip(bytes).all(|(at, byte)| *byte == (at * 7 + at / 256) as u8));
    // From byte 960 on 540 are needed: 100 bring 64 further each time, until 36 or fewer are missing.
    assert_eq!((metrics.ssd_reads.get(), metrics.ssd_read_bytes.get()), (8, 800));
}

#[test]
fn waiting_ends_when_more_has_landed_and_not_before() {
    let pool = pool(1);
    pool.demand(0, expert(0, 1));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| pool.reader.wait(0));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waits.is_finished(), "nothing has landed");
        pool.gate.open(1);
        waits.join().unwrap();
    });
    assert_eq!(pool.reader.landed(), 1);
}

#[test]
fn a_damaged_record_is_counted_once_and_not_read_again() {
    const LEN: usize = 512;
    // The pack's record is zeros, and its checksum is of what the checkpoint has.
    let dir = tempfile::tempdir().unwrap();
    let [pack, checkpoint] = [("pack", 0u8), ("checkpoint", 7)].map(|(name, byte)| {
        let path = dir.path().join(name);
        std::fs::write(&path, [byte; LEN]).unwrap();
        Files::open(&[path], Access::Buffered).unwrap()
    });
    let mut pieces = [Piece::default(); PIECES];
    pieces[0] = Piece { file: 0, offset: 0, len: LEN };
    let places = std::array::from_fn(|part| (0, if part == 0 { LEN } else { 0 }));
    let records = Records::new(LEN as u64, places, [(crc32fast::hash(&[7; LEN]), pieces)]);
    let source = Box::new(pack.with_packed(Some(Arc::new(Packed::new(vec![records], checkpoint)))));
    let (slab, states) = (Arc::new(Slab::new(SLOT).unwrap()), Slots::new(1, 1).states().clone());
    let metrics = Metrics::new("0", "cpu");
    let reader = Reader::new(source, slab.clone(), states.clone(), SLOT, 1, metrics.clone()).unwrap();
    let layout = Layout::new(&pieces, reader.source().block());
    for landed in 0..3 {
        states.set(SlotId(0), State::Reading);
        reader.demand(SlotId(0), layout.clone());
        reader.wait(landed);
        assert_eq!(states.get(SlotId(0)), State::Ready);
        // SAFETY: the read has ended.
        let bytes = unsafe { slab.bytes(layout.spans[0].clone()) };
        assert!(bytes.iter().all(|byte| *byte == 7), "the checkpoint's");
        assert_eq!((metrics.pack_damaged_records.get(), metrics.ssd_errors.get()), (1, 1), "read {landed}");
    }
}
