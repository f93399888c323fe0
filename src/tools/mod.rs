//! Subcommands that measure and inspect: [`mod@bench`], [`doctor`], [`info`] and [`synth`]. Serving does not need them.

pub mod bench;
pub mod doctor;
mod estimate;
pub mod info;
mod machine_report;
mod measure;
mod rank;
mod simulate;
mod simulation;
pub mod synth;
