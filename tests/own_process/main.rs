//! Tests that measure their process: allocations, memory and CPU time. Each test runs in a process of its own.

mod allocations;
#[path = "../common/mod.rs"]
mod common;
mod counting;
#[cfg(target_os = "linux")]
#[path = "../support/format_check.rs"]
mod format_check;
mod image_memory;
mod mutated_images;
#[cfg(target_os = "linux")]
mod random_formats;
