//! `moestro doctor`: checks that this machine computes correctly. Compares every GPU kernel with the CPU, every CPU
//! instruction set with plain Rust, and one answer of the demo model on each device. The output belongs in a bug
//! report.

mod answer;
mod gpu;
mod kernel_files;
mod machine;
mod power_mode;
mod report;

use crate::{
    cli,
    command::text::{print_note, show},
    error::CommandError,
    tools::machine_report::{self, MachineReport},
};
use answer::DemoModel;
use candle_core::Device;
pub use gpu::recover;
use machine::ReportModels;
use moestro_base::platform::os;
use moestro_compute::{
    device::{self, CommandQueue, CpuArithmetic, DeviceError, Driver, NO_GPU, SystemGpu},
    ops::check,
};
use moestro_model::model::open_candle_gpu;
pub use report::DoctorReport;
use report::{GpuReport, WholeReport};
use std::time::Instant;

/// Prints the report. `version` is the version of this program.
///
/// # Errors
/// `CommandError::Unsound` if a result differs or a check fails. Other errors if the machine cannot be measured.
pub fn run(args: &cli::tool_args::DoctorArgs, version: &str) -> Result<(), CommandError> {
    if let Some(dir) = &args.print_kernels {
        return kernel_files::write(dir);
    }
    let gpu = open(args.any_gpu).map_err(|error| error.to_string()).and_then(|gpu| gpu.ok_or_else(|| NO_GPU.into()));
    let devices = reference_devices(gpu.is_ok(), open_candle_gpu);
    let mut report = examine(gpu, &devices)?;
    report.machine.version = version.into();
    let machine = args.report.then(|| measure_machine(&report, args.any_gpu));
    // The recovery check runs last and opens the GPU again, because macOS may refuse further GPU work of a program that
    // caused a GPU error.
    if report.gpu.is_ok() {
        report.recovery = open(args.any_gpu).ok().flatten().and_then(recover);
    }
    let wrong = report.wrong.join(", ");
    match machine {
        None => show(&report, args.json),
        Some(Err(error)) => {
            show(&report, args.json);
            return Err(error);
        }
        Some(Ok(machine)) => {
            let whole = WholeReport { checks: report, machine };
            show(&whole, args.json);
            print_note(format_args!("saved for `moestro info` in {}", machine_report::save(&whole)?.display()));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let remedy = "report this output as a bug; if only GPU results are wrong, serve with --device cpu";
    Err(CommandError::Unsound(format!("{wrong}; {remedy}")))
}

/// Measures this machine. The GPU is measured only if its checks have run.
fn measure_machine(report: &DoctorReport, any_gpu: bool) -> Result<MachineReport, CommandError> {
    let open = || open(any_gpu).ok().flatten().filter(|_| report.gpu.is_ok());
    let times = report.gpu.as_ref().ok().and_then(|gpu| gpu.times);
    let wait = times.map_or(0.0, |times| times.wait / 1e6);
    let dir = os::cache_dir().unwrap_or_else(std::env::temp_dir).join("doctor-report");
    print_note("measuring this machine; it takes some minutes and 5 GB of disk, which are freed at the end");
    machine::measure(&open, wait, &ReportModels::like_35b(), &dir)
}

/// The devices of the reference implementation. Candle's GPU is opened only beside a GPU of ours, since Candle may abort
/// the program on other GPUs, such as that of a virtual machine.
fn reference_devices(has_gpu: bool, open: impl FnOnce() -> Option<Device>) -> Vec<Device> {
    let gpu = if has_gpu { open() } else { None };
    [Some(Device::Cpu), gpu].into_iter().flatten().collect()
}

fn open(any_gpu: bool) -> Result<Option<SystemGpu>, DeviceError> {
    if any_gpu { device::open_any_gpu() } else { device::open_gpu() }
}

/// Checks this machine with its GPU. `gpu` is the reason if there is no GPU. The reference implementation answers on
/// each of the `candle` devices.
///
/// # Errors
/// The demo model cannot be loaded.
pub fn examine(
    gpu: Result<CommandQueue<impl Driver>, String>,
    candle: &[Device],
) -> Result<DoctorReport, CommandError> {
    let demo = DemoModel::open()?;
    let processor = check::processor();
    let mut answers = vec![demo.on_cpu(CpuArithmetic::F32)?, demo.on_cpu(CpuArithmetic::Integer)?];
    let gpu = match gpu {
        Ok(mut gpu) => {
            let begin = Instant::now();
            // Kernels that do not compile are reported by `check::kernels` below.
            let compiled = gpu.driver.compile().iter().filter(|(_, error)| error.is_none()).count();
            let compile_seconds = begin.elapsed().as_secs_f64();
            let begin = Instant::now();
            let (mut kernels, mut gpu) = check::kernels(gpu);
            let check_seconds = begin.elapsed().as_secs_f64();
            let name = gpu.driver.name();
            let working_set = gpu.driver.working_set();
            kernels.extend(gpu::long_buffer(&mut gpu));
            let times = gpu::times(&mut gpu).ok();
            answers.push(demo.on_gpu(gpu)?);
            Ok(GpuReport { name, working_set, compiled, compile_seconds, check_seconds, times, kernels })
        }
        Err(why) => Err(why),
    };
    let first = answers[0].ids.clone();
    answers.extend(candle.iter().map(|device| demo.by_reference(device, &first)));
    Ok(DoctorReport::new(processor, gpu, answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candle_opens_no_gpu_without_ours() {
        let devices = reference_devices(false, || panic!("Candle may abort the program"));
        assert!(devices.len() == 1 && devices[0].is_cpu());
        assert_eq!(reference_devices(true, || Some(Device::Cpu)).len(), 2);
    }
}
