//! Candle's device for the system's GPU.

use moestro_compute::device::candle_can_open_gpu;

/// Candle's device for the system's GPU, for the vision tower and the reference implementation. `None` if Candle does
/// not support the GPU.
pub fn open_candle_gpu() -> Option<candle_core::Device> {
    candle_can_open_gpu().then(|| candle_core::Device::new_metal(0).ok()).flatten()
}
