//! Environment variables that the GPU driver of macOS reads when a process opens the GPU.

/// Name and value. macOS 26 ends GPU work that delays the screen, such as a long prompt, with the error "Impacting
/// Interactivity". This variable relaxes the driver's time limit; llama.cpp sets it, too (pull request 22216).
pub const GPU_VARIABLES: [(&str, &str); 1] = [("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")];

/// Sets the variables of this process that the user has not set. Does nothing on other systems. Only for the first line
/// of `main`: other threads must not read the environment while it changes.
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
