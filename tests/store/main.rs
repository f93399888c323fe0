//! Tests of the store's building blocks through their public API: files, expert slots, eviction, checkpoint indexes and
//! packs. Also tests a failing disk.

mod belady;
mod eviction;
mod faults;
mod files;
mod identity;
mod index;
mod jobs;
mod pack;
mod pack_records;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/program.rs"]
mod program;
mod read_plan;
#[path = "../support/shard.rs"]
mod shard;
mod slot_table;
