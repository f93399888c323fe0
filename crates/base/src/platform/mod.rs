//! Interfaces to the operating system: files, threads, memory limits and sockets of a service manager. Only this module
//! and `device` contain system-specific code.

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
compile_error!("Moestro runs on Linux and macOS");

pub mod activation;
pub mod atomic_file;
mod data_file;
mod deferred_signals;
mod file_lock;
pub mod gpu_variables;
mod huge_pages;
mod jobs;
mod json_file;
mod keep_awake;
pub mod os;
mod regular_file;
pub mod split_mix64;
mod threads;

pub use data_file::{Access, DataFile, MAX_BLOCK, read_aligned};
pub use deferred_signals::DeferredSignals;
pub use file_lock::FileLock;
pub use huge_pages::zeroed_buffer;
pub use jobs::{OnBytes, run_jobs};
pub use json_file::{IS_LFS_POINTER, LFS_START, check_not_placeholder, read_json_file};
pub use keep_awake::KeepAwake;
pub use regular_file::{FileStamp, check_small_file, open_regular_file, read_small_file, sha256_file};
pub use threads::Threads;
