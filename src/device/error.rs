//! The error of a device.

#[cfg(any(target_os = "macos", test))]
use crate::error::{GPU_INTERACTIVITY, GPU_INTERACTIVITY_REMEDY};

/// The reason why a device call failed: the driver's message where there is one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// The driver's message of failed GPU work, with a remedy if the user can do something.
#[cfg(any(target_os = "macos", test))]
pub(super) fn explain(message: String) -> String {
    if !message.contains(GPU_INTERACTIVITY) {
        return message;
    }
    format!("{message}: macOS ended the GPU work because it delayed the screen; {GPU_INTERACTIVITY_REMEDY}")
}

/// An error with this message.
pub(super) fn fail<T>(why: impl Into<String>) -> Result<T, DeviceError> {
    Err(DeviceError(why.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interactivity_error_names_a_remedy() {
        let apples = "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";
        let told = explain(apples.into());
        assert!(told.starts_with(apples) && told.ends_with(GPU_INTERACTIVITY_REMEDY), "{told}");
        assert_eq!(explain("Caused GPU Timeout Error".into()), "Caused GPU Timeout Error");
    }
}
