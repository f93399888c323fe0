//! A lost GPU: the CPU takes over with the next request.

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

/// A model on a double on which `fault` occurs in the `nth` command buffer.
fn model_with_fault(streaming: bool, nth: usize, fault: Fault) -> (Qwen, Shared) {
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
fn cpu_takes_over_from_lost_device() {
    for streaming in [false, true] {
        let expected = answer(&mut load(streaming)).unwrap();
        for (nth, fault) in [(0, Fault::Hangs), (3, Fault::Hangs), (2, Fault::Banned)] {
            let (mut model, _) = model_with_fault(streaming, nth, fault);
            let mut failed = 0;
            let found = loop {
                match answer(&mut model) {
                    Ok(found) => break found,
                    Err(_) => failed += 1,
                }
                let recovered = model.recover().unwrap();
                // A device that hangs is lost at once, any other after three failures in a row.
                assert_eq!(recovered, fault == Fault::Hangs || failed == 3, "{fault:?}, failure {failed}");
            };
            assert!(found == expected && !model.is_on_gpu(), "{fault:?}");
            assert!(!model.recover().unwrap() && answer(&mut model).unwrap() == expected);
            check_continues_from_snapshot(&mut model);
        }
    }
}

/// Pages keep the format of the keys and values, so a sequence continues from a snapshot as without one.
fn check_continues_from_snapshot(model: &mut Qwen) {
    let (mut state, pool) = (model.start().unwrap(), model.info().pages.unwrap());
    assert_eq!(pool.page_bytes(), PAGE as u64 * model.kv_bytes());
    model.forward(&mut state, &[5, 90, 33], Rows::None).unwrap();
    let kept = model.snapshot(&mut state).unwrap();
    let mut other = Model::restore(model, &kept, None).unwrap();
    let [on, alone] = [&mut other, &mut state].map(|state| model.forward(state, &[2, 71], Rows::All).unwrap().data);
    assert!(on == alone);
}

#[test]
fn recovered_device_stays_in_use() {
    let (mut model, _) = model_with_fault(false, 1, Fault::Fails);
    assert!(answer(&mut model).is_err() && !model.recover().unwrap() && model.is_on_gpu());
    assert!(answer(&mut model).is_ok());
}

#[test]
fn interactivity_errors_are_counted() {
    let (model, control) = model_with_fault(false, 1, Fault::Fails);
    control.lock().unwrap().message = Some("Impacting Interactivity (0000000e:)");
    let metrics = Metrics::new("test", "metal");
    let (handle, worker) = engine::spawn(model, Options::default(), metrics.clone()).unwrap();
    let ask = || common::ask(&handle, Request::new(vec![5, 90, 33], 2, Sampling::greedy())).1;
    assert!(ask().is_err_and(|error| error.contains("Impacting Interactivity")));
    assert!(ask().is_ok());
    drop(handle);
    worker.join().unwrap();
    assert_eq!(metrics.gpu_interactivity_errors.get(), 1);
}

#[test]
fn lost_device_fails_one_engine_request() {
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
    let (found, metrics) = tokens(model_with_fault(false, 1, Fault::Hangs).0);
    assert!(found[0].as_ref().is_err_and(|error| error.contains("completed nothing")), "{found:?}");
    assert_eq!(found[1], expected[1]);
    assert_eq!((sound.gpu_lost.get(), metrics.gpu_lost.get()), (0, 1));
    assert!(metrics.render().contains("device=\"cpu\""), "{}", metrics.render());
}
