//! `moestro generate`: prints one answer to stdout, and a line of figures to stderr.

use super::{
    answer_printer::figures,
    chat_model::ChatModel,
    chat_settings::AnswerOptions,
    local_model::{LocalModel, message},
};
use crate::{config::GenerateConfig, error::CommandError};
use std::future::pending;

/// Answers one prompt.
pub fn run(config: &GenerateConfig) -> Result<(), CommandError> {
    let model = ChatModel::Local(Box::new(LocalModel::load(config)?));
    answer_once(&model, config)?;
    model.close()
}

/// Answers the configured prompt once.
pub fn answer_once(model: &ChatModel, config: &GenerateConfig) -> Result<(), CommandError> {
    let system = config.system.iter().map(|text| message("system", text));
    let messages: Vec<_> = system.chain(config.prompt.iter().map(|text| message("user", text))).collect();
    let runtime = runtime()?;
    let answer = runtime.block_on(model.answer(&messages, &[], &AnswerOptions::new(config), pending()))?;
    if let Some(end) = answer.end {
        eprintln!("{}", figures(&end.timings));
        if end.is_cut && answer.content.is_empty() {
            eprintln!(
                "the answer reached its token limit while the model reasoned; raise --max-tokens or --ctx-size, or use \
                 --thinking off"
            );
        }
    }
    Ok(())
}

/// A single-threaded runtime that waits for events and signals.
pub fn runtime() -> Result<tokio::runtime::Runtime, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CommandError::io("starting the runtime"))
}
