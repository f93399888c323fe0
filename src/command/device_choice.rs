//! Chooses the device that computes. The choice is made before a model is loaded, because the memory plan depends on
//! the device.

use crate::{
    config::{Device, LoadSettings},
    error::CommandError,
};
use moestro_compute::{
    device::{self, CommandQueue, DeviceError, Driver, GPU_KIND, NO_GPU, SystemDriver},
    ops::check::{self, Finding},
};
use moestro_model::{error::ModelError, model::Qwen};
use std::time::Instant;

/// The chosen device.
pub struct DeviceChoice<D: Driver = SystemDriver> {
    gpu: Option<CommandQueue<D>>,
    /// True if the user named the device, so that no other device may replace it.
    is_required: bool,
}

/// Name of the CPU in metrics and logs. The name of a GPU is [`GPU_KIND`].
pub const CPU: &str = "cpu";

impl DeviceChoice {
    /// Chooses the device of `--device`. `auto` chooses the system's GPU if all GPU kernels agree with the CPU on small
    /// inputs. The check costs little more than compiling the kernels, which is needed anyway. If the check fails,
    /// `auto` logs the reason and chooses the CPU.
    ///
    /// # Errors
    /// `--device metal` or `--device cuda` on a machine without that GPU.
    pub fn new(load: &LoadSettings) -> Result<Self, CommandError> {
        let elsewhere =
            |device, system| CommandError::Usage(format!("--device {device}: only builds for {system} support it"));
        match load.flags.device {
            Device::Cpu => Self::of(Ok(None), false),
            Device::Auto => Self::of(device::open_gpu(), false),
            Device::Metal if GPU_KIND != "metal" => Err(elsewhere("metal", "macOS")),
            Device::Cuda if GPU_KIND != "cuda" => Err(elsewhere("cuda", "Linux")),
            Device::Metal | Device::Cuda => Self::of(device::open_gpu(), true),
        }
    }
}

impl<D: Driver> DeviceChoice<D> {
    /// Chooses between the CPU and a GPU, if one was found. `is_required` is true if the user named the GPU.
    ///
    /// # Errors
    /// The GPU is required and was not found.
    pub fn of(found: Result<Option<CommandQueue<D>>, DeviceError>, is_required: bool) -> Result<Self, CommandError> {
        // An exception of Metal in the check is like one at opening.
        let checked = found.and_then(|gpu| gpu.map(|gpu| device::catch_gpu_exception(|| objections(gpu))).transpose());
        let gpu = match checked {
            Ok(Some((None, gpu))) => Some(gpu),
            Ok(Some((Some(wrong), gpu))) if is_required => {
                tracing::warn!("--device {GPU_KIND} is used although its kernels failed the check: {wrong}");
                Some(gpu)
            }
            Ok(Some((Some(wrong), _))) => {
                tracing::warn!("using the CPU, because the GPU failed the check (see `moestro doctor`): {wrong}");
                None
            }
            Ok(None) if is_required => return Err(CommandError::Usage(format!("--device {GPU_KIND}: {NO_GPU}"))),
            Ok(None) => None,
            Err(error) if is_required => return Err(CommandError::Usage(format!("--device {GPU_KIND}: {error}"))),
            Err(error) => {
                tracing::warn!("using the CPU, because the GPU cannot be opened or checked: {error}");
                None
            }
        };
        Ok(Self { gpu, is_required })
    }

    pub fn name(&self) -> &'static str {
        if self.gpu.is_some() { GPU_KIND } else { CPU }
    }

    /// The GPU's name, as the driver reports it.
    pub fn gpu_name(&self) -> Option<String> {
        self.gpu.as_ref().map(|gpu| gpu.driver.name())
    }

    /// The GPU's recommended working set in bytes, for the memory plan.
    pub fn working_set(&self) -> Option<u64> {
        self.gpu.as_ref().map(working_set)
    }

    /// Moves a loaded model to the device. A model that the GPU's kernels do not support stays on the CPU, unless the
    /// GPU is required.
    ///
    /// # Errors
    /// The GPU is required and does not support the model.
    pub fn place(self, qwen: Qwen) -> Result<Qwen, ModelError> {
        let Some(gpu) = self.gpu else { return Ok(qwen) };
        match qwen.move_to(gpu) {
            Ok(model) => Ok(model),
            Err(refused) if self.is_required => Err(refused.error),
            Err(refused) => {
                tracing::warn!("using the CPU, because the GPU cannot run this model: {}", refused.error);
                Ok(*refused.qwen)
            }
        }
    }
}

/// A GPU's recommended working set in bytes, for the memory plan. Unbounded if the driver does not report a working
/// set.
pub fn working_set(gpu: &CommandQueue<impl Driver>) -> u64 {
    gpu.driver.working_set().unwrap_or(u64::MAX)
}

/// Name of a model's device.
pub fn name(model: &Qwen) -> &'static str {
    if model.is_on_gpu() { GPU_KIND } else { CPU }
}

/// Compares a GPU's kernels with the CPU. Returns the names of the kernels that fail or differ, with the first error.
/// Returns `None` if all kernels agree.
fn objections<D: Driver>(gpu: CommandQueue<D>) -> (Option<String>, CommandQueue<D>) {
    let begin = Instant::now();
    let (found, gpu) = check::kernels(gpu);
    let name = gpu.driver.name();
    let wrong: Vec<&Finding> = found.iter().filter(|finding| finding.is_fault()).collect();
    if wrong.is_empty() {
        let seconds = begin.elapsed().as_secs_f64();
        tracing::debug!("{}: all kernels agree with the CPU; compiling and comparing took {seconds:.2} s", name);
        return (None, gpu);
    }
    let names: Vec<&str> = wrong.iter().map(|finding| finding.name.as_str()).collect();
    let told =
        wrong.iter().find_map(|finding| Some(format!("; {}: {}", finding.name, finding.outcome.as_ref().err()?)));
    let names = names.join(", ");
    let told = told.unwrap_or_default();
    (Some(format!("{name}: these fail or do not agree with the CPU: {names}{told}")), gpu)
}

#[cfg(all(test, not(target_vendor = "apple")))]
mod tests {
    use super::*;
    use crate::{cli, config::LoadSettings};
    use clap::Parser;

    fn load(device: &str) -> LoadSettings {
        let typed = cli::Cli::try_parse_from(["moestro", "info", "--device", device]).unwrap();
        let cli::Command::Info(info) = typed.command else { unreachable!() };
        LoadSettings::new(info.load).unwrap()
    }

    #[test]
    fn metal_without_metal_is_an_error() {
        let chosen = DeviceChoice::new(&load("cpu")).unwrap();
        assert_eq!((chosen.name(), chosen.working_set()), (CPU, None));
        let Err(error) = DeviceChoice::new(&load("metal")) else { panic!("there is no Metal here") };
        assert_eq!(error.to_string(), "--device metal: only builds for macOS support it");
    }

    #[test]
    fn auto_without_a_gpu_takes_the_cpu() {
        if !matches!(device::open_gpu(), Ok(None)) {
            return println!("skipped: this machine has a GPU or a failing driver");
        }
        let chosen = DeviceChoice::new(&load("auto")).unwrap();
        assert_eq!((chosen.name(), chosen.working_set()), (CPU, None));
        let Err(error) = DeviceChoice::new(&load("cuda")) else { panic!("there is no card here") };
        assert_eq!(error.to_string(), format!("--device cuda: {NO_GPU}"));
    }
}
