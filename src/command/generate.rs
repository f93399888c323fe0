//! `moestro generate`: prints one answer to stdout, and a line of timings to stderr.

use super::local_model::{LocalModel, message, timings_line};
use crate::{config::GenerateConfig, error::CommandError};
use std::future::pending;

/// Answers one prompt.
pub fn run(config: &GenerateConfig) -> Result<(), CommandError> {
    let local = LocalModel::load(config)?;
    answer_once(&local, config)?;
    local.unload()
}

/// Answers the configured prompt once.
pub fn answer_once(local: &LocalModel, config: &GenerateConfig) -> Result<(), CommandError> {
    let system = config.system.iter().map(|text| message("system", text));
    let messages: Vec<_> = system.chain(config.prompt.iter().map(|text| message("user", text))).collect();
    let runtime = runtime()?;
    let answer = runtime.block_on(local.answer(&messages, &[], &local.answer_options(config), pending()))?;
    if let Some((_, timings)) = answer.end {
        eprintln!("{}", timings_line(&timings));
    }
    Ok(())
}

/// A single-threaded runtime that waits for events and signals.
pub fn runtime() -> Result<tokio::runtime::Runtime, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| CommandError::Io { what: "starting the runtime".into(), source })
}
