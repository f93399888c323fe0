//! The store under memory pressure: slots are released and restored.

use super::{EXPERTS, LAYERS, checkpoint, row, take};
use crate::{
    device::{CpuTimeline, SyncPoint, Timeline},
    experts::{ExpertChoice, ExpertMap, ExpertStore, Options, PIECES, PassKind},
    platform::os::MemoryLevel,
};
use std::time::{Duration, Instant};

/// Fetches two experts of each layer.
fn token(store: &ExpertStore, map: &ExpertMap, n: usize) {
    for layer in 0..LAYERS {
        let one = ((n * 5 + layer) % EXPERTS) as u32;
        take(store, map, layer, &[one, (one + 3) % EXPERTS as u32], PassKind::Decode);
    }
}

/// Logs of this thread go to a file while the guard lives. The function counts a text in it.
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
        let (now, bytes) = (Instant::now(), store.slot_bytes() as u64);
        let adapt = |memory, seconds| {
            let state = &mut *store.state.borrow_mut();
            store.adapt_to_level(state, memory, now + Duration::from_secs(seconds))
        };
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

#[test]
fn slots_pinned_by_a_device_stay() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options { min_slots: 1, ..Options::new(8) });
    store.slab().lock_pages();
    assert!(!store.adapt_to_level(&mut store.state.borrow_mut(), MemoryLevel::Short(1 << 40), Instant::now()));
    assert_eq!((store.slots(), metrics.memory_pressure.get()), (8, 0));
    // SAFETY: no reference to the slots exists.
    assert!(unsafe { store.slab().release_pages(0..store.slab().len()) }.is_err());
}

#[test]
fn memory_is_checked_at_intervals() {
    /// Counts the calls of `passed`.
    struct CountingDevice(u32);
    impl Timeline for CountingDevice {
        fn completed(&mut self) -> SyncPoint {
            self.0 += 1;
            SyncPoint::START
        }
    }
    let (store, _) = checkpoint().open(Options::new(8));
    // Held slabs release nothing, whatever the system reports.
    store.slab().lock_pages();
    let (mut device, before) = (CountingDevice(0), Instant::now());
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
    let (now, bytes) = (Instant::now(), store.slot_bytes() as u64);
    // The third shortage follows a calm period. In the last one no slot is left to release.
    for (seconds, slots, lines) in [(0, 7, 1), (9, 6, 1), (20, 5, 2), (21, 4, 2), (60, 4, 2)] {
        store.adapt_to_level(
            &mut store.state.borrow_mut(),
            MemoryLevel::Short(bytes),
            now + Duration::from_secs(seconds),
        );
        assert_eq!((store.slots(), said("releasing expert slots")), (slots, lines), "after {seconds} s");
    }
}

#[test]
fn slots_in_use_stay() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options { min_slots: 1, ..Options::new(8) });
    let ids = [0, 1, 2, 3, 4, 5];
    let mut fetch = store.fetch(0, &row(&ids), PassKind::Decode, &mut CpuTimeline).unwrap();
    let mut seen = 0;
    while let Some(batch) = fetch.next(&mut CpuTimeline).unwrap() {
        seen += batch.len();
        let before: Vec<[Vec<u8>; PIECES]> = batch.iter().map(|ready| ready.pieces.map(<[u8]>::to_vec)).collect();
        store.adapt_to_level(&mut store.state.borrow_mut(), MemoryLevel::Short(1 << 40), Instant::now());
        assert!(batch.iter().zip(before).all(|(ready, before)| ready.pieces.iter().zip(before).all(|(a, b)| *a == b)));
    }
    drop(fetch);
    assert_eq!((seen, store.slots()), (6, 6), "free slots after them were removed");
    // A device that has not passed the mark still reads them, so they stay.
    struct LateMarks;
    impl Timeline for LateMarks {
        fn sync_point(&mut self) -> SyncPoint {
            SyncPoint(7)
        }
    }
    let choice = ExpertChoice { ids: &ids, k: 6, logits: &[] };
    let mut fetch = store.fetch(0, &choice, PassKind::Decode, &mut LateMarks).unwrap();
    while fetch.next(&mut LateMarks).unwrap().is_some() {}
    fetch.release_after(LateMarks.sync_point());
    store.adapt_to_memory(&mut LateMarks);
    assert!(!store.adapt_to_level(&mut store.state.borrow_mut(), MemoryLevel::Short(1 << 40), Instant::now()));
    store.state.borrow_mut().slots.advance(SyncPoint(7));
    assert!(store.adapt_to_level(&mut store.state.borrow_mut(), MemoryLevel::Short(1 << 40), Instant::now()));
    assert_eq!(store.slots(), 1);
    take(&store, &checkpoint.map, 1, &[5], PassKind::Decode);
}
