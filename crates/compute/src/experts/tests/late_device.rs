//! Tests of sync points: a device that reads slots late must see the right bytes, and slots must still be reused.

use super::{Checkpoint, EXPERTS, LAYERS, byte, checkpoint};
use crate::{
    device::{CpuTimeline, DeviceError, SyncPoint, Timeline},
    experts::{ExpertChoice, ExpertStore, Options, PassSize, Prefetch, ReadMode},
};
use moestro_base::metrics::Metrics;
use std::time::Duration;

/// A device that executes work late. Work is executed when the store waits for the device or, if `is_eager`, at the
/// second call of `completed` after the work was encoded. The work compares the bytes of experts in their slots.
struct LateDevice<'s> {
    store: &'s ExpertStore,
    checkpoint: &'s Checkpoint,
    is_eager: bool,
    /// Layer, expert and slot of each encoded operation. Sync point `n` is complete after the first `n` operations.
    work: Vec<(usize, u32, usize)>,
    done: usize,
    encoded_at_last_poll: usize,
    waits: usize,
    rests: usize,
    is_broken: bool,
}

impl<'s> LateDevice<'s> {
    fn new(store: &'s ExpertStore, checkpoint: &'s Checkpoint, is_eager: bool) -> Self {
        Self {
            store,
            checkpoint,
            is_eager,
            work: Vec::new(),
            done: 0,
            encoded_at_last_poll: 0,
            waits: 0,
            rests: 0,
            is_broken: false,
        }
    }

    fn work_until(&mut self, point: usize) {
        for &(layer, expert, slot) in &self.work[self.done.min(point)..point] {
            let base = self.store.layout().start(slot);
            let spans = self.store.spans(layer, expert).unwrap();
            for (piece, span) in self.checkpoint.map.layers[layer][expert as usize].iter().zip(spans) {
                // SAFETY: the store must not refill the slot before the sync point. If the store does, the comparison
                // fails.
                let bytes = unsafe { self.store.slab().bytes(base + span.start..base + span.end) };
                let mut expected = (piece.offset..).map(|at| byte(piece.file, at));
                assert!(
                    bytes.iter().all(|b| Some(*b) == expected.next()),
                    "layer {layer}, expert {expert}: overwritten"
                );
            }
        }
        self.done = self.done.max(point);
    }
}

impl Timeline for LateDevice<'_> {
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint(self.work.len() as u64)
    }

    fn completed(&mut self) -> SyncPoint {
        let before = std::mem::replace(&mut self.encoded_at_last_poll, self.work.len());
        if self.is_eager {
            self.work_until(before);
        }
        SyncPoint(self.done as u64)
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        if self.is_broken {
            return Err(DeviceError::Failed("lost".into()));
        }
        self.waits += 1;
        self.work_until(point.0 as usize);
        Ok(())
    }

    fn begin_disk_wait(&mut self) -> Option<Duration> {
        self.rests += 1;
        None
    }
}

/// Fetches all experts of a choice and takes a sync point after every batch. Returns the expert of each assignment.
fn take(device: &mut LateDevice, layer: usize, choice: &ExpertChoice, size: PassSize) -> Vec<Option<u32>> {
    let mut experts = vec![None; choice.ids.len()];
    let mut fetch = device.store.fetch(layer, choice, size, device).unwrap();
    while let Some(batch) = fetch.next(device).unwrap() {
        for ready in batch.iter() {
            device.work.push((layer, ready.expert, ready.slot.index()));
            for &assignment in ready.assignments {
                assert_eq!(experts[assignment as usize].replace(ready.expert), None, "returned twice");
            }
        }
        batch.release_after(device.sync_point());
    }
    experts
}

#[test]
fn late_device_slots_are_reused_within_layer() {
    let checkpoint = checkpoint();
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    for (slots, is_eager) in [(1, false), (2, true), (3, false), (3, true), (7, false)] {
        let (store, metrics) = checkpoint.open(Options::new(slots));
        let mut device = LateDevice::new(&store, &checkpoint, is_eager);
        for layer in (0..LAYERS).cycle().take(20) {
            let choice = ExpertChoice { ids: &all, k: all.len(), logits: &[] };
            let taken = take(&mut device, layer, &choice, PassSize::Large);
            assert!(taken.iter().zip(&all).all(|(expert, id)| *expert == Some(*id)));
        }
        assert!(is_eager || device.waits > 0);
        assert_eq!(device.rests > 0, metrics.ssd_stall_seconds.get() > 0.0);
        let end = device.sync_point();
        device.wait_for(end).unwrap();
        assert_eq!(device.done, 20 * EXPERTS);
    }
}

#[test]
fn many_rows_read_each_expert_once() {
    let checkpoint = checkpoint();
    // Each of 16 rows selects two experts. Together the rows select seven of the eight experts.
    let ids: Vec<u32> = (0..32).map(|place| (place * place / 3 % 7) as u32).collect();
    let choice = ExpertChoice { ids: &ids, k: 2, logits: &[] };
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    for slots in [1, 2, 5, 7, 20] {
        let (store, metrics) = checkpoint.open(Options::new(slots));
        let mut device = LateDevice::new(&store, &checkpoint, false);
        for layer in 0..LAYERS {
            let taken = take(&mut device, layer, &choice, PassSize::Small);
            assert!(taken.iter().zip(&ids).all(|(expert, id)| *expert == Some(*id)));
            let wanted = distinct.len() * (layer + 1);
            assert_eq!(metrics.lookups_decode_miss.get(), wanted as u64);
            assert_eq!(device.work.len(), wanted, "each expert once");
        }
    }
}

#[test]
fn failed_device_ends_layer_without_losing_slots() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options::new(2));
    let mut device = LateDevice::new(&store, &checkpoint, false);
    device.is_broken = true;
    let choice = ExpertChoice { ids: &[0, 1, 2], k: 3, logits: &[] };
    let mut fetch = store.fetch(0, &choice, PassSize::Small, &mut device).unwrap();
    let error = loop {
        match fetch.next(&mut device) {
            Ok(Some(batch)) => batch.release_after(SyncPoint(1)),
            Ok(None) => panic!("three experts fit into two slots without the device"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("lost"), "{error}");
    drop(fetch);
    let mut device = LateDevice::new(&store, &checkpoint, true);
    device.work.push((0, 0, 0));
    device.done = 1;
    for layer in 0..LAYERS {
        take(&mut device, layer, &choice, PassSize::Small);
    }
    assert_eq!(metrics.expert_slots_used.get(), 2);
}

/// The two experts that a layer selects for a token, in a synthetic stream with skewed frequencies.
fn token(token: usize, layer: usize) -> [u32; 2] {
    let draw = |n: usize| (token * 31 + layer * 17 + n * 7 + token * token % 11) % 16;
    let id = |n: usize| [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7][draw(n)] as u32;
    let first = id(0);
    [first, (first + 1 + id(1) % 7) % EXPERTS as u32]
}

#[test]
fn cpu_and_gpu_count_the_same_lookups() {
    let checkpoint = checkpoint();
    let run = |late: bool, prefetch: Prefetch| {
        let (store, metrics) =
            checkpoint.open(Options { prefetch, threads: 1, io: ReadMode::Buffered, ..Options::new(16) });
        let mut cpu = CpuTimeline;
        let mut gpu = LateDevice::new(&store, &checkpoint, false);
        for (at, layer) in (0..300).flat_map(|at| (0..LAYERS).map(move |layer| (at, layer))) {
            // Wait for all reads, so that the order of arrival is the same in both runs.
            while store.reader.is_busy() {
                std::thread::yield_now();
            }
            let ids = token(at, layer);
            let logits: Vec<f32> =
                (0..EXPERTS).map(|e| if ids.contains(&(e as u32)) { 2.0 } else { 0.1 * e as f32 }).collect();
            let choice = ExpertChoice { ids: &ids, k: 2, logits: &logits };
            // The GPU must complete the previous layer before the router's choice is known.
            let end = gpu.sync_point();
            gpu.wait_for(end).unwrap();
            let device: &mut dyn Timeline = if late { &mut gpu } else { &mut cpu };
            let mut fetch = store.fetch(layer, &choice, PassSize::Small, device).unwrap();
            let next = (layer + 1) % LAYERS;
            store.prefetch(next, &token(at + usize::from(next == 0), next), PassSize::Small);
            let mut used = Vec::new();
            while let Some(batch) = fetch.next(device).unwrap() {
                used.extend(batch.iter().map(|ready| (layer, ready.expert, ready.slot.index())));
            }
            if late {
                gpu.work.extend(used);
            }
            fetch.release_after(gpu.sync_point());
        }
        counts(&metrics)
    };
    for prefetch in [Prefetch::Off, Prefetch::On] {
        let cpu = run(false, prefetch);
        let gpu = run(true, prefetch);
        assert_eq!(cpu, gpu, "{prefetch:?}");
        let [hits, misses, foreseen, used, evictions] = cpu;
        assert_eq!(hits + misses + foreseen, 300 * LAYERS as u64 * 2);
        assert!(hits > 0 && evictions > 0 && foreseen == used && (used > 0) == (prefetch == Prefetch::On), "{cpu:?}");
    }
}

fn counts(metrics: &Metrics) -> [u64; 5] {
    [
        metrics.lookups_decode_hit.get(),
        metrics.lookups_decode_miss.get(),
        metrics.lookups_decode_prefetched.get(),
        metrics.prefetches_used.get(),
        metrics.expert_evictions.get(),
    ]
}
