//! `moestro generate`: one answer on the terminal, and a line of figures on stderr.

use super::local_model::{LocalModel, figures, message};
use crate::{config::GenerateConfig, error::CommandError};
use std::future::pending;

/// Answers one prompt.
pub fn run(config: &GenerateConfig) -> Result<(), CommandError> {
    let local = LocalModel::load(config)?;
    one(&local, config)?;
    local.end()
}

/// The answer to what was said.
pub fn one(local: &LocalModel, config: &GenerateConfig) -> Result<(), CommandError> {
    let system = config.system.iter().map(|text| message("system", text));
    let messages: Vec<_> = system.chain(config.prompt.iter().map(|text| message("user", text))).collect();
    let runtime = runtime()?;
    let answer = runtime.block_on(local.answer(&messages, &local.answer_options(config), pending()))?;
    if let Some((_, timings)) = answer.end {
        eprintln!("{}", figures(&timings));
    }
    Ok(())
}

/// A runtime that waits for events and signals.
pub fn runtime() -> Result<tokio::runtime::Runtime, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| CommandError::Io { what: "starting the event loop".into(), source })
}
