//! A pass of a sequence that runs ahead of the CPU.

use moestro_compute::{
    device::{DeviceError, Region},
    ops::Backend,
};
use std::sync::{Arc, OnceLock};

/// A pass that was submitted before the caller knew its token.
#[derive(Debug)]
pub struct PassAhead {
    /// The pass's token.
    pub id: u32,
    /// The row of the buffers that the pass uses: 0 or 1.
    pub row: usize,
    /// The logits after the token, on the device.
    pub logits: Region,
    /// The logits, or the device's error, if something else used the device before the caller asked for them.
    pub collected: OnceLock<Result<Vec<f32>, DeviceError>>,
}

/// Waits for a pass ahead, so that the device is idle and another pass may overwrite the buffers. Keeps the logits.
pub fn collect(ahead: &mut Option<Arc<PassAhead>>, backend: &mut dyn Backend) {
    let Some(pass) = ahead.take() else { return };
    let mut logits = vec![0.0; pass.logits.len / 4];
    let done = backend.read_floats(pass.logits, &mut logits);
    if done.is_err() {
        drop_failure(backend);
    }
    let _ = pass.collected.set(done.map(|()| logits));
}

/// Waits for all submitted work, and drops its failure, which was reported already. So the next pass can succeed.
pub fn drop_failure(backend: &mut dyn Backend) {
    let submitted = backend.sync_point();
    let _ = backend.wait_for(submitted);
}
