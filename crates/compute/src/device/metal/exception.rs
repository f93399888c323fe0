//! Objective-C exceptions, which would otherwise end the program.

use crate::device::DeviceError;
use std::panic::AssertUnwindSafe;

/// Runs `work` and turns an Objective-C exception into an error.
pub fn catch_exception<R>(work: impl FnOnce() -> R) -> Result<R, DeviceError> {
    objc2::exception::catch(AssertUnwindSafe(work)).map_err(|exception| {
        let what = exception.map_or_else(|| "no description".into(), |exception| exception.to_string());
        DeviceError::Failed(format!("Metal has thrown an exception: {what}"))
    })
}
