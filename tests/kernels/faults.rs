//! Tests that the test harness detects planted faults.

use crate::{check::*, host::Host};
use moestro_compute::device::{Binding, Launch, Region, SkipUse};

fn dispatch(kernel: &'static str, x: Region, y: Region) -> Launch {
    let bindings = vec![Binding::read(x), Binding::write(y)];
    Launch { kernel, args: vec![0], bindings, grid: [2, 1, 1], threads: 64, skip: SkipUse::None }
}

fn outcome(kernel: &'static str) -> (Result<(), String>, Vec<f32>, Vec<f32>) {
    let mut host = Host::faulty();
    let x: Vec<f32> = (0..192).map(|i| i as f32 + 1.0).collect();
    // The binding is in the middle of a larger buffer. The limit for accesses is the bound range, not the buffer.
    let (all_x, all_y) = (host.floats(&x), host.empty(192 * 4));
    let (from, to) = (all_x.part(256, 256), all_y.part(256, 256));
    let result = host.try_run(&dispatch(kernel, from, to));
    let y = if result.is_ok() { host.read_floats(to) } else { vec![] };
    (result, x[64..128].to_vec(), y)
}

#[test]
fn harness_accepts_correct_kernel() {
    let (result, x, y) = outcome("fine");
    result.unwrap();
    let expected: Vec<f64> = (0..64).map(|i| f64::from(x[63 - i]) + 32.0 + 31.0 + 5.0).collect();
    close("fine", &y, &expected);
}

#[test]
fn harness_finds_planted_faults() {
    for (kernel, words) in [
        ("reads_too_far", "heap-buffer-overflow"),
        ("reads_too_early", "AddressSanitizer"),
        ("writes_too_far", "heap-buffer-overflow"),
        ("overruns_threadgroup_memory", "heap-buffer-overflow"),
        ("some_skip_the_barrier", "divergent barrier"),
        ("some_return_before_the_barrier", "divergent barrier"),
        ("meets_at_two_barriers", "divergent barrier"),
        ("some_skip_the_sum", "divergent barrier"),
        ("races", "a race"),
        ("races_across_threadgroups", "a race"),
        ("shifts_too_far", "shift exponent"),
        ("does_not_wait", "a launch that does not wait"),
        ("some_do_not_wait", "a launch that does not wait"),
        ("asks_for_too_much", "heap-buffer-overflow"),
        ("no_such_kernel", "there is no kernel"),
    ] {
        let fault = outcome(kernel).0.expect_err(kernel);
        assert!(fault.contains(words), "{kernel}: {fault}");
    }
}

#[test]
fn harness_finds_wrong_and_missing_results() {
    for kernel in ["is_wrong", "leaves_out_one", "reads_before_the_copy"] {
        let (result, x, y) = outcome(kernel);
        result.unwrap();
        let d = difference(&y, &wide(&x));
        assert!(d.is_nan() || d > 1e-5, "{kernel}: {d}");
    }
}

#[test]
fn harness_refuses_wrong_argument_size() {
    let mut host = Host::faulty();
    let (x, y) = (host.floats(&[0.0; 64]), host.empty(256));
    let mut wrong = dispatch("fine", x, y);
    wrong.args.push(1);
    assert!(host.try_run(&wrong).unwrap_err().contains("bytes of arguments"));
}
