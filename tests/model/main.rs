//! Tests of models, templates and drafts. With all settings, results must equal those of the references.

mod chat;
#[path = "../common/mod.rs"]
mod common;
mod dflash;
mod dflash_demo;
mod draft_matrix;
mod drafts;
mod exact;
mod golden;
mod kv_bits;
mod layouts;
mod mutations;
mod parallel;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/program.rs"]
mod program;
mod prompt_cache;
mod quantizations;
mod qwen4_drafts;
mod qwen4_exp;
mod qwen4_files;
mod qwen4_images;
mod qwen4_kv_bits;
mod qwen4_sequences;
mod reference;
mod refusals;
#[path = "../support/shard.rs"]
mod shard;
mod snapshots;
mod snapshots_on_disk;
mod speculation;
mod text_files;
mod towers;
mod uploads;
mod vision;
