//! `moestro run`.

use super::{Generate, PromptCache};
use clap::Args;

#[derive(Debug, Args)]
#[command(mut_arg("prompt", |arg| arg.help("Answer this and end. With -, or without it behind a pipe, it is read from stdin")))]
pub struct Run {
    #[command(flatten)]
    pub generate: Generate,
    /// A system prompt
    #[arg(long, env = "MOESTRO_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub cache: PromptCache,
}
