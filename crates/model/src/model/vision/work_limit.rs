//! [`WorkLimit`]: bounds the work that Candle gives a GPU at once.
//!
//! Candle submits a command buffer after a fixed number of operations, however large they are. macOS ends a command
//! buffer that delays the screen, and a request can only be cancelled before work is encoded.

use candle_core::{Device, Result};
use std::cell::Cell;

/// Maximum number of floating-point operations between two waits: 0.02 s at 5 TFLOP/s.
pub const MAX_WORK: f64 = 1e11;

/// Counts the work since the last wait for a device.
pub struct WorkLimit {
    device: Device,
    since_wait: Cell<f64>,
    /// The most work between two waits, and the number of waits.
    most: Cell<(f64, usize)>,
}

impl WorkLimit {
    pub fn new(device: Device) -> Self {
        Self { device, since_wait: Cell::default(), most: Cell::default() }
    }

    /// Must be called before `work` floating-point operations are encoded. Waits for the device if they would exceed
    /// [`MAX_WORK`] together with the work before them.
    pub fn add(&self, work: f64) -> Result<()> {
        if self.since_wait.get() > 0.0 && self.since_wait.get() + work > MAX_WORK {
            self.wait()?;
        }
        self.since_wait.set(self.since_wait.get() + work);
        Ok(())
    }

    /// Waits for all work. Candle then also frees the buffers of tensors that were dropped. The CPU never has work left.
    pub fn wait(&self) -> Result<()> {
        let (most, waits) = self.most.get();
        self.most.set((most.max(self.since_wait.take()), waits + 1));
        self.device.synchronize()
    }

    /// The most work between two waits, and the number of waits.
    #[cfg(test)]
    pub fn most(&self) -> (f64, usize) {
        self.most.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_between_two_waits_is_bounded() {
        let limit = WorkLimit::new(Device::Cpu);
        for part in [0.4, 0.5, 0.2, 0.7, 0.2, 0.1] {
            limit.add(part * MAX_WORK).unwrap();
        }
        limit.wait().unwrap();
        let (most, waits) = limit.most();
        assert!((most / MAX_WORK - 0.9).abs() < 1e-9 && waits == 3, "{most}, {waits} waits");
        // One operation cannot be divided.
        limit.add(2.0 * MAX_WORK).unwrap();
        limit.add(1.0).unwrap();
        assert_eq!(limit.most(), (2.0 * MAX_WORK, 4));
    }
}
