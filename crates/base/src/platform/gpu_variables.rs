//! Environment variables that the GPU driver of macOS reads when a process opens the GPU.

/// Name and value of each variable. macOS 26 kills GPU work that delays the screen, such as a long prefill, with the
/// error "Impacting Interactivity". The variable in this list relaxes the driver's time limit. llama.cpp sets the same
/// variable (pull request 22216).
pub const GPU_VARIABLES: [(&str, &str); 1] = [("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")];

/// Sets those [`GPU_VARIABLES`] that the user has not set. Does nothing on systems other than macOS. Must be called at
/// the start of `main`, because other threads must not read the environment while it changes.
pub fn set_gpu_variables() {
    if cfg!(target_os = "macos") {
        for (name, value) in GPU_VARIABLES {
            if std::env::var_os(name).is_none() {
                // SAFETY: `main` calls this before it starts a thread.
                unsafe { std::env::set_var(name, value) };
            }
        }
    }
}
