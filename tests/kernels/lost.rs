//! A GPU that is given up: the CPU goes on with the next request.

use crate::{
    double::{Double, Fault, Plan, Shared},
    forward::common,
    host::Host,
    queue::{answer, load, place},
};
use moestro::{
    device::CommandQueue,
    engine::{self, Options, Request, Sampling},
    metrics::Metrics,
    model::{Model, PAGE, Qwen, Rows},
};
use std::time::Duration;

/// A model on a double that will end nothing from its `nth` command buffer on, or whatever `fault` is.
fn doomed(streaming: bool, nth: usize, fault: Fault) -> (Qwen, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    let model = place(CommandQueue::new(double).with_stall_timeout(Duration::from_millis(500)), streaming);
    let mut now = control.lock().unwrap();
    now.calls.clear();
    now.fault = Some(Plan { method: "commit", nth, fault });
    drop(now);
    (model, control)
}

#[test]
fn the_cpu_goes_on_when_a_device_is_given_up() {
    for streaming in [false, true] {
        let expected = answer(&mut load(streaming)).unwrap();
        for (nth, fault) in [(0, Fault::Hangs), (3, Fault::Hangs), (2, Fault::Banned)] {
            let (mut model, _) = doomed(streaming, nth, fault);
            let mut failed = 0;
            let found = loop {
                match answer(&mut model) {
                    Ok(found) => break found,
                    Err(_) => failed += 1,
                }
                let recovered = model.recover().unwrap();
                // A device is given up at once if it ends nothing, and otherwise after three failures in a row.
                assert_eq!(recovered, fault == Fault::Hangs || failed == 3, "{fault:?}, failure {failed}");
            };
            assert!(found == expected && !model.is_on_gpu(), "{fault:?}");
            assert!(!model.recover().unwrap() && answer(&mut model).unwrap() == expected);
            goes_on(&mut model);
        }
    }
}

/// Pages have the form that keys and values have: a sequence goes on from a checkpoint as without.
fn goes_on(model: &mut Qwen) {
    let (mut state, pool) = (model.start().unwrap(), model.pool().unwrap());
    assert_eq!(pool.page_bytes(), PAGE as u64 * model.kv_bytes());
    model.forward(&mut state, &[5, 90, 33], Rows::None).unwrap();
    let kept = model.snapshot(&mut state).unwrap();
    let mut other = Model::restore(model, &kept, None).unwrap();
    let [on, alone] = [&mut other, &mut state].map(|state| model.forward(state, &[2, 71], Rows::All).unwrap().data);
    assert!(on == alone);
}

#[test]
fn a_failure_that_the_device_survives_keeps_it() {
    let (mut model, _) = doomed(false, 1, Fault::Fails);
    assert!(answer(&mut model).is_err() && !model.recover().unwrap() && model.is_on_gpu());
    assert!(answer(&mut model).is_ok());
}

#[test]
fn the_engine_fails_one_request_and_says_so() {
    let sampling = Sampling::greedy();
    let ids = vec![5, 90, 33, 2, 71, 18, 64];
    let tokens = |model: Qwen| {
        let metrics = Metrics::new("test", "metal");
        let (handle, worker) = engine::spawn(model, Options::default(), metrics.clone()).unwrap();
        let mut ends = Vec::new();
        for _ in 0..2 {
            let (told, end) = common::ask(&handle, Request::new(ids.clone(), 4, sampling.clone()));
            ends.push(end.map(|_| told));
        }
        drop(handle);
        worker.join().unwrap();
        (ends, metrics)
    };
    let (expected, sound) = tokens(load(false));
    let (found, metrics) = tokens(doomed(false, 1, Fault::Hangs).0);
    assert!(found[0].as_ref().is_err_and(|error| error.contains("completed nothing")), "{found:?}");
    assert_eq!(found[1], expected[1]);
    assert_eq!((sound.gpu_lost.get(), metrics.gpu_lost.get()), (0, 1));
    assert!(metrics.render().contains("device=\"cpu\""), "{}", metrics.render());
}
