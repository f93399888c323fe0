//! Compares a streamed model whose layers run ahead of the CPU with a resident model: all logits and states must have
//! the same bytes, whichever layer misses an expert.

use crate::{
    forward::{DEMO, common::Dice, options},
    gpu::HostGpu,
    host::Host,
};
use moestro::{
    config::Parallel,
    device::Gpu,
    experts::Prefetch,
    metrics::Metrics,
    model::{Logits, Model, Qwen, QwenState, Rows, SequenceState},
    platform::os::MemoryLevel,
};
use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Layers of the demo. Each has 32 experts.
const LAYERS: usize = 8;

/// The demo on `gpu`, with a segment for each slot. With `slots`, experts are streamed.
fn load(gpu: Box<dyn Gpu>, slots: Option<usize>) -> (Qwen, Arc<Metrics>) {
    let mut options = options(slots.is_some());
    options.plan.buffered = false;
    (options.gpu, options.plan.parallel, options.plan.context) = (Some(u64::MAX), Parallel::Count(2), Some(512));
    (options.store.slots, options.store.segment_bytes, options.store.prefetch) = (slots, 1, Prefetch::Off);
    let metrics = Metrics::new("test", "gpu");
    let qwen = Qwen::load(Path::new(DEMO), &options, &metrics, &mut |_, _| ()).unwrap();
    (qwen.move_to(gpu).unwrap_or_else(|refused| panic!("{}", refused.error)), metrics)
}

/// One random step of two sequences: a token of one of them, a token of each together, or a draft that is rejected in
/// part.
fn step(model: &mut Qwen, states: &mut [QwenState; 2], mut dice: Dice) -> Logits {
    let (one, tokens) = (dice.roll(2), dice.tokens(3));
    match dice.roll(8) {
        0 => {
            let logits = model.verify(&mut states[one], &tokens).unwrap();
            states[one].reject(dice.roll(3)).unwrap();
            logits
        }
        1 => {
            let [first, second] = states;
            model.forward_each(&mut [(first, tokens[0]), (second, tokens[1])]).unwrap()
        }
        _ => model.forward(&mut states[one], &tokens[..1], Rows::Last).unwrap(),
    }
}

#[test]
fn layers_ahead_match_a_resident_model() {
    compare(|| Box::new(HostGpu::new(Host::fast())));
}

/// Runs random steps on a resident and on a streamed model.
pub fn compare(gpu: impl Fn() -> Box<dyn Gpu>) {
    let ((mut resident, _), (mut streamed, metrics)) = (load(gpu(), None), load(gpu(), Some(LAYERS * 32 - 6)));
    let mut missed = BTreeSet::new();
    let [mut expected, mut found] = [&mut resident, &mut streamed].map(|model| {
        [40, 30].map(|count| {
            let mut state = model.start().unwrap();
            model.forward(&mut state, &Dice(count as u64).tokens(count), Rows::None).unwrap();
            state
        })
    });
    // Each fetch of a pass, with its layer and the number of misses before it.
    let (fetches, misses) = (Arc::new(Mutex::new(Vec::new())), metrics.clone());
    let log = fetches.clone();
    streamed.store().unwrap().observe(Box::new(move |layer, _, _| {
        log.lock().unwrap().push((layer, misses.lookups_decode_miss.get()));
    }));
    let (mut fewest, mut ahead, start) = (u64::MAX, 0, Instant::now());
    assert_eq!(streamed.store().unwrap().slots(), LAYERS * 32 - 6);
    for round in 0..60 {
        let (waits, skipped) = (metrics.gpu_router_waits.get(), metrics.gpu_skipped_launches.get());
        let [one, two] =
            [step(&mut resident, &mut expected, Dice(round)), step(&mut streamed, &mut found, Dice(round))];
        assert!(one.data == two.data, "round {round}");
        fewest = fewest.min(metrics.gpu_router_waits.get() - waits);
        if metrics.gpu_skipped_launches.get() > skipped {
            ahead += 1;
            let mut fetches = fetches.lock().unwrap();
            fetches.push((LAYERS, metrics.lookups_decode_miss.get()));
            missed.extend(fetches.windows(2).filter(|pair| pair[1].1 > pair[0].1).map(|pair| pair[0].0));
        }
        fetches.lock().unwrap().clear();
        if round == 30 {
            // Some experts are evicted, and others move to another slot.
            let bytes = streamed.store().unwrap().slot_bytes() as u64 * 20;
            assert!(streamed.adapt_to_level(MemoryLevel::Short(bytes), start));
        }
        streamed.adapt_to_level(MemoryLevel::Spare(1 << 40), start + Duration::from_secs(60 * round));
    }
    println!("{ahead} passes with a miss after layers had run ahead, in layers {missed:?}; fewest waits {fewest}");
    assert_eq!(fewest, 1, "one wait for all layers");
    assert!(missed.contains(&(LAYERS - 1)) && missed.len() > 3, "{missed:?}");
    for (one, two) in expected.iter_mut().zip(&mut found) {
        let [one, two] = [resident.snapshot(one).unwrap(), streamed.snapshot(two).unwrap()];
        assert!(one.state == two.state, "states");
    }
}
