//! Tests of the program from the outside: its commands, files, memory and signals.

mod attacks;
mod broken_output;
mod cgroup;
mod cli;
mod documents;
mod exiting;
mod first_day;
#[cfg(target_os = "linux")]
#[path = "../support/group.rs"]
mod group;
mod home;
mod idle;
mod interrupted_pull;
mod launch;
mod mistakes;
mod ports;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/program.rs"]
mod program;
mod prompt_cache_disk;
mod pull;
mod random_formats;
mod reload;
mod terminal;
