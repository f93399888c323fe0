//! Errors of the CUDA driver.

use crate::device::DeviceError;
use cudarc::driver::result::DriverError;

/// Converts a CUDA driver error to a [`DeviceError`] with CUDA's description.
pub fn cuda_error(error: DriverError) -> DeviceError {
    let text = error.error_string().ok().and_then(|text| text.to_str().ok());
    DeviceError::Failed(text.map_or_else(|| format!("CUDA error {:?}", error.0), |text| format!("CUDA: {text}")))
}
