//! Tests of the reader pool, with a source whose reads block until the test allows them.

use super::*;
use moestro_base::platform::MAX_BLOCK;
use parking_lot::{Condvar, Mutex};
use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

const SLOT: usize = 16 << 10;

fn layout(slots: usize) -> SlotLayout {
    SlotLayout::new(slots, SLOT, slots * SLOT).unwrap()
}

/// Blocks reads until the test allows them to end.
pub(super) struct ReadPermits {
    /// Offsets of the reads that have begun, and the number of reads that may end.
    state: Mutex<(Vec<u64>, usize)>,
    changed: Condvar,
    /// Reads that begin now at this offset or higher will fail.
    pub(super) broken_from: AtomicU64,
}

impl ReadPermits {
    pub(super) fn new(broken_from: u64) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), broken_from: broken_from.into() })
    }

    pub(super) fn allow(&self, reads: usize) {
        self.state.lock().1 += reads;
        self.changed.notify_all();
    }

    /// Waits until `reads` reads have begun. Returns their offsets.
    pub(super) fn begun(&self, reads: usize) -> Vec<u64> {
        let mut state = self.state.lock();
        while state.0.len() < reads {
            let waited = self.changed.wait_for(&mut state, Duration::from_secs(20));
            assert!(!waited.timed_out(), "{:?}, and not {reads}", state.0);
        }
        state.0.clone()
    }
}

/// A source in which each byte is the number of its page.
pub(super) struct BlockingSource {
    pub(super) permits: Arc<ReadPermits>,
}

impl ExpertSource for BlockingSource {
    fn read(&self, _: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let is_broken = offset >= self.permits.broken_from.load(Ordering::Relaxed);
        let mut state = self.permits.state.lock();
        state.0.push(offset);
        self.permits.changed.notify_all();
        while state.1 == 0 {
            self.permits.changed.wait(&mut state);
        }
        state.1 -= 1;
        if is_broken {
            return Err(io::Error::other("broken"));
        }
        into.fill((offset / 4096) as u8);
        Ok(into.len())
    }

    fn size(&self, _: u32) -> Option<u64> {
        Some(1 << 40)
    }

    fn path(&self, _: u32) -> PathBuf {
        "blocking".into()
    }

    fn block(&self) -> usize {
        1
    }
}

struct TestPool {
    reader: ExpertReader,
    states: SlotStates,
    permits: Arc<ReadPermits>,
    slab: Arc<Slab>,
    metrics: Arc<Metrics>,
}

fn pool(threads: usize) -> TestPool {
    let permits = ReadPermits::new(100 * 4096);
    let slab = Arc::new(Slab::new(8 * SLOT).unwrap());
    let states = SlotTable::new(8, 8).states().clone();
    let source = Box::new(BlockingSource { permits: permits.clone() });
    let metrics = Metrics::new("0", "cpu");
    let reader = ExpertReader::new(source, slab.clone(), states.clone(), layout(8), threads, metrics.clone()).unwrap();
    TestPool { reader, states, permits, slab, metrics }
}

/// A plan of `reads` reads of 512 bytes each, at the start of pages `first`, `first + 2`, `first + 4`, ...
fn expert(first: u64, reads: usize) -> ReadPlan {
    let piece = |nth: usize| Piece { file: 0, offset: (first + 2 * nth as u64) * 4096, len: 512 };
    ReadPlan::new(
        &std::array::from_fn::<_, PIECES, _>(|nth| if nth < reads { piece(nth) } else { Piece::default() }),
        1,
    )
}

impl TestPool {
    fn demand(&self, slot: u32, plan: ReadPlan) {
        self.states.set(SlotId(slot), SlotState::Reading);
        self.reader.read_now(SlotId(slot), plan);
    }

    fn later(&self, slot: u32, plan: ReadPlan) {
        self.states.set(SlotId(slot), SlotState::Queued);
        self.reader.read_later(SlotId(slot), plan);
    }

    fn pages(&self, reads: usize) -> Vec<u64> {
        self.permits.begun(reads).iter().map(|offset| offset / 4096).collect()
    }

    fn finished(&self, experts: u64) {
        while self.reader.finished() < experts {
            self.reader.wait(self.reader.finished());
        }
    }
}

#[test]
fn pack_records_are_read_into_whole_pages() {
    let checkpoint = checkpoint();
    let Ok((_, Access::Direct)) = ShardFiles::open_as(&checkpoint.files(), ReadMode::Direct, false) else {
        return println!("skipped: the file system has no direct reads");
    };
    let (pack, access) = ShardFiles::open_as(&checkpoint.files(), ReadMode::Direct, true).unwrap();
    assert_eq!((pack.block(), access), (MAX_BLOCK, Access::Direct));
    assert!(checkpoint.map.slot_bytes(pack.block()).is_multiple_of(MAX_BLOCK));
}

#[test]
fn demand_runs_first_and_is_not_cancelled() {
    let pool = pool(1);
    assert!(!pool.reader.is_busy());
    pool.demand(0, expert(0, 1));
    assert_eq!(pool.pages(1), [0]);
    for slot in 1..4 {
        pool.later(slot, expert(10 * u64::from(slot), 1));
    }
    pool.demand(4, expert(40, 1));
    pool.reader.expedite(SlotId(3));
    assert!(pool.reader.cancel(SlotId(1)) && !pool.reader.cancel(SlotId(1)), "cancelled once");
    assert!(![0, 3, 4].iter().any(|slot| pool.reader.cancel(SlotId(*slot))), "started reads are not cancelled");
    assert!(pool.reader.is_busy());
    pool.permits.allow(4);
    pool.finished(4);
    assert_eq!(pool.pages(4), [0, 40, 30, 20]);
    let states = [0, 1, 2, 3, 4].map(|slot| pool.states.get(SlotId(slot)));
    assert_eq!(states, [SlotState::Ready, SlotState::Queued, SlotState::Ready, SlotState::Ready, SlotState::Ready]);
    pool.reader.wait(3);
    assert!(!pool.reader.is_busy());
    assert_eq!((pool.metrics.ssd_reads.get(), pool.metrics.ssd_read_bytes.get()), (4, 4 * 512));
    // SAFETY: all reads have ended.
    let bytes = unsafe { pool.slab.bytes(3 * SLOT..3 * SLOT + 512) };
    assert!(bytes.iter().all(|byte| *byte == 30), "slot 3 has the bytes of page 30");
}

#[test]
fn pool_with_one_running_read_is_busy() {
    let pool = pool(1);
    pool.demand(0, expert(0, 1));
    assert_eq!(pool.pages(1), [0]);
    let busy = pool.reader.is_busy();
    pool.permits.allow(1);
    pool.finished(1);
    assert_eq!((busy, pool.reader.is_busy()), (true, false));
}

#[test]
fn background_reads_use_half_the_threads() {
    for (threads, share) in [(1, 1), (2, 1), (3, 2), (4, 2)] {
        let pool = pool(threads);
        for slot in 0..4 {
            pool.later(slot, expert(10 * u64::from(slot), 1));
        }
        pool.permits.begun(share);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(pool.pages(share).len(), share, "{threads} threads");
        if threads > share {
            pool.demand(4, expert(40, 1));
            assert_eq!(pool.pages(share + 1)[share], 40);
        }
        pool.permits.allow(5);
        pool.finished(4 + u64::from(threads > share));
        assert!((0..4).all(|slot| pool.states.get(SlotId(slot)) == SlotState::Ready));
    }
}

#[test]
fn expedited_expert_moves_its_remaining_reads() {
    let pool = pool(1);
    pool.later(0, expert(0, 3));
    assert_eq!(pool.pages(1), [0]);
    pool.later(1, expert(10, 2));
    pool.reader.expedite(SlotId(0));
    pool.demand(2, expert(20, 1));
    pool.permits.allow(2);
    assert_eq!(pool.pages(3), [0, 2, 4]);
    assert_eq!(
        (pool.reader.finished(), pool.states.get(SlotId(0))),
        (0, SlotState::Reading),
        "one of its reads is running"
    );
    pool.permits.allow(4);
    pool.finished(3);
    assert_eq!(pool.pages(6), [0, 2, 4, 20, 10, 12]);
}

#[test]
fn failure_is_reported_once_and_then_cleared() {
    let pool = pool(2);
    pool.permits.allow(100);
    // The second of the expert's two reads fails.
    pool.demand(5, expert(98, 2));
    pool.finished(1);
    assert_eq!(pool.states.get(SlotId(5)), SlotState::Failed);
    assert_eq!(pool.metrics.ssd_errors.get(), 1);
    let failure = pool.reader.take_failure(SlotId(5)).unwrap();
    assert_eq!((failure.file, failure.offset, failure.len), (0, 100 * 4096, 512));
    assert!(pool.reader.take_failure(SlotId(5)).is_none() && pool.reader.take_failure(SlotId(4)).is_none());
    pool.demand(5, expert(7, 2));
    pool.finished(2);
    assert_eq!(pool.states.get(SlotId(5)), SlotState::Ready);
    // An expert without bytes is ready at once.
    pool.demand(6, ReadPlan::default());
    assert_eq!((pool.reader.finished(), pool.states.get(SlotId(6))), (3, SlotState::Ready));
    assert!(!pool.reader.is_busy());
}

/// A source that returns at most a hundred bytes per read. The value of each byte depends on its offset.
struct ShortSource;

impl ExpertSource for ShortSource {
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
fn short_reads_continue_at_block_boundaries() {
    let slab = Arc::new(Slab::new(SLOT).unwrap());
    let states = SlotTable::new(1, 1).states().clone();
    let metrics = Metrics::new("0", "cpu");
    let reader =
        ExpertReader::new(Box::new(ShortSource), slab.clone(), states.clone(), layout(1), 1, metrics.clone()).unwrap();
    let mut pieces = [Piece::default(); PIECES];
    pieces[0] = Piece { file: 0, offset: 1000, len: 500 };
    let plan = ReadPlan::new(&pieces, 64);
    let span = plan.spans[0].clone();
    states.set(SlotId(0), SlotState::Reading);
    reader.read_now(SlotId(0), plan);
    reader.wait(0);
    assert_eq!(states.get(SlotId(0)), SlotState::Ready);
    // SAFETY: the read has ended.
    let bytes = unsafe { slab.bytes(span) };
    assert!((1000u64..).zip(bytes).all(|(at, byte)| *byte == (at * 7 + at / 256) as u8));
    // 540 bytes are needed from byte 960 on. Each read of 100 bytes advances by 64 bytes, until at most 36 bytes are
    // missing.
    assert_eq!((metrics.ssd_reads.get(), metrics.ssd_read_bytes.get()), (8, 800));
}

#[test]
fn wait_returns_only_after_an_arrival() {
    let pool = pool(1);
    pool.demand(0, expert(0, 1));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| pool.reader.wait(0));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waits.is_finished(), "nothing has arrived");
        pool.permits.allow(1);
        waits.join().unwrap();
    });
    assert_eq!(pool.reader.finished(), 1);
}
