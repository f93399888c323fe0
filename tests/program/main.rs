//! Tests of the program from the outside: its commands, files, memory and signals.

mod attacks;
mod cgroup;
mod cli;
#[cfg(target_os = "linux")]
mod clients;
mod documents;
mod exiting;
#[path = "../support/fifo.rs"]
mod fifo;
#[cfg(target_os = "linux")]
#[path = "../support/formats.rs"]
mod formats;
#[cfg(target_os = "linux")]
#[path = "../support/group.rs"]
mod group;
#[cfg(feature = "hub")]
#[path = "../support/hub.rs"]
mod hub;
mod idle;
mod launch;
mod mistakes;
#[path = "../support/process.rs"]
mod process;
#[cfg(target_os = "linux")]
#[path = "../support/process_memory.rs"]
mod process_memory;
#[path = "../support/program.rs"]
mod program;
mod prompt_cache_disk;
mod pull;
mod random_formats;
mod reload;
mod terminal;
