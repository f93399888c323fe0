//! A disk that answers when it is told to: whose slot may be taken from a prediction.

use super::super::{
    Asked, ExpertMap, Experts, Options, PIECES, Phase, Piece, Prefetch,
    reader::tests::{Gate, Gated},
    tests::row,
};
use crate::{device::CpuTimeline, metrics::Metrics};
use std::{ops::Deref, sync::Arc};

const EXPERTS: u32 = 20;

/// Lets all reads end when the test does, or the reader's threads would be waited for without end.
struct Opened(Arc<Gate>);

impl Deref for Opened {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.open(1 << 20);
    }
}

/// Two layers of twenty experts in sixteen slots, read by one thread: expert `n` of layer `l` is page `20 l + n`.
fn store() -> (Experts, Opened, Arc<Metrics>) {
    let (gate, metrics) = (Arc::<Gate>::default(), Metrics::new("0", "cpu"));
    let piece = |page: u32, len| Piece { file: 0, offset: u64::from(page) * 4096, len };
    let expert = |page| std::array::from_fn::<_, PIECES, _>(|part| piece(page, if part == 0 { 64 } else { 0 }));
    let map = ExpertMap { layers: [0, EXPERTS].map(|first| (first..first + EXPERTS).map(expert).collect()).into() };
    let options = Options { prefetch: Prefetch::On, threads: 1, ..Options::new(16) };
    let source = Box::new(Gated { gate: gate.clone(), broken: u64::MAX });
    (Experts::with_source(source, map, options, metrics.clone()).unwrap(), Opened(gate), metrics)
}

/// Takes all that was asked for of `layer`; each has its own bytes.
fn drain(mut asked: Asked<'_>, layer: u32) -> usize {
    let mut seen = 0;
    while let Some(batch) = asked.next(&mut CpuTimeline).unwrap() {
        for landed in batch.iter() {
            let page = (layer * EXPERTS + landed.expert) as u8;
            assert!(landed.pieces[0].iter().all(|&byte| byte == page), "layer {layer}, expert {}", landed.expert);
        }
        seen += batch.len();
    }
    seen
}

/// The pages whose reads have begun, once there are so many.
fn pages(gate: &Gate, reads: usize) -> Vec<u64> {
    gate.begun(reads).iter().map(|offset| offset / 4096).collect()
}

#[test]
fn a_slot_that_is_being_read_into_is_not_taken_from_a_prediction() {
    let (store, gate, metrics) = store();
    store.read_ahead(1, &[0, 1], Phase::Decode);
    assert_eq!(pages(&gate, 1), [20], "one is being read, the other waits");
    let most: Vec<u32> = (0..14).collect();
    let first = store.ask(0, &row(&most), Phase::Decode, &mut CpuTimeline).unwrap();
    assert_eq!(metrics.expert_slots_used.get(), 16);
    let second = store.ask(0, &row(&[14]), Phase::Decode, &mut CpuTimeline).unwrap();
    let has = |layer, expert| store.slot_of(layer, expert).is_some();
    assert_eq!((has(1, 0), has(1, 1), has(0, 14)), (true, false, true));
    gate.open(100);
    assert_eq!((drain(first, 0), drain(second, 0)), (14, 1));
    assert_eq!(drain(store.ask(1, &row(&[0]), Phase::Decode, &mut CpuTimeline).unwrap(), 1), 1);
    assert_eq!((metrics.lookups_decode_prefetched.get(), pages(&gate, 16).len()), (1, 16), "never read twice");
}

#[test]
fn a_prediction_that_was_wrong_stays_if_it_is_being_read() {
    let (store, gate, metrics) = store();
    store.read_ahead(1, &[0, 1], Phase::Decode);
    assert_eq!(pages(&gate, 1), [20]);
    let asked = store.ask(1, &row(&[2]), Phase::Decode, &mut CpuTimeline).unwrap();
    assert!(store.slot_of(1, 0).is_some() && store.slot_of(1, 1).is_none(), "the one that waited is taken back");
    gate.open(100);
    assert_eq!(drain(asked, 1), 1);
    while store.reader.is_busy() {
        std::thread::yield_now();
    }
    assert!(store.slot_of(1, 0).is_some());
    let reads = drain(store.ask(1, &row(&[0, 2]), Phase::Decode, &mut CpuTimeline).unwrap(), 1);
    assert_eq!((reads, pages(&gate, 2)), (2, vec![20, 22]));
    assert_eq!((metrics.lookups_decode_hit.get(), metrics.prefetches_used.get()), (1, 1));
}
