//! `moestro generate`: prints one answer to stdout, and a line of figures to stderr.

use super::{
    answer_printer::figures,
    chat_client::{ChatClient, message},
    chat_settings::AnswerOptions,
    text::print_note,
};
use crate::{
    config::{GenerateConfig, config_file::Settings},
    error::CommandError,
};
use std::future::pending;

/// Answers one prompt.
pub fn run(config: &GenerateConfig, settings: &Settings) -> Result<(), CommandError> {
    answer_once(ChatClient::load(config, settings)?, config)
}

/// Answers the configured prompt once, and closes the client.
pub fn answer_once(chat: ChatClient, config: &GenerateConfig) -> Result<(), CommandError> {
    let system = config.system.iter().map(|text| message("system", text));
    let messages: Vec<_> = system.chain(config.prompt.iter().map(|text| message("user", text))).collect();
    let answer = chat.answer(&messages, &AnswerOptions::new(config), pending())?;
    if let Some(end) = answer.end {
        print_note(figures(&end.timings));
        if end.is_cut && answer.content.is_empty() {
            print_note(
                "the answer reached its token limit while the model reasoned; raise --max-tokens or --ctx-size, or use \
                 --thinking off",
            );
        }
    }
    chat.close();
    Ok(())
}
