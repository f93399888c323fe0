//! A pass that runs ahead of the CPU.

use moestro_compute::{
    device::{DeviceError, Region},
    ops::Backend,
};
use std::sync::{Arc, OnceLock};

/// The row of a sequence in a pass that was submitted before the caller knew the pass's tokens.
#[derive(Debug)]
pub struct PassAhead {
    /// The token of the row.
    pub id: u32,
    /// The row's place in the tables and the logits.
    pub row: usize,
    /// The logits after the token, on the device.
    pub logits: Region,
    /// The logits, or the device's error, if something else used the device before the caller asked for them.
    pub collected: OnceLock<Result<Vec<f32>, DeviceError>>,
}

/// Waits for a pass ahead, so that the device is idle and another pass may overwrite the buffers. `ahead` has the rows
/// of the pass, which keep their logits.
pub fn collect(ahead: &mut Vec<Arc<PassAhead>>, backend: &mut dyn Backend) {
    let mut failure = None;
    for pass in ahead.drain(..) {
        let mut logits = vec![0.0; pass.logits.len / 4];
        let done = failure.clone().map_or_else(|| backend.read_floats(pass.logits, &mut logits), Err);
        if let (Err(error), None) = (&done, &failure) {
            drop_failure(backend);
            failure = Some(error.clone());
        }
        let _ = pass.collected.set(done.map(|()| logits));
    }
}

/// Waits for all submitted work, and drops its failure, which was reported already. So the next pass can succeed.
pub fn drop_failure(backend: &mut dyn Backend) {
    let submitted = backend.sync_point();
    let _ = backend.wait_for(submitted);
}
