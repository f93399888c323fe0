//! Interfaces to the operating system: files, threads, memory limits and services. Only this module and `device`
//! contain system-specific code.

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
compile_error!("Moestro runs on Linux and macOS");

pub mod atomic_file;
mod data_file;
#[cfg(test)]
#[path = "../../tests/support/fifo.rs"]
pub mod fifo;
mod file_lock;
pub mod gpu_variables;
mod huge_pages;
mod jobs;
mod keep_awake;
pub mod os;
#[cfg(test)]
#[path = "../../tests/support/own_process.rs"]
pub mod own_process;
mod regular_file;
pub mod service;
pub mod split_mix64;
mod threads;

pub use data_file::{Access, DataFile, MAX_BLOCK, read_aligned};
pub use file_lock::FileLock;
pub use huge_pages::zeroed_buffer;
pub use jobs::{OnBytes, run_jobs};
pub use keep_awake::KeepAwake;
pub use regular_file::{FileStamp, check_small_file, open_regular_file, read_small_file, sha256_file};
pub use threads::Threads;
