//! The error of a device.

/// The reason why a device call failed: the driver's message where there is one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// An error with this message.
pub(super) fn fail<T>(why: impl Into<String>) -> Result<T, DeviceError> {
    Err(DeviceError(why.into()))
}
