//! Checks this machine's arithmetic: each operation on the GPU against the CPU, and each instruction set of the
//! processor against portable Rust. `moestro doctor` prints the findings, and `--device auto` uses the GPU only if
//! all checks pass. The inputs are in each operation's `cases.rs`.

mod order;
pub(super) mod processor;

pub use processor::processor;

use super::{
    Backend, Cpu, Float, GpuBackend, HalfBuffers, Op, Weight, WeightFormat, attention, conv, delta, embedding, experts,
    linear, norm, router,
};
use crate::device::{CpuArithmetic, CpuDevice, DeviceError, Gpu, Launch, Region, Timeline};
use crate::platform::split_mix64::SplitMix64;
use std::collections::BTreeMap;

/// Largest allowed difference between f32 results, relative to the largest value.
pub(super) const CLOSE: f64 = 1e-5;

/// The same for half-precision products. With 11 significant bits, sums over a few hundred columns differ by a few
/// parts in ten thousand.
pub(super) const HALF: f64 = 2e-3;

/// The result of checking one kernel or instruction set.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    pub name: String,
    /// The largest relative difference and the allowed one, or the device's error.
    pub outcome: Result<(f64, f64), String>,
}

impl Finding {
    pub fn agrees(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|(difference, allowed)| difference <= allowed)
    }
}

/// Runs every operation on `gpu` and on the CPU and compares the results. Half-precision products are checked if the
/// GPU has matrix units. A kernel that the device refuses does not stop the other checks.
pub fn kernels(gpu: &mut dyn Gpu) -> Vec<Finding> {
    let mut found: BTreeMap<String, Outcome> = BTreeMap::new();
    for (name, error) in gpu.compile() {
        if let Some(error) = error {
            found.insert(name, Err(error.0));
        }
    }
    type Cases = fn(&mut KernelCheck<'_>) -> Result<(), DeviceError>;
    let parts: [(&str, Cases); 9] = [
        ("products", linear::cases),
        ("norm", norm::cases),
        ("embedding", embedding::cases),
        ("delta rule", conv::cases),
        ("delta net", delta::cases),
        ("attention", attention::cases),
        ("router", router::cases),
        ("experts", experts::cases),
        ("order and memory", order::cases),
    ];
    for (what, part) in parts {
        // Each check frees its memory at the end.
        let cpu = Cpu::new(CpuDevice::new(1, CpuArithmetic::F32));
        let mut bench = KernelCheck {
            cpu,
            gpu: GpuBackend::waiting_each(&mut *gpu),
            random: RandomInputs(SplitMix64(1)),
            found: &mut found,
        };
        if let Err(error) = part(&mut bench) {
            bench.found.insert(format!("({what})"), Err(error.0));
        }
    }
    found.into_iter().map(|(name, outcome)| Finding { name, outcome }).collect()
}

/// The largest relative difference and the allowed one, or the device's error.
type Outcome = Result<(f64, f64), String>;

/// The CPU and the GPU under test. A buffer has the same number on both, so that both can execute the same
/// operation.
pub(super) struct KernelCheck<'a> {
    pub cpu: Cpu,
    pub gpu: GpuBackend<&'a mut dyn Gpu>,
    pub random: RandomInputs,
    found: &'a mut BTreeMap<String, Outcome>,
}

impl KernelCheck<'_> {
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<Region, DeviceError> {
        let region = self.cpu.allocate(bytes.len())?;
        self.gpu.allocate(bytes.len())?;
        self.write(region, bytes)?;
        Ok(region)
    }

    /// Writes the same bytes on both devices.
    pub fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.cpu.write(region, bytes)?;
        self.gpu.write(region, bytes)
    }

    pub fn words(&mut self, words: &[u32]) -> Result<Region, DeviceError> {
        self.bytes(bytemuck::cast_slice(words))
    }

    pub fn floats(&mut self, values: &[f32]) -> Result<Region, DeviceError> {
        self.bytes(bytemuck::cast_slice(values))
    }

    pub fn random(&mut self, count: usize) -> Result<Region, DeviceError> {
        let values = self.random.floats(count);
        self.floats(&values)
    }

    /// Allocates `count` floats, NaN until written.
    pub fn room(&mut self, count: usize) -> Result<Region, DeviceError> {
        self.bytes(&vec![0xff; count * 4])
    }

    pub fn weight(&mut self, codes: WeightFormat, rows: usize, cols: usize) -> Result<Weight, DeviceError> {
        let mut parts = [Region::default(); 3];
        for (region, part) in parts.iter_mut().zip(self.random.parts(codes, rows, cols)) {
            if !part.is_empty() {
                *region = self.bytes(&part)?;
            }
        }
        Ok(Weight { codes, rows, cols, global_scale: 1.0, parts })
    }

    pub fn on_cpu(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        let mut values = vec![0.0; region.len / 4];
        self.cpu.read_floats(region, &mut values)?;
        Ok(values)
    }

    pub fn on_gpu(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        let mut values = vec![0.0; region.len / 4];
        self.gpu.read_floats(region, &mut values)?;
        Ok(values)
    }

    /// Executes an operation on both devices. Returns the kernels that ran. If one was refused, records that and
    /// returns none.
    pub fn run<'o>(&mut self, op: impl Into<Op<'o>>) -> Result<Vec<&'static str>, DeviceError> {
        let op = op.into();
        self.cpu.execute(&op)?;
        let done = self.gpu.execute(&op);
        Ok(self.ran(done))
    }

    /// Runs one launch on the GPU, as [`KernelCheck::run`] does.
    pub fn launch(&mut self, launch: Launch) -> Vec<&'static str> {
        let done = self.gpu.launch(launch);
        self.ran(done)
    }

    fn ran(&mut self, done: Result<(), DeviceError>) -> Vec<&'static str> {
        let mut ran = self.gpu.take_launched();
        let mark = self.gpu.sync_point();
        if let Err(error) = done.and(self.gpu.wait_for(mark))
            && let Some(refused) = ran.pop()
        {
            self.found.insert(refused.into(), Err(error.0));
            let _ = self.gpu.wait_for(mark);
            ran.clear();
        }
        ran
    }

    /// Executes an operation on both devices and compares the `floats` regions, and the `words` regions bit by bit.
    pub fn check<'o>(&mut self, op: impl Into<Op<'o>>, floats: &[Region], words: &[Region]) -> Result<(), DeviceError> {
        self.check_within(CLOSE, op, floats, words)
    }

    /// The same with another allowed difference.
    pub fn check_within<'o>(
        &mut self,
        allowed: f64,
        op: impl Into<Op<'o>>,
        floats: &[Region],
        words: &[Region],
    ) -> Result<(), DeviceError> {
        let kernels = self.run(op)?;
        if kernels.is_empty() {
            return Ok(());
        }
        for region in floats {
            let (found, expected) = (self.on_gpu(*region)?, self.on_cpu(*region)?);
            self.enter(&kernels, difference(&found, &expected), allowed);
        }
        for region in words {
            let (found, expected) = (self.on_gpu(*region)?, self.on_cpu(*region)?);
            let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            self.enter(&kernels, if same { 0.0 } else { f64::INFINITY }, CLOSE);
        }
        Ok(())
    }

    /// Compares a region of the GPU with expected values.
    pub fn expect(
        &mut self,
        allowed: f64,
        kernels: &[&'static str],
        region: Region,
        expected: &[f32],
    ) -> Result<(), DeviceError> {
        if !kernels.is_empty() {
            let found = self.on_gpu(region.floats(expected.len()))?;
            self.enter(kernels, difference(&found, expected), allowed);
        }
        Ok(())
    }

    /// Allocates half-precision rows of up to `cols` values.
    pub fn halves(&mut self, rows: usize, cols: usize) -> Result<HalfBuffers, DeviceError> {
        Ok(HalfBuffers {
            x: self.room(rows * HalfBuffers::words(cols))?,
            act: self.room(rows * HalfBuffers::words(cols))?,
        })
    }

    /// Records a difference for some kernels. Keeps the worst of each.
    pub fn enter(&mut self, kernels: &[&str], difference: f64, allowed: f64) {
        for kernel in kernels {
            let outcome = self.found.entry((*kernel).into()).or_insert(Ok((0.0, allowed)));
            if let Ok((worst, limit)) = outcome {
                // NaN is worse than any number.
                if difference.is_nan() || difference / allowed > *worst / *limit {
                    (*worst, *limit) = (difference, allowed);
                }
            }
        }
    }
}

/// The largest difference divided by the largest value.
pub(super) fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(0f64, |most, value| most.max(f64::from(*value).abs()));
    let each = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - f64::from(*e)).abs());
    let worst = each.fold(0f64, |worst, d| if d.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(d) });
    if found.len() == expected.len() { worst / largest.max(f64::MIN_POSITIVE) } else { f64::NAN }
}

/// Random inputs, the same on every machine.
pub(in crate::ops) struct RandomInputs(pub SplitMix64);

impl RandomInputs {
    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        ((self.0.bits() >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Codes, scales and biases of a random matrix with values of moderate size.
    pub fn parts(&mut self, format: WeightFormat, rows: usize, cols: usize) -> [Vec<u8>; 3] {
        let [code_bytes, scale_bytes, bias_bytes] = format.row_bytes(cols).map(|bytes| bytes * rows);
        let store = |float: Float, v: f32| match float {
            Float::F32 => v.to_le_bytes().to_vec(),
            Float::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
            Float::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
        };
        match format {
            WeightFormat::Dense(float) => {
                [(0..rows * cols).flat_map(|_| store(float, self.float())).collect(), vec![], vec![]]
            }
            WeightFormat::Affine { bits, scale, .. } => {
                let codes = (0..code_bytes).map(|_| self.0.bits() as u8).collect();
                let step = 1.0 / f32::from(1u16 << bits);
                let scales = (0..scale_bytes / scale.bytes()).flat_map(|_| store(scale, self.float() * step)).collect();
                [codes, scales, (0..bias_bytes / scale.bytes()).flat_map(|_| store(scale, self.float())).collect()]
            }
            // 0x7f is NaN, both as an 8-bit code and as a scale of nvfp4.
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 => {
                let codes = (0..code_bytes).map(|_| (self.0.bits() as u8) & 0xee).collect();
                // About 1/4 to 1, as E4M3 or as powers of two.
                let least = if matches!(format, WeightFormat::Nvfp4) { 40 } else { 125 };
                [codes, (0..scale_bytes).map(|_| least + (self.0.bits() % 3) as u8).collect(), vec![]]
            }
        }
    }
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
            Finding { name: "k".into(), outcome }.agrees()
        };
        assert!(finding(&[1.0, -4.0]) && finding(&[1.00001, -4.0]));
        assert!(!finding(&[1.0001, -4.0]) && !finding(&[f32::NAN, -4.0]) && !finding(&[f32::INFINITY, -4.0]));
        assert!(!finding(&[1.0]));
        assert!(!Finding { name: "k".into(), outcome: Err("no".into()) }.agrees());
    }
}
