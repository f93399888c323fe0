//! `moestro run`.

use super::{Drafts, Load, Model, PromptCache, Sampling};
use clap::Args;

#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub model: Model,
    /// Answer this and end. With -, or without it behind a pipe, the prompt is read from stdin
    #[arg(short, long, env = "MOESTRO_PROMPT")]
    pub prompt: Option<String>,
    /// A system prompt
    #[arg(long, env = "MOESTRO_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
    /// The most tokens of an answer [default: to the end of the context]
    #[arg(short = 'n', long, env = "MOESTRO_MAX_TOKENS", value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Makes the answers reproducible
    #[arg(long, env = "MOESTRO_SEED", value_name = "N")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub load: Load,
    #[command(flatten)]
    pub cache: PromptCache,
    #[command(flatten)]
    pub drafts: Drafts,
    #[command(flatten)]
    pub sampling: Sampling,
}
