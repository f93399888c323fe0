//! Tests the comparisons of `moestro doctor` and the choice of `--device`, with kernels compiled for the host.

use crate::{
    double::{Double, Fault, Plan},
    gpu::HostGpu,
    host::Host,
};
use moestro::{command::device_choice::DeviceChoice, tools::doctor};
use moestro_compute::{
    device::{CommandQueue, DeviceError, Driver, GPU_KIND},
    ops::check,
};
use std::collections::BTreeSet;

fn wrong(kernel: &'static str) -> CommandQueue<HostGpu> {
    let mut gpu = HostGpu::with_matrix_units(Host::fast());
    gpu.wrong = Some(kernel);
    gpu.queue()
}

#[test]
fn doctor_compares_every_kernel() {
    let (found, _) = check::kernels(HostGpu::with_matrix_units(Host::start()).queue());
    for finding in &found {
        println!("{finding:?}");
    }
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.agrees()).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    // The indexer has the same order of operations as the CPU. With other values, it could select other blocks.
    let selects = |finding: &&check::Finding| finding.name.starts_with("index_");
    let differences: Vec<_> = found.iter().filter(selects).map(|finding| finding.outcome.clone().unwrap().0).collect();
    assert_eq!(differences, [0.0; 3]);
    let names = found.iter().map(|finding| finding.name.as_str());
    let (others, compared): (BTreeSet<&str>, BTreeSet<&str>) = names.partition(|name| name.starts_with('('));
    assert_eq!(others, BTreeSet::from(["(order of launches)", "(shared memory)"]));
    let all = Host::start().names();
    assert_eq!(compared, all.iter().map(String::as_str).collect(), "a kernel that is not compared");
}

/// Runs every launch of the checks `runs` times on random bytes in place of its inputs. Without sanitizers, only accesses
/// that end the program are found.
fn check_on_garbage(runs: usize) {
    let mut gpu = HostGpu::with_matrix_units(Host::start());
    gpu.garbage_runs = runs;
    let (found, _) = check::kernels(gpu.queue());
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.agrees()).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn garbage_inputs_cause_no_wrong_access() {
    check_on_garbage(1);
}

#[test]
#[ignore = "long: much garbage"]
fn more_garbage_inputs_cause_no_wrong_access() {
    check_on_garbage(5);
}

#[test]
#[ignore = "exhaustive: every kernel"]
fn doctor_finds_faults_in_every_kernel() {
    let mut missed: BTreeSet<String> = Host::fast().names().into_iter().collect();
    // One device, which computes a launch again only if its inputs differ from those of earlier runs.
    let mut gpu = HostGpu::with_matrix_units(Host::fast()).queue();
    for part in check::parts() {
        let (sound, with_gpu) = check::kernels_of(gpu, |name| name == part);
        gpu = with_gpu;
        for finding in sound {
            gpu.driver.wrong = Some(finding.name.clone().leak());
            let (found, with_gpu) = check::kernels_of(gpu, |name| name == part);
            gpu = with_gpu;
            if found.iter().any(|with_fault| with_fault.name == finding.name && !with_fault.agrees()) {
                missed.remove(&finding.name);
            }
        }
        gpu.driver.wrong = None;
    }
    assert!(missed.is_empty(), "no part of the check finds a fault in {missed:?}");
}

#[test]
fn doctor_finds_launches_out_of_order() {
    let mut gpu = HostGpu::new(Host::fast());
    gpu.reverses = true;
    let (found, _) = check::kernels_of(gpu.queue(), |part| part == "order and memory");
    let wrong: Vec<&str> = found.iter().filter(|f| !f.agrees()).map(|f| f.name.as_str()).collect();
    assert_eq!(wrong, ["(order of launches)"]);
}

#[test]
fn doctor_reports_refused_kernel_and_continues() {
    let mut gpu = HostGpu::with_matrix_units(Host::fast());
    gpu.refused = Some("causal_conv");
    let (found, _) = check::kernels_of(gpu.queue(), |part| ["delta rule", "attention"].contains(&part));
    let of = |name: &str| found.iter().find(|finding| finding.name == name).unwrap();
    assert_eq!(of("causal_conv").outcome, Err("refused by the driver".into()));
    assert_eq!(of("kernels/some.metal").outcome, Err("line 1: no".into()));
    assert!(of("attention_merge").agrees());
}

#[test]
#[ignore = "long: a whole report"]
fn doctor_report_of_a_working_gpu() {
    let double = Double::new(Host::plain());
    let control = double.control();
    let mut report = doctor::examine(Ok(CommandQueue::new(double)), &[]).unwrap();
    assert!(report.wrong.is_empty(), "{report}");
    let text = report.to_string();
    println!("{text}");
    assert!(text.contains("us to submit") && report.gpu.as_ref().unwrap().times.is_some(), "{text}");
    assert!(text.contains("the double: working set unknown") && text.ends_with("everything agrees\n"), "{text}");
    let json = serde_json::json!(report);
    assert_eq!(json["answers"][2]["device"], GPU_KIND);
    assert_eq!(json["answers"][2]["ids"], json["answers"][0]["ids"]);
    assert_eq!(json["gpu"]["kernels"].as_array().unwrap().len(), Host::plain().names().len() + 2);
    // No error was provoked on the examined device, because macOS would refuse further work of the device.
    assert_eq!(control.lock().unwrap().calls.get("encode_fault"), None);
    let recover = |double| doctor::recover(CommandQueue::new(double));
    report.recovery = recover(Double::new(Host::fast()));
    assert!(report.to_string().contains("(an error, and after it) same bytes"), "{report}");
    // A device that does not recover is reported, but does not count as wrong.
    let banned = Double::new(Host::fast());
    banned.control().lock().unwrap().fault = Some(Plan { method: "commit", nth: 0, fault: Fault::Banned });
    report.recovery = recover(banned);
    assert!(report.to_string().contains("(an error, and after it) FAILED") && report.wrong.is_empty(), "{report}");
    assert_eq!(serde_json::json!(report)["recovery"]["agrees"], false);
}

#[test]
#[ignore = "long: a whole report"]
fn doctor_report_of_a_faulty_gpu() {
    let report = doctor::examine(Ok(wrong("moe_down")), &[]).unwrap();
    assert_eq!(report.wrong, ["moe_down", &format!("demo answer ({GPU_KIND})")]);
    let text = report.to_string();
    println!("{text}");
    assert!(
        text.contains("WRONG after ") && text.contains(&format!("WRONG: moe_down, demo answer ({GPU_KIND})")),
        "{text}"
    );
}

#[test]
fn auto_selects_gpu_that_matches_cpu() {
    let sound = || Ok(Some(HostGpu::new(Host::fast()).queue()));
    let faulty = || Ok(Some(wrong("router")));
    fn name<D: Driver>(
        found: Result<Option<CommandQueue<D>>, DeviceError>,
        asked: bool,
    ) -> Result<&'static str, String> {
        DeviceChoice::of(found, asked).map(|chosen| chosen.name()).map_err(|error| error.to_string())
    }
    assert_eq!(name(sound(), false), Ok(GPU_KIND));
    // A GPU that the user selected by name is used although it is faulty. `auto` selects the CPU.
    assert_eq!((name(faulty(), false), name(faulty(), true)), (Ok("cpu"), Ok(GPU_KIND)));
    // Kernels that no model launches on this device do not refuse it.
    for (kernels, expected) in
        [(&["attention_decode_tiles", "dequantize", "gemv_direct_1"][..], GPU_KIND), (&["router"], "cpu")]
    {
        let double = Double::new(Host::fast());
        {
            let control = double.control();
            let mut control = control.lock().unwrap();
            (control.broken_kernels, control.halves) = (kernels, true);
        }
        assert_eq!(name(Ok(Some(CommandQueue::new(double))), false), Ok(expected), "{kernels:?}");
    }
    let broken = || Err::<Option<CommandQueue<HostGpu>>, _>(DeviceError::Failed("no queue".into()));
    assert_eq!((name(broken(), false), name::<HostGpu>(Ok(None), false)), (Ok("cpu"), Ok("cpu")));
    assert_eq!(name(broken(), true), Err(format!("--device {GPU_KIND}: no queue")));
}
