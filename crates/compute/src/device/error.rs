//! [`DeviceError`], the error type of devices.

/// The text of Metal's error if macOS ended GPU work because it delayed the screen.
pub const GPU_INTERACTIVITY: &str = "Impacting Interactivity";
/// What the user can do about [`GPU_INTERACTIVITY`].
pub const GPU_INTERACTIVITY_REMEDY: &str =
    "start Moestro with AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1, use a smaller --prefill-chunk, or let the display sleep";

/// An error of a device call. Contains the driver's message if the driver gave a message.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceError {
    /// Memory could not be allocated.
    #[error("{0}")]
    Memory(String),
    #[error("{0}")]
    Failed(String),
}

/// Appends a cause and a remedy to the driver's message if the message is about GPU interactivity.
#[cfg(any(target_os = "macos", test))]
pub(super) fn explain(message: String) -> String {
    if !message.contains(GPU_INTERACTIVITY) {
        return message;
    }
    format!("{message}: macOS ended the GPU work because it delayed the screen; {GPU_INTERACTIVITY_REMEDY}")
}

/// Returns an error with this message.
pub(super) fn fail<T>(why: impl Into<String>) -> Result<T, DeviceError> {
    Err(DeviceError::Failed(why.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interactivity_error_names_a_remedy() {
        let message = "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";
        let explained = explain(message.into());
        assert!(explained.starts_with(message) && explained.ends_with(GPU_INTERACTIVITY_REMEDY), "{explained}");
        assert_eq!(explain("Caused GPU Timeout Error".into()), "Caused GPU Timeout Error");
    }
}
