//! Helpers of tests that compare instruction sets.

use super::Isa;
use crate::ops::Float;

thread_local! {
    /// The instruction set that this thread uses.
    pub(super) static FORCED: std::cell::Cell<Option<Isa>> = const { std::cell::Cell::new(None) };
}

/// Runs `job` with `isa` on this thread.
pub(crate) fn with<R>(isa: Isa, job: impl FnOnce() -> R) -> R {
    FORCED.set(Some(isa));
    let result = job();
    FORCED.set(None);
    result
}

/// A small generator, so that the tests do not depend on the random stream of a crate.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 33;
        (x.wrapping_mul(0xff51_afd7_ed55_8ccd)) ^ x >> 29
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 24) as u8).collect()
    }

    pub fn floats(&mut self, float: Float, n: usize, size: f32) -> Vec<u8> {
        let mut values = (0..n).map(|_| self.unit() * size).collect::<Vec<_>>().into_iter();
        let mut values = || values.next().unwrap_or_default();
        match float {
            Float::F32 => (0..n).flat_map(|_| values().to_le_bytes()).collect(),
            Float::F16 => (0..n).flat_map(|_| half::f16::from_f32(values()).to_le_bytes()).collect(),
            Float::Bf16 => (0..n).flat_map(|_| half::bf16::from_f32(values()).to_le_bytes()).collect(),
        }
    }
}
