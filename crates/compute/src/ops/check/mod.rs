//! Checks this machine's arithmetic: each operation on the GPU against the CPU, and each instruction set of the
//! processor against portable Rust. `moestro doctor` prints the findings, and `--device auto` uses the GPU only if
//! all checks pass. The inputs are in `cases/`, a file for each
//! operation.

mod cases;
mod kernel_check;
pub(super) mod processor;
mod random_inputs;

pub(super) use kernel_check::{CLOSE, HALF, KernelCheck, difference};
pub use processor::processor;
pub(in crate::ops) use random_inputs::RandomInputs;

use self::kernel_check::Outcome;
use super::{Cpu, GpuBackend};
use crate::device::{CommandQueue, CpuArithmetic, CpuDevice, Driver, Region, SystemDriver, kernels::is_used};
use moestro_base::platform::split_mix64::SplitMix64;
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::BTreeMap;

/// The result of checking one kernel or instruction set.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    pub name: String,
    /// The largest relative difference and the allowed one, or the device's error.
    pub outcome: Result<(f64, f64), String>,
    /// False for a kernel that no model launches on this device.
    pub is_used: bool,
}

impl Finding {
    /// The result of something that every model uses.
    pub fn new(name: String, outcome: Result<(f64, f64), String>) -> Self {
        Self { name, outcome, is_used: true }
    }

    pub fn agrees(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|(difference, allowed)| difference <= allowed)
    }

    /// True if the device must not be used: something differs, or something that models use fails.
    pub fn is_fault(&self) -> bool {
        !self.agrees() && (self.is_used || self.outcome.is_ok())
    }
}

impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let outcome = self.outcome.as_ref();
        let (difference, allowed) = outcome.ok().copied().unzip();
        let mut map = to.serialize_map(Some(6))?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("agrees", &self.agrees())?;
        map.serialize_entry("difference", &difference)?;
        map.serialize_entry("allowed", &allowed)?;
        map.serialize_entry("error", &outcome.err())?;
        map.serialize_entry("used", &self.is_used)?;
        map.end()
    }
}

/// The names of the parts of the check.
pub fn parts() -> impl Iterator<Item = &'static str> {
    cases::parts::<SystemDriver>().into_iter().map(|(name, _)| name)
}

/// Runs every operation on `gpu` and on the CPU and compares the results. Half-precision products are checked if the
/// GPU has matrix units. A kernel that the device refuses does not stop the other checks. Returns `gpu` for other work.
pub fn kernels<D: Driver>(gpu: CommandQueue<D>) -> (Vec<Finding>, CommandQueue<D>) {
    kernels_of(gpu, |_| true)
}

/// Like [`kernels`], but runs only some parts.
pub fn kernels_of<D: Driver>(
    mut gpu: CommandQueue<D>,
    is_wanted: impl Fn(&str) -> bool,
) -> (Vec<Finding>, CommandQueue<D>) {
    let mut found: BTreeMap<String, Outcome> = BTreeMap::new();
    for (name, error) in gpu.driver.compile() {
        if let Some(error) = error {
            found.insert(name, Err(error.to_string()));
        }
    }
    for (what, part) in cases::parts().into_iter().filter(|(name, _)| is_wanted(name)) {
        // Each check frees its memory at the end.
        let cpu = Cpu::new(CpuDevice::new(1, CpuArithmetic::F32));
        let mut bench = KernelCheck {
            cpu,
            gpu: GpuBackend::waiting_each(gpu),
            random: RandomInputs(SplitMix64(1)),
            arena: Region::default(),
            found: &mut found,
        };
        if let Err(error) = part(&mut bench) {
            bench.found.insert(format!("({what})"), Err(error.to_string()));
        }
        gpu = bench.gpu.into_queue();
    }
    let has_own_memory = gpu.driver.has_own_memory();
    let finding = |(name, outcome): (String, Outcome)| {
        let is_used = is_used(&name, has_own_memory);
        Finding { name, outcome, is_used }
    };
    (found.into_iter().map(finding).collect(), gpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_matches_portable_rust() {
        let found = processor();
        assert_eq!(found[0].name, "scalar");
        assert!(found.iter().all(Finding::agrees), "{found:?}");
    }

    #[test]
    fn finding_rejects_large_difference_and_nan() {
        let finding = |found: &[f32]| {
            let outcome = Ok((difference(found, &[1.0, -4.0]), CLOSE));
            Finding::new("k".into(), outcome).agrees()
        };
        assert!(finding(&[1.0, -4.0]) && finding(&[1.00001, -4.0]));
        assert!(!finding(&[1.0001, -4.0]) && !finding(&[f32::NAN, -4.0]) && !finding(&[f32::INFINITY, -4.0]));
        assert!(!finding(&[1.0]));
        let failed = Finding::new("k".into(), Err("no".into()));
        assert!(!failed.agrees() && failed.is_fault());
        // An error in a kernel that no model launches is no fault. A wrong result is.
        assert!(!Finding { is_used: false, ..failed }.is_fault());
        assert!(Finding { is_used: false, ..Finding::new("k".into(), Ok((1.0, CLOSE))) }.is_fault());
    }
}
