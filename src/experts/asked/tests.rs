//! Marks: a device that is late sees every expert's own bytes, and slots come back in time.

use super::super::{
    Choice, Experts, Io, Options, Phase, Prefetch,
    tests::{Checkpoint, EXPERTS, LAYERS, byte, checkpoint},
};
use crate::{
    device::{CpuTimeline, DeviceError, SyncPoint, Timeline},
    metrics::Metrics,
};

/// Does its work when it is waited for, or, if `eager`, when it is asked for the second time how far it has come. Its work is to
/// look at the bytes of experts in their slots.
struct Late<'s> {
    store: &'s Experts,
    checkpoint: &'s Checkpoint,
    eager: bool,
    /// Layer, expert and slot of what has been encoded; each is a mark.
    work: Vec<(usize, u32, usize)>,
    done: usize,
    looked: usize,
    waits: usize,
    rests: usize,
    broken: bool,
}

impl<'s> Late<'s> {
    fn new(store: &'s Experts, checkpoint: &'s Checkpoint, eager: bool) -> Self {
        Self { store, checkpoint, eager, work: Vec::new(), done: 0, looked: 0, waits: 0, rests: 0, broken: false }
    }

    fn work_until(&mut self, mark: usize) {
        for &(layer, expert, slot) in &self.work[self.done.min(mark)..mark] {
            let base = slot * self.store.slot_bytes();
            let spans = self.store.spans(layer, expert).unwrap();
            for (piece, span) in self.checkpoint.map.layers[layer][expert as usize].iter().zip(spans) {
                // SAFETY: nothing reads into the slot if the rule about marks holds; else the comparison fails.
                let bytes = unsafe { self.store.slab().bytes(base + span.start..base + span.end) };
                let mut expected = (piece.offset..).map(|at| byte(piece.file, at));
                assert!(
                    bytes.iter().all(|b| Some(*b) == expected.next()),
                    "layer {layer}, expert {expert}: overwritten"
                );
            }
        }
        self.done = self.done.max(mark);
    }
}

impl Timeline for Late<'_> {
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint(self.work.len() as u64)
    }

    fn completed(&mut self) -> SyncPoint {
        let before = std::mem::replace(&mut self.looked, self.work.len());
        if self.eager {
            self.work_until(before);
        }
        SyncPoint(self.done as u64)
    }

    fn wait_for(&mut self, mark: SyncPoint) -> Result<(), DeviceError> {
        if self.broken {
            return Err(DeviceError("lost".into()));
        }
        self.waits += 1;
        self.work_until(mark.0 as usize);
        Ok(())
    }

    fn rest(&mut self) {
        self.rests += 1;
    }
}

/// Takes all of a layer, with a mark behind every batch; returns each place's expert.
fn take(device: &mut Late, layer: usize, choice: &Choice, phase: Phase) -> Vec<Option<u32>> {
    let mut experts = vec![None; choice.ids.len()];
    let mut asked = device.store.ask(layer, choice, phase, device).unwrap();
    while let Some(batch) = asked.next(device).unwrap() {
        for landed in batch.iter() {
            device.work.push((layer, landed.expert, landed.slot.index()));
            for &place in landed.places {
                assert_eq!(experts[place as usize].replace(landed.expert), None, "handed out twice");
            }
        }
        batch.reads_until(device.sync_point());
    }
    experts
}

#[test]
fn slots_are_filled_again_behind_a_late_device_before_the_layer_ends() {
    let checkpoint = checkpoint();
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    for (slots, eager) in [(1, false), (2, true), (3, false), (3, true), (7, false)] {
        let (store, metrics) = checkpoint.open(Options::new(slots));
        let mut device = Late::new(&store, &checkpoint, eager);
        for layer in (0..LAYERS).cycle().take(20) {
            let choice = Choice { ids: &all, k: all.len(), logits: &[] };
            let taken = take(&mut device, layer, &choice, Phase::Prefill);
            assert!(taken.iter().zip(&all).all(|(expert, id)| *expert == Some(*id)));
        }
        assert!(eager || device.waits > 0);
        assert_eq!(device.rests > 0, metrics.ssd_stall_seconds.get() > 0.0);
        let end = device.sync_point();
        device.wait_for(end).unwrap();
        assert_eq!(device.done, 20 * EXPERTS);
    }
}

#[test]
fn a_verify_of_many_rows_reads_each_expert_once() {
    let checkpoint = checkpoint();
    // Sixteen rows of two: seven of the eight experts.
    let ids: Vec<u32> = (0..32).map(|place| (place * place / 3 % 7) as u32).collect();
    let choice = Choice { ids: &ids, k: 2, logits: &[] };
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    for slots in [1, 2, 5, 7, 20] {
        let (store, metrics) = checkpoint.open(Options::new(slots));
        let mut device = Late::new(&store, &checkpoint, false);
        for layer in 0..LAYERS {
            let taken = take(&mut device, layer, &choice, Phase::Decode);
            assert!(taken.iter().zip(&ids).all(|(expert, id)| *expert == Some(*id)));
            let wanted = distinct.len() * (layer + 1);
            assert_eq!(metrics.lookups_decode_miss.get(), wanted as u64);
            assert_eq!(device.work.len(), wanted, "each once");
        }
    }
}

#[test]
fn a_device_that_fails_ends_the_layer_and_loses_no_slot() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options::new(2));
    let mut device = Late::new(&store, &checkpoint, false);
    device.broken = true;
    let choice = Choice { ids: &[0, 1, 2], k: 3, logits: &[] };
    let mut asked = store.ask(0, &choice, Phase::Decode, &mut device).unwrap();
    let error = loop {
        match asked.next(&mut device) {
            Ok(Some(batch)) => batch.reads_until(SyncPoint(1)),
            Ok(None) => panic!("three experts in two slots without the device"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("lost"), "{error}");
    drop(asked);
    let mut device = Late::new(&store, &checkpoint, true);
    device.work.push((0, 0, 0));
    device.done = 1;
    for layer in 0..LAYERS {
        take(&mut device, layer, &choice, Phase::Decode);
    }
    assert_eq!(metrics.expert_slots_used.get(), 2);
}

/// Two experts of a layer for a token of a made-up stream, in which some are favourites.
fn token(token: usize, layer: usize) -> [u32; 2] {
    let draw = |n: usize| (token * 31 + layer * 17 + n * 7 + token * token % 11) % 16;
    let id = |n: usize| [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7][draw(n)] as u32;
    let first = id(0);
    [first, (first + 1 + id(1) % 7) % EXPERTS as u32]
}

#[test]
fn a_trace_counts_the_same_whoever_computes() {
    let checkpoint = checkpoint();
    let run = |late: bool, prefetch: Prefetch| {
        let (store, metrics) = checkpoint.open(Options { prefetch, threads: 1, io: Io::Buffered, ..Options::new(16) });
        let (mut cpu, mut gpu) = (CpuTimeline, Late::new(&store, &checkpoint, false));
        for (at, layer) in (0..300).flat_map(|at| (0..LAYERS).map(move |layer| (at, layer))) {
            // Reads end before anybody asks again: so the disk answers in order.
            while store.reader.is_busy() {
                std::thread::yield_now();
            }
            let ids = token(at, layer);
            let logits: Vec<f32> =
                (0..EXPERTS).map(|e| if ids.contains(&(e as u32)) { 2.0 } else { 0.1 * e as f32 }).collect();
            let choice = Choice { ids: &ids, k: 2, logits: &logits };
            // A GPU has been waited for when its router's choice is known.
            let end = gpu.sync_point();
            gpu.wait_for(end).unwrap();
            let device: &mut dyn Timeline = if late { &mut gpu } else { &mut cpu };
            let mut asked = store.ask(layer, &choice, Phase::Decode, device).unwrap();
            let next = (layer + 1) % LAYERS;
            store.read_ahead(next, &token(at + usize::from(next == 0), next), Phase::Decode);
            let mut handed_out = Vec::new();
            while let Some(batch) = asked.next(device).unwrap() {
                handed_out.extend(batch.iter().map(|landed| (layer, landed.expert, landed.slot.index())));
            }
            if late {
                gpu.work.extend(handed_out);
            }
            asked.reads_until(gpu.sync_point());
        }
        counts(&metrics)
    };
    for prefetch in [Prefetch::Off, Prefetch::On] {
        let (cpu, gpu) = (run(false, prefetch), run(true, prefetch));
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
