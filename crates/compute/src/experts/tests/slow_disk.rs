//! Tests which reads are cancelled, kept or repeated, with a source whose reads block until the test allows them.

use super::{
    reader::{BlockingSource, ReadPermits},
    row,
};
use crate::{
    device::CpuTimeline,
    experts::{ExpertFetch, ExpertMap, ExpertStore, Options, PIECES, PassSize, Piece, Prefetch},
};
use moestro_base::metrics::Metrics;
use std::{
    ops::Deref,
    sync::{Arc, atomic::Ordering},
};

const EXPERTS: u32 = 20;

/// Unblocks all reads at the end of a test. Otherwise dropping the store would block forever.
struct AllowOnDrop(Arc<ReadPermits>);

impl Deref for AllowOnDrop {
    type Target = ReadPermits;

    fn deref(&self) -> &ReadPermits {
        &self.0
    }
}

impl Drop for AllowOnDrop {
    fn drop(&mut self) {
        self.0.allow(1 << 20);
    }
}

/// A store with two layers of 20 experts, 16 slots and one reader thread. Expert `n` of layer `l` is page `20 * l + n`.
fn store() -> (ExpertStore, AllowOnDrop, Arc<Metrics>) {
    let permits = ReadPermits::new(u64::MAX);
    let metrics = Metrics::new("0", "cpu");
    let piece = |page: u32, len| Piece { file: 0, offset: u64::from(page) * 4096, len };
    let expert = |page| std::array::from_fn::<_, PIECES, _>(|part| piece(page, if part == 0 { 64 } else { 0 }));
    let map = ExpertMap { layers: [0, EXPERTS].map(|first| (first..first + EXPERTS).map(expert).collect()).into() };
    let options = Options { prefetch: Prefetch::On, threads: 1, ..Options::new(16) };
    let source = Box::new(BlockingSource { permits: permits.clone() });
    (ExpertStore::with_source(source, map, options, metrics.clone()).unwrap(), AllowOnDrop(permits), metrics)
}

/// Receives all experts of a fetch and checks their bytes. Returns the number of experts.
fn drain(mut fetch: ExpertFetch<'_>, layer: u32) -> usize {
    let mut seen = 0;
    while let Some(batch) = fetch.next(&mut CpuTimeline).unwrap() {
        for ready in batch.iter() {
            let page = (layer * EXPERTS + ready.expert) as u8;
            assert!(ready.pieces[0].iter().all(|&byte| byte == page), "layer {layer}, expert {}", ready.expert);
        }
        seen += batch.len();
    }
    seen
}

/// Waits until `reads` reads have begun. Returns the page number of each read.
fn pages(permits: &ReadPermits, reads: usize) -> Vec<u64> {
    permits.begun(reads).iter().map(|offset| offset / 4096).collect()
}

#[test]
fn running_prefetch_keeps_its_slot() {
    let (store, permits, metrics) = store();
    store.prefetch(1, &[0, 1], PassSize::Small);
    assert_eq!(pages(&permits, 1), [20], "one expert is being read, the other is queued");
    let most: Vec<u32> = (0..14).collect();
    let first = store.fetch(0, &row(&most), PassSize::Small, &mut CpuTimeline).unwrap();
    assert_eq!(metrics.expert_slots_used.get(), 16);
    let second = store.fetch(0, &row(&[14]), PassSize::Small, &mut CpuTimeline).unwrap();
    let has = |layer, expert| store.slot_of(layer, expert).is_some();
    assert_eq!((has(1, 0), has(1, 1), has(0, 14)), (true, false, true));
    permits.allow(100);
    assert_eq!((drain(first, 0), drain(second, 0)), (14, 1));
    assert_eq!(drain(store.fetch(1, &row(&[0]), PassSize::Small, &mut CpuTimeline).unwrap(), 1), 1);
    assert_eq!(
        (metrics.lookups_decode_prefetched.get(), pages(&permits, 16).len()),
        (1, 16),
        "no expert is read twice"
    );
}

#[test]
fn unused_running_prefetch_stays_in_memory() {
    let (store, permits, metrics) = store();
    store.prefetch(1, &[0, 1], PassSize::Small);
    assert_eq!(pages(&permits, 1), [20]);
    let fetch = store.fetch(1, &row(&[2]), PassSize::Small, &mut CpuTimeline).unwrap();
    assert!(store.slot_of(1, 0).is_some() && store.slot_of(1, 1).is_none(), "the queued prefetch is cancelled");
    permits.allow(100);
    assert_eq!(drain(fetch, 1), 1);
    while store.reader.is_busy() {
        std::thread::yield_now();
    }
    assert!(store.slot_of(1, 0).is_some());
    let reads = drain(store.fetch(1, &row(&[0, 2]), PassSize::Small, &mut CpuTimeline).unwrap(), 1);
    assert_eq!((reads, pages(&permits, 2)), (2, vec![20, 22]));
    assert_eq!((metrics.lookups_decode_hit.get(), metrics.prefetches_used.get()), (1, 1));
}

/// A read that began before the fetch may have failed on a disk that works now.
#[test]
fn fetch_fails_for_its_own_reads_only() {
    let (store, permits, metrics) = store();
    let fetch = |layer, experts: &[u32]| store.fetch(layer, &row(experts), PassSize::Small, &mut CpuTimeline).unwrap();
    let disk_works = |works| permits.broken_from.store(if works { u64::MAX } else { 0 }, Ordering::Relaxed);
    // A fetch that fails leaves a read that has begun.
    disk_works(false);
    permits.allow(1);
    assert!(fetch(0, &[0, 1]).next(&mut CpuTimeline).is_err());
    assert_eq!(pages(&permits, 2), [0, 1]);
    disk_works(true);
    let next = fetch(0, &[1]);
    permits.allow(2);
    assert_eq!((drain(next, 0), pages(&permits, 3)), (1, vec![0, 1, 1]));
    // A prefetch is repeated once.
    for (expert, works) in [(3, false), (4, true)] {
        disk_works(false);
        let begun = permits.begun(0).len();
        store.prefetch(1, &[expert], PassSize::Small);
        permits.begun(begun + 1);
        disk_works(works);
        let mut next = fetch(1, &[expert]);
        permits.allow(2);
        assert_eq!(next.next(&mut CpuTimeline).is_ok(), works, "expert {expert}");
        drop(next);
        assert_eq!(permits.begun(0).len(), begun + 2);
    }
    assert_eq!(metrics.ssd_errors.get(), 5);
}
