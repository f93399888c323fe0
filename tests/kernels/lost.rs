//! Tests that the CPU takes over at the next request after the GPU was lost.

use crate::{
    double::{Double, Fault, Plan, Shared},
    forward::common,
    host::Host,
    queue::{PROMPT, answer, load_changed, move_to_queue},
};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::{CommandQueue, CpuArithmetic},
    ops::KvFormat,
};
use moestro_engine::{self as engine, Options, Request, Sampling};
use moestro_model::model::{Model, PAGE, Qwen, Rows};
use std::time::Duration;

/// A model on the CPU with its default arithmetic, whose keys and values have the same format as on the GPU.
fn on_cpu(streaming: bool) -> Qwen {
    load_changed(streaming, |options| options.math = CpuArithmetic::Integer)
}

/// Moves the model to a test double of Metal on which `fault` will occur, if any. Only a double that hangs has a short
/// limit of its time, since a busy machine can be slow.
fn on_double(model: Qwen, fault: Option<Fault>) -> (Qwen, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    let limit = Duration::from_millis(if fault == Some(Fault::Hangs) { 500 } else { 60_000 });
    (move_to_queue(model, CommandQueue::new(double).with_stall_timeout(limit)), control)
}

/// Makes `fault` occur in the `nth` command buffer from now on.
fn plan_fault(control: &Shared, nth: usize, fault: Fault) {
    let mut now = control.lock().unwrap();
    now.calls.clear();
    now.fault = Some(Plan { method: "commit", nth, fault });
}

/// A model on a test double, with `fault` in the `nth` command buffer.
fn model_with_fault(streaming: bool, nth: usize, fault: Fault) -> (Qwen, Shared) {
    let (model, control) = on_double(on_cpu(streaming), Some(fault));
    plan_fault(&control, nth, fault);
    (model, control)
}

#[test]
fn cpu_takes_over_from_lost_device() {
    for streaming in [false, true] {
        let expected = answer(&mut on_cpu(streaming)).unwrap();
        for (nth, fault) in [(0, Fault::Hangs), (3, Fault::Hangs), (2, Fault::Banned)] {
            let (mut model, _) = model_with_fault(streaming, nth, fault);
            let mut failed = 0;
            let found = loop {
                match answer(&mut model) {
                    Ok(found) => break found,
                    Err(_) => failed += 1,
                }
                let recovered = model.recover().unwrap();
                // A device that hangs is lost at once. With any other fault, the device is lost after three failures in
                // a row.
                assert_eq!(recovered, fault == Fault::Hangs || failed == 3, "{fault:?}, failure {failed}");
            };
            assert!(found == expected && !model.is_on_gpu(), "{fault:?}");
            assert!(!model.recover().unwrap() && answer(&mut model).unwrap() == expected);
            check_continues_from_snapshot(&mut model);
        }
    }
}

#[test]
fn next_pass_succeeds_after_failed_draft() {
    let expected = answer(&mut on_double(on_cpu(false), None).0).unwrap();
    let (mut model, _) = model_with_fault(false, 0, Fault::Fails);
    let hidden = model.config().hidden;
    assert!(model.head_logits(&vec![0.0; hidden]).is_err());
    assert!(answer(&mut model).unwrap() == expected);
    let (mut model, _) = model_with_fault(false, 0, Fault::Fails);
    assert!(model.embedding(&[3]).is_err());
    assert!(answer(&mut model).unwrap() == expected);
}

/// Checks that a sequence continues from a snapshot after the model was moved, because the pages keep their KV format.
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
fn pages_of_lost_device_are_not_read() {
    let (mut model, control) = on_double(on_cpu(false), Some(Fault::Hangs));
    let bytes = vec![7; model.info().snapshot_size.page.bytes(PAGE) as usize];
    let page = model.make_page(bytes.clone()).unwrap();
    assert!(model.read_page(&page).unwrap() == bytes);
    plan_fault(&control, 0, Fault::Hangs);
    assert!(answer(&mut model).is_err() && model.recover().unwrap());
    assert!(model.read_page(&page).is_err());
    let page = model.make_page(bytes.clone()).unwrap();
    assert!(model.read_page(&page).unwrap() == bytes);
}

/// A snapshot from the GPU has the same rows as the CPU stores. A CPU that prefers another format keeps the format of
/// the GPU.
#[test]
fn cpu_continues_from_lost_devices_snapshot() {
    let (first, rest) = PROMPT.split_at(4);
    for math in [CpuArithmetic::Integer, CpuArithmetic::F32] {
        let mut cpu = load_changed(false, |options| options.math = math);
        let mut state = cpu.start().unwrap();
        cpu.forward(&mut state, first, Rows::None).unwrap();
        let own = cpu.snapshot(&mut state).unwrap().pages[0].copied().unwrap().to_vec();
        let expected = cpu.forward(&mut state, rest, Rows::All).unwrap().data;

        let (mut model, control) = on_double(load_changed(false, |options| options.math = math), Some(Fault::Hangs));
        let kv_bytes = model.kv_bytes();
        let mut state = model.start().unwrap();
        // Evaluate one row at a time, as in decoding, because a prompt uses half precision.
        first.iter().for_each(|id| drop(model.forward(&mut state, &[*id], Rows::None).unwrap()));
        let kept = model.snapshot(&mut state).unwrap();
        if math == CpuArithmetic::Integer {
            let page = kept.pages[0].copied().unwrap();
            assert_eq!(page.len(), own.len());
            check_rows(page, &own, model.config().attention.dim, first.len());
        }
        plan_fault(&control, 0, Fault::Hangs);
        assert!(model.forward(&mut state, rest, Rows::All).is_err());
        assert!(model.recover().unwrap() && !model.is_on_gpu());
        assert_eq!(model.kv_bytes(), kv_bytes, "{math:?}");
        let mut state = model.restore(&kept, None).unwrap();
        let found = model.forward(&mut state, rest, Rows::All).unwrap().data;
        let off = common::distance(&found, &expected);
        println!("{math:?}: logits off by {off:.1e}");
        assert!(off < 1e-3, "{math:?}: logits off by {off}");
    }
}

/// Checks that the 16-bit rows of both devices differ by no more than the f32 sums from which they were rounded.
/// Each head has `rows` rows.
fn check_rows(found: &[u8], expected: &[u8], dim: usize, rows: usize) {
    let decode = |head: &[u8]| -> Vec<Vec<f32>> {
        let (integers, scales) = head.split_at(rows * KvFormat::I16.code_bytes(dim));
        let scales = scales.as_chunks().0.iter().map(|scale| f32::from_le_bytes(*scale));
        let rows = integers.chunks_exact(2 * dim).zip(scales);
        let row = |row: &[u8], scale: f32| {
            row.as_chunks().0.iter().map(|pair| f32::from(i16::from_le_bytes(*pair)) * scale).collect()
        };
        rows.map(|(integers, scale)| row(integers, scale)).collect()
    };
    let bytes = rows * KvFormat::I16.row_bytes(dim);
    assert!(found.len().is_multiple_of(bytes));
    let heads = found.chunks_exact(bytes).zip(expected.chunks_exact(bytes));
    for (found, expected) in heads.flat_map(|(found, expected)| decode(found).into_iter().zip(decode(expected))) {
        let max = expected.iter().fold(0f32, |max, value| max.max(value.abs()));
        let off = common::distance(&found, &expected) / max;
        assert!(off < 2e-4, "a row differs by {off} of its largest value");
    }
}

#[test]
fn recovered_device_stays_in_use() {
    let (mut model, _) = model_with_fault(false, 1, Fault::Fails);
    assert!(answer(&mut model).is_err() && !model.recover().unwrap() && model.is_on_gpu());
    assert!(answer(&mut model).is_ok());
}

/// macOS ends GPU work that delays the screen: the request continues once, with the same tokens.
#[test]
fn request_continues_after_delaying_the_screen() {
    let tokens = |faults: Option<(usize, usize)>| {
        let (model, control) = on_double(on_cpu(false), None);
        if let Some((nth, repeats)) = faults {
            plan_fault(&control, nth, Fault::Fails);
            let mut control = control.lock().unwrap();
            (control.message, control.repeats) = (Some("Impacting Interactivity (0000000e:)"), repeats);
        }
        let metrics = Metrics::new("test", "metal");
        let (handle, worker) = engine::spawn(model, Options::default(), metrics.clone()).unwrap();
        let ask = || {
            let (told, end) = common::ask(&handle, Request::new(vec![5, 90, 33, 2, 71], 3, Sampling::greedy()));
            end.map(|_| told)
        };
        let ends = [ask(), ask()];
        drop(handle);
        worker.join().unwrap();
        (ends, metrics.gpu_interactivity_errors.get())
    };
    let (expected, errors) = tokens(None);
    assert_eq!(errors, 0);
    // In the prompt and in the answer.
    for nth in 0..6 {
        let (found, errors) = tokens(Some((nth, 0)));
        assert_eq!(found, expected, "command buffer {nth}");
        assert!(errors <= 1, "command buffer {nth}");
    }
    let (found, errors) = tokens(Some((0, 1)));
    assert!(found[0].as_ref().is_err_and(|error| error.contains("Impacting Interactivity")), "{found:?}");
    assert_eq!((&found[1], errors), (&expected[1], 2));
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
    let (expected, sound) = tokens(on_cpu(false));
    let (found, metrics) = tokens(model_with_fault(false, 1, Fault::Hangs).0);
    assert!(found[0].as_ref().is_err_and(|error| error.contains("completed nothing")), "{found:?}");
    assert_eq!(found[1], expected[1]);
    assert_eq!((sound.gpu_lost.get(), metrics.gpu_lost.get()), (0, 1));
    assert!(metrics.render().contains("device=\"cpu\""), "{}", metrics.render());
}
