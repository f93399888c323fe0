//! Tests of the store under memory pressure: the store releases and restores slots.

use super::{EXPERTS, LAYERS, checkpoint, row, take};
use crate::{
    device::{CpuTimeline, DeviceError, SyncPoint, Timeline},
    experts::{ExpertChoice, ExpertMap, ExpertStore, Options, PIECES, PassSize, SlotDevice},
};
use moestro_base::platform::os::MemoryLevel;
use std::time::{Duration, Instant};

/// Fetches two experts of each layer.
fn token(store: &ExpertStore, map: &ExpertMap, n: usize) {
    for layer in 0..LAYERS {
        let one = ((n * 5 + layer) % EXPERTS) as u32;
        take(store, map, layer, &[one, (one + 3) % EXPERTS as u32], PassSize::Small);
    }
}

/// Redirects logs of this thread to a file until the guard is dropped. The returned function counts occurrences of a
/// text in the file. Every test that logs must call this, because a thread without a subscriber can disable a log line
/// for all threads.
fn capture_log() -> (tracing::subscriber::DefaultGuard, impl Fn(&str) -> usize) {
    let log = tempfile::NamedTempFile::new().unwrap();
    let file = log.reopen().unwrap();
    let subscriber = tracing_subscriber::fmt().with_writer(move || file.try_clone().unwrap()).finish();
    let guard = tracing::subscriber::set_default(subscriber);
    (guard, move |text| std::fs::read_to_string(log.path()).unwrap().matches(text).count())
}

#[test]
fn slots_shrink_and_grow_with_correct_bytes() {
    let all = LAYERS * EXPERTS;
    for slots in [all, all - 4] {
        let (_guard, said) = capture_log();
        let checkpoint = checkpoint();
        let (store, metrics) = checkpoint.open(Options { min_slots: 6, ..Options::new(slots) });
        store.fill(&mut |_, _| ()).unwrap();
        assert_eq!(store.is_resident(), slots == all);
        let now = Instant::now();
        let bytes = store.slot_bytes() as u64;
        let adapt =
            |memory, seconds| store.adapt_to_level(memory, now + Duration::from_secs(seconds), &mut CpuTimeline);
        (0..20).for_each(|n| token(&store, &checkpoint.map, n));
        assert!(!adapt(MemoryLevel::Enough, 0) && !adapt(MemoryLevel::Spare(1 << 40), 0));
        assert_eq!(store.slots(), slots, "there is no slot to restore");

        assert!(adapt(MemoryLevel::Short(3 * bytes - 1), 1));
        assert_eq!(store.slots(), slots - 3);
        assert!(!store.is_resident());
        (0..20).for_each(|n| token(&store, &checkpoint.map, n));
        assert!(adapt(MemoryLevel::Short(1 << 40), 2));
        assert_eq!(store.slots(), 6, "the minimum stays");
        assert!(!adapt(MemoryLevel::Short(1 << 40), 3));
        assert_eq!(metrics.memory_pressure.get(), 2);
        assert_eq!(metrics.memory_experts.get(), 6 * bytes as i64);
        (0..20).for_each(|n| token(&store, &checkpoint.map, n));

        adapt(MemoryLevel::Spare(1 << 40), 4);
        assert_eq!(store.slots(), 6, "the shortage was too recent");
        adapt(MemoryLevel::Spare(bytes / 2), 60);
        assert_eq!(store.slots(), 6, "not enough memory for one slot");
        for round in 0..40 {
            adapt(MemoryLevel::Spare(1 << 40), 61);
            let before = store.slots();
            adapt(MemoryLevel::Spare(1 << 40), 61);
            assert!(store.slots() == before, "present slots must be filled first");
            (0..20).for_each(|n| token(&store, &checkpoint.map, n + round));
        }
        assert_eq!((store.slots(), metrics.expert_slots.get()), (slots, slots as i64));
        assert_eq!(metrics.memory_pressure.get(), 2);
        assert_eq!(["releasing expert slots", "all expert slots are restored"].map(said), [1, 1]);
    }
}

/// A device that records which of its segments were released.
#[derive(Default)]
struct SegmentDevice(Vec<usize>);

impl Timeline for SegmentDevice {}

impl SlotDevice for SegmentDevice {
    fn release_segment(&mut self, segment: usize) -> Result<(), DeviceError> {
        self.0.push(segment);
        Ok(())
    }
}

#[test]
fn device_releases_whole_segments() {
    let (_guard, _) = capture_log();
    let checkpoint = checkpoint();
    let (one, _) = checkpoint.open(Options::new(1));
    let bytes = one.slot_bytes();
    let segments = Options { min_slots: 3, segment_bytes: 4 * bytes + 1, ..Options::new(14) };
    let (store, metrics) = checkpoint.open(segments);
    store.release_whole_segments(true);
    assert_eq!((store.layout().per_segment, store.layout().segments().count()), (4, 4));
    (0..20).for_each(|n| token(&store, &checkpoint.map, n));
    let mut device = SegmentDevice::default();
    let now = Instant::now();
    let mut adapt = |level, seconds| store.adapt_to_level(level, now + Duration::from_secs(seconds), &mut device);
    // Three slots must be released, but the last segment has only two slots. So the last two segments are released.
    assert!(adapt(MemoryLevel::Short(3 * bytes as u64), 0));
    assert_eq!((store.slots(), metrics.memory_experts.get()), (8, 8 * bytes as i64));
    assert!(adapt(MemoryLevel::Short(1 << 40), 1));
    assert_eq!(store.slots(), 4, "the minimum, in whole segments");
    (0..20).for_each(|n| token(&store, &checkpoint.map, n));
    assert!(!adapt(MemoryLevel::Spare(3 * bytes as u64), 60));
    assert_eq!(store.slots(), 4, "not enough memory for a segment");
    for slots in [8, 12, 14] {
        adapt(MemoryLevel::Spare(1 << 40), 61);
        assert_eq!(store.slots(), slots);
        (0..20).for_each(|n| token(&store, &checkpoint.map, n));
    }
    assert_eq!(device.0, [2, 3, 1]);
}

#[cfg(target_os = "linux")]
#[test]
fn released_segments_free_their_bytes() {
    let (_guard, _) = capture_log();
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options { min_slots: 1, segment_bytes: 1, ..Options::new(8) });
    store.release_whole_segments(true);
    (0..20).for_each(|n| token(&store, &checkpoint.map, n));
    assert!(store.adapt_to_level(MemoryLevel::Short(1 << 40), Instant::now(), &mut SegmentDevice::default()));
    let left: Vec<_> = store.layout().segments().collect();
    let page = 4096;
    for (segment, bytes) in left.into_iter().enumerate() {
        // SAFETY: no expert is being read.
        let start = unsafe { store.slab().bytes(bytes.clone()) }.as_ptr();
        let mut resident = vec![0u8; bytes.len().div_ceil(page)];
        // SAFETY: the range is the slab's, and `resident` has one byte for each page.
        assert_eq!(unsafe { libc::mincore(start.cast_mut().cast(), bytes.len(), resident.as_mut_ptr()) }, 0);
        let used = resident.iter().any(|page| page & 1 == 1);
        assert_eq!(used, segment < store.slots(), "segment {segment}");
    }
}

#[test]
fn memory_is_checked_at_intervals() {
    /// Counts the calls of `completed`.
    struct CountingDevice(u32);
    impl Timeline for CountingDevice {
        fn completed(&mut self) -> SyncPoint {
            self.0 += 1;
            SyncPoint::START
        }
    }
    impl SlotDevice for CountingDevice {}
    // `min_slots` is the number of all slots, so the real memory level of the test machine has no effect.
    let (store, _) = checkpoint().open(Options::new(8));
    let mut device = CountingDevice(0);
    let before = Instant::now();
    store.adapt_to_memory(&mut device);
    let next = store.state.borrow().pressure.next_check;
    let interval = Duration::from_millis(250);
    assert!(before + interval <= next && next <= Instant::now() + interval);
    for (wait, checks) in [(Duration::from_secs(60), 1), (Duration::ZERO, 2)] {
        store.state.borrow_mut().pressure.next_check = Instant::now() + wait;
        store.adapt_to_memory(&mut device);
        assert_eq!(device.0, checks, "{wait:?}");
    }
}

#[test]
fn one_shortage_is_logged_once() {
    let (_guard, said) = capture_log();
    let (store, _) = checkpoint().open(Options { min_slots: 4, ..Options::new(8) });
    let now = Instant::now();
    let bytes = store.slot_bytes() as u64;
    // The third shortage comes after `RESTORE_DELAY`, so it is logged. In the last shortage, no slot is left to
    // release.
    for (seconds, slots, lines) in [(0, 7, 1), (9, 6, 1), (20, 5, 2), (21, 4, 2), (60, 4, 2)] {
        store.adapt_to_level(MemoryLevel::Short(bytes), now + Duration::from_secs(seconds), &mut CpuTimeline);
        assert_eq!((store.slots(), said("releasing expert slots")), (slots, lines), "after {seconds} s");
    }
}

#[test]
fn slots_in_use_stay() {
    let (_guard, _) = capture_log();
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options { min_slots: 1, ..Options::new(8) });
    let ids = [0, 1, 2, 3, 4, 5];
    let mut fetch = store.fetch(0, &row(&ids), PassSize::Small, &mut CpuTimeline).unwrap();
    let mut seen = 0;
    while let Some(batch) = fetch.next(&mut CpuTimeline).unwrap() {
        seen += batch.len();
        let before: Vec<[Vec<u8>; PIECES]> = batch.iter().map(|ready| ready.pieces.map(<[u8]>::to_vec)).collect();
        store.adapt_to_level(MemoryLevel::Short(1 << 40), Instant::now(), &mut CpuTimeline);
        assert!(batch.iter().zip(before).all(|(ready, before)| ready.pieces.iter().zip(before).all(|(a, b)| *a == b)));
    }
    drop(fetch);
    assert_eq!((seen, store.slots()), (6, 6), "free slots after them were removed");
    // The device has not completed the sync point and may still read the slots, so the slots stay.
    struct PendingDevice;
    impl Timeline for PendingDevice {
        fn sync_point(&mut self) -> SyncPoint {
            SyncPoint(7)
        }
    }
    impl SlotDevice for PendingDevice {}
    let choice = ExpertChoice { ids: &ids, k: 6, logits: &[] };
    let mut fetch = store.fetch(0, &choice, PassSize::Small, &mut PendingDevice).unwrap();
    while fetch.next(&mut PendingDevice).unwrap().is_some() {}
    fetch.release_after(PendingDevice.sync_point());
    store.adapt_to_memory(&mut PendingDevice);
    assert!(!store.adapt_to_level(MemoryLevel::Short(1 << 40), Instant::now(), &mut PendingDevice));
    store.state.borrow_mut().slots.advance(SyncPoint(7));
    assert!(store.adapt_to_level(MemoryLevel::Short(1 << 40), Instant::now(), &mut PendingDevice));
    assert_eq!(store.slots(), 1);
    take(&store, &checkpoint.map, 1, &[5], PassSize::Small);
}
