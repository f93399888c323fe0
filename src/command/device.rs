//! The device that computes: chosen before a model is loaded, since the memory plan depends on it.

use crate::{
    config::{Device, Load},
    device::{self, DeviceError, Gpu},
    error::{CommandError, ModelError},
    model::Qwen,
    ops::check::{self, Finding},
};
use std::time::Instant;

/// The device that is going to compute.
pub struct Chosen {
    gpu: Option<Box<dyn Gpu>>,
    /// It was asked for by name: nothing else will do.
    asked: bool,
}

/// Names, as metrics and logs have them.
pub const CPU: &str = "cpu";
pub const METAL: &str = "metal";

/// The reason for no GPU where nothing is wrong.
pub const NONE: &str = "this build has no Metal, which is for macOS only";

impl Chosen {
    /// The device that `--device` asks for. `auto` takes the system's GPU if all its kernels agree with the CPU on
    /// small inputs: the cost is that of compiling them, which has to be done anyway. Else the log says why not, and
    /// the CPU computes.
    ///
    /// # Errors
    /// `--device metal` where there is none.
    pub fn new(load: &Load) -> Result<Self, CommandError> {
        let found = if load.device == Device::Cpu { Ok(None) } else { device::gpu() };
        Self::of(found, load.device == Device::Metal)
    }

    /// The same of a GPU that was found, or not; `asked` if nothing else will do.
    ///
    /// # Errors
    /// There is none, and it was asked for.
    pub fn of(found: Result<Option<Box<dyn Gpu>>, DeviceError>, asked: bool) -> Result<Self, CommandError> {
        let gpu = match found {
            Ok(Some(mut gpu)) => match objections(&mut gpu) {
                None => Some(gpu),
                Some(wrong) if asked => {
                    tracing::warn!("--device metal is taken at its word: {wrong}");
                    Some(gpu)
                }
                Some(wrong) => {
                    tracing::warn!("the CPU computes (`moestro doctor` tells more): {wrong}");
                    None
                }
            },
            Ok(None) if asked => return Err(CommandError::Usage(format!("--device metal: {NONE}"))),
            Ok(None) => None,
            Err(error) if asked => return Err(CommandError::Usage(format!("--device metal: {error}"))),
            Err(error) => {
                tracing::warn!("the CPU computes: {error}");
                None
            }
        };
        Ok(Self { gpu, asked })
    }

    pub fn name(&self) -> &'static str {
        if self.gpu.is_some() { METAL } else { CPU }
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
        match qwen.onto(gpu) {
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
    if model.is_on_gpu() { METAL } else { CPU }
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
    use crate::{cli, config::Load};
    use clap::Parser;

    fn load(device: &str) -> Load {
        let typed = cli::Cli::try_parse_from(["moestro", "info", "--device", device]).unwrap();
        let cli::Command::Info(info) = typed.command else { unreachable!() };
        Load::new(info.load).unwrap()
    }

    #[test]
    fn without_metal_auto_takes_the_cpu_and_metal_says_so() {
        for device in ["auto", "cpu"] {
            let chosen = Chosen::new(&load(device)).unwrap();
            assert_eq!((chosen.name(), chosen.working_set()), (CPU, None));
        }
        let Err(error) = Chosen::new(&load("metal")) else { panic!("there is no Metal here") };
        assert_eq!(error.to_string(), "--device metal: this build has no Metal, which is for macOS only");
    }
}
