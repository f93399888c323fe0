//! Tests of the store's building blocks through their public API: files, expert slots, eviction, checkpoint indexes and
//! packs. Also tests a failing disk.

#[path = "store/belady.rs"]
mod belady;
#[path = "store/eviction.rs"]
mod eviction;
#[path = "store/faults.rs"]
mod faults;
#[path = "store/files.rs"]
mod files;
#[path = "store/identity.rs"]
mod identity;
#[path = "store/index.rs"]
mod index;
#[path = "store/jobs.rs"]
mod jobs;
#[path = "store/pack.rs"]
mod pack;
#[path = "store/pack_records.rs"]
mod pack_records;
#[path = "support/process.rs"]
mod process;
#[path = "support/program.rs"]
mod program;
#[path = "store/read_plan.rs"]
mod read_plan;
#[path = "support/shard.rs"]
mod shard;
#[path = "store/slot_table.rs"]
mod slot_table;
