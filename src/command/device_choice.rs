//! The device that computes: chosen before a model is loaded, since the memory plan depends on it.

use crate::{
    config::{Device, LoadSettings},
    device::{self, DeviceError, GPU_KIND, Gpu, NO_GPU},
    error::{CommandError, ModelError},
    model::Qwen,
    ops::check::{self, Finding},
};
use std::time::Instant;

/// The device that is going to compute.
pub struct DeviceChoice {
    gpu: Option<Box<dyn Gpu>>,
    /// It was asked for by name: nothing else will do.
    asked: bool,
}

/// A name, as metrics and logs have it; a GPU's is [`GPU_KIND`].
pub const CPU: &str = "cpu";

impl DeviceChoice {
    /// The device that `--device` asks for. `auto` takes the system's GPU if all its kernels agree with the CPU on
    /// small inputs: the cost is that of compiling them, which has to be done anyway. Else the log says why not, and
    /// the CPU computes.
    ///
    /// # Errors
    /// `--device metal` or `--device cuda` where there is none.
    pub fn new(load: &LoadSettings) -> Result<Self, CommandError> {
        let elsewhere = |device, system| {
            CommandError::Usage(format!("--device {device}: this build has none, which is for {system} only"))
        };
        match load.device {
            Device::Cpu => Self::of(Ok(None), false),
            Device::Auto => Self::of(device::open_gpu(), false),
            Device::Metal if GPU_KIND != "metal" => Err(elsewhere("metal", "macOS")),
            Device::Cuda if GPU_KIND != "cuda" => Err(elsewhere("cuda", "Linux")),
            Device::Metal | Device::Cuda => Self::of(device::open_gpu(), true),
        }
    }

    /// The same of a GPU that was found, or not; `asked` if nothing else will do.
    ///
    /// # Errors
    /// There is none, and it was asked for.
    pub fn of(found: Result<Option<Box<dyn Gpu>>, DeviceError>, asked: bool) -> Result<Self, CommandError> {
        let gpu = match found {
            Ok(Some(mut gpu)) => match objections(&mut *gpu) {
                None => Some(gpu),
                Some(wrong) if asked => {
                    tracing::warn!("--device {GPU_KIND} is taken at its word: {wrong}");
                    Some(gpu)
                }
                Some(wrong) => {
                    tracing::warn!("the CPU computes (`moestro doctor` tells more): {wrong}");
                    None
                }
            },
            Ok(None) if asked => return Err(CommandError::Usage(format!("--device {GPU_KIND}: {NO_GPU}"))),
            Ok(None) => None,
            Err(error) if asked => return Err(CommandError::Usage(format!("--device {GPU_KIND}: {error}"))),
            Err(error) => {
                tracing::warn!("the CPU computes: {error}");
                None
            }
        };
        Ok(Self { gpu, asked })
    }

    pub fn name(&self) -> &'static str {
        if self.gpu.is_some() { GPU_KIND } else { CPU }
    }

    /// The GPU's recommended working set (bytes), for the memory plan.
    pub fn working_set(&self) -> Option<u64> {
        self.gpu.as_deref().map(working_set)
    }

    /// Puts a loaded model there. A model that the GPU's kernels cannot compute stays on the CPU, unless the GPU was
    /// asked for.
    ///
    /// # Errors
    /// The GPU was asked for and cannot compute this model.
    pub fn place(self, qwen: Qwen) -> Result<Qwen, ModelError> {
        let Some(gpu) = self.gpu else { return Ok(qwen) };
        match qwen.move_to(gpu) {
            Ok(model) => Ok(model),
            Err(refused) if self.asked => Err(refused.error),
            Err(refused) => {
                tracing::warn!("the CPU computes: {}", refused.error);
                Ok(*refused.qwen)
            }
        }
    }
}

/// A GPU's recommended working set (bytes), for the memory plan: no bound if it says nothing.
pub fn working_set(gpu: &dyn Gpu) -> u64 {
    gpu.working_set().unwrap_or(u64::MAX)
}

/// The name of a model's device.
pub fn name(model: &Qwen) -> &'static str {
    if model.is_on_gpu() { GPU_KIND } else { CPU }
}

/// The faults of a GPU: the kernels' names, and the error of the first of those that could not run.
fn objections(gpu: &mut dyn Gpu) -> Option<String> {
    let begin = Instant::now();
    let found = check::kernels(gpu);
    let wrong: Vec<&Finding> = found.iter().filter(|finding| !finding.agrees()).collect();
    if wrong.is_empty() {
        let seconds = begin.elapsed().as_secs_f64();
        tracing::debug!("{}: all kernels agree with the CPU; compiling and comparing took {seconds:.2} s", gpu.name());
        return None;
    }
    let names: Vec<&str> = wrong.iter().map(|finding| finding.name.as_str()).collect();
    let told =
        wrong.iter().find_map(|finding| Some(format!("; {}: {}", finding.name, finding.outcome.as_ref().err()?)));
    let (gpu, told) = (gpu.name(), told.unwrap_or_default());
    Some(format!("{gpu}: these fail or do not agree with the CPU: {}{told}", names.join(", ")))
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
    fn without_metal_metal_says_so() {
        let chosen = DeviceChoice::new(&load("cpu")).unwrap();
        assert_eq!((chosen.name(), chosen.working_set()), (CPU, None));
        let Err(error) = DeviceChoice::new(&load("metal")) else { panic!("there is no Metal here") };
        assert_eq!(error.to_string(), "--device metal: this build has none, which is for macOS only");
    }

    #[test]
    fn without_a_card_auto_takes_the_cpu_and_cuda_says_so() {
        if !matches!(device::open_gpu(), Ok(None)) {
            return println!("there is a card, or a driver that fails");
        }
        let chosen = DeviceChoice::new(&load("auto")).unwrap();
        assert_eq!((chosen.name(), chosen.working_set()), (CPU, None));
        let Err(error) = DeviceChoice::new(&load("cuda")) else { panic!("there is no card here") };
        assert_eq!(error.to_string(), format!("--device cuda: {NO_GPU}"));
    }
}
