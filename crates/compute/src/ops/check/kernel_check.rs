//! The CPU and the GPU under test, and the comparison of their results.

use super::random_inputs::RandomInputs;
use crate::{
    device::{DeviceError, Driver, Launch, Region, Timeline},
    ops::{Backend, Cpu, GpuBackend, HalfBuffers, Op, Weight, WeightFormat},
};
use std::collections::BTreeMap;

/// Largest allowed difference between f32 results, relative to the largest value.
pub(in crate::ops) const CLOSE: f64 = 1e-5;

/// Largest allowed difference between results of half-precision products, relative to the largest value. With 11
/// significant bits, sums over a few hundred columns differ by a few parts in ten thousand.
pub(in crate::ops) const HALF: f64 = 2e-3;

/// Minimum size of a block of memory in bytes.
const BLOCK: usize = 1 << 20;
/// Alignment of inputs in a block in bytes: a GPU's cache line.
const ALIGN: usize = 128;

/// The largest relative difference and the allowed one, or the device's error.
pub(super) type Outcome = Result<(f64, f64), String>;

/// The CPU and the GPU under test. A buffer has the same number on both devices, so that both can execute the same
/// operation.
pub(in crate::ops) struct KernelCheck<'a, D: Driver> {
    pub cpu: Cpu,
    pub gpu: GpuBackend<D>,
    pub random: RandomInputs,
    /// The unused part of the last block of memory. Every server start runs these checks, and a GPU driver handles a
    /// few large buffers better than hundreds of small ones.
    pub(super) arena: Region,
    pub(super) found: &'a mut BTreeMap<String, Outcome>,
}

impl<D: Driver> KernelCheck<'_, D> {
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<Region, DeviceError> {
        let whole = bytes.len().next_multiple_of(ALIGN);
        if whole > self.arena.len {
            let block = whole.max(BLOCK);
            self.arena = self.cpu.allocate(block)?;
            self.gpu.allocate(block)?;
        }
        let region = self.arena.first(bytes.len());
        self.arena = self.arena.part(whole, self.arena.len - whole);
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
    pub fn buffer(&mut self, count: usize) -> Result<Region, DeviceError> {
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

    /// Executes an operation on both devices. Returns the kernels that ran on the GPU. If a kernel fails, records the
    /// error and returns an empty list.
    pub fn run<'o>(&mut self, op: impl Into<Op<'o>>) -> Result<Vec<&'static str>, DeviceError> {
        let op = op.into();
        self.cpu.execute(&op)?;
        let done = self.gpu.execute(&op);
        Ok(self.ran(done))
    }

    /// Runs one launch on the GPU only. Returns the kernel and handles a failure as [`KernelCheck::run`] does.
    pub fn launch(&mut self, launch: Launch) -> Vec<&'static str> {
        let done = self.gpu.launch(launch);
        self.ran(done)
    }

    fn ran(&mut self, done: Result<(), DeviceError>) -> Vec<&'static str> {
        let mut ran = self.gpu.take_launched();
        let point = self.gpu.sync_point();
        if let Err(error) = done.and(self.gpu.wait_for(point))
            && let Some(refused) = ran.pop()
        {
            self.found.insert(refused.into(), Err(error.to_string()));
            let _ = self.gpu.wait_for(point);
            ran.clear();
        }
        ran
    }

    /// Executes an operation on both devices and compares the `floats` regions, and the `words` regions bit by bit.
    pub fn check<'o>(&mut self, op: impl Into<Op<'o>>, floats: &[Region], words: &[Region]) -> Result<(), DeviceError> {
        self.check_within(CLOSE, op, floats, words)
    }

    /// [`KernelCheck::check`] with another allowed difference.
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
            let found = self.on_gpu(*region)?;
            let expected = self.on_cpu(*region)?;
            self.record(&kernels, difference(&found, &expected), allowed);
        }
        for region in words {
            let found = self.on_gpu(*region)?;
            let expected = self.on_cpu(*region)?;
            let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            self.record(&kernels, if same { 0.0 } else { f64::INFINITY }, CLOSE);
        }
        Ok(())
    }

    /// Compares a region of the GPU with expected values and records the difference for `kernels`.
    pub fn expect(
        &mut self,
        allowed: f64,
        kernels: &[&'static str],
        region: Region,
        expected: &[f32],
    ) -> Result<(), DeviceError> {
        if !kernels.is_empty() {
            let found = self.on_gpu(region.floats(expected.len()))?;
            self.record(kernels, difference(&found, expected), allowed);
        }
        Ok(())
    }

    /// Allocates buffers for half-precision rows of up to `cols` values.
    pub fn half_buffers(&mut self, rows: usize, cols: usize) -> Result<HalfBuffers, DeviceError> {
        Ok(HalfBuffers {
            x: self.buffer(rows * HalfBuffers::words(cols))?,
            act: self.buffer(rows * HalfBuffers::words(cols))?,
            has_short: false,
        })
    }

    /// Records a difference for each of `kernels`, unless a larger difference is recorded already.
    pub fn record(&mut self, kernels: &[&str], difference: f64, allowed: f64) {
        for kernel in kernels {
            let outcome = self.found.entry((*kernel).into()).or_insert(Ok((0.0, allowed)));
            if let Ok((worst, limit)) = outcome {
                // NaN is worse than any number.
                if difference.is_nan() || difference / allowed > *worst / *limit {
                    *worst = difference;
                    *limit = allowed;
                }
            }
        }
    }
}

/// The largest absolute difference, divided by the largest absolute value of `expected`.
pub(in crate::ops) fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(0f64, |max, value| max.max(f64::from(*value).abs()));
    let each = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - f64::from(*e)).abs());
    let worst = each.fold(0f64, |worst, d| if d.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(d) });
    if found.len() == expected.len() { worst / largest.max(f64::MIN_POSITIVE) } else { f64::NAN }
}
