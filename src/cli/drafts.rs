//! The flags of speculation.

use super::values::{self, Draft, Speculation};
use clap::Args;

/// Several tokens at once, where that is faster.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation (the answer is the same with and without)")]
pub struct Drafts {
    /// Source of drafts: the checkpoint's MTP head, the text so far, or a directory or a hub id with an MTP head, a DFlash
    /// draft or a small model of the same vocabulary; auto is mtp if there is a head, else lookup
    #[arg(long, env = "MOESTRO_DRAFT_MODEL", value_name = "auto|mtp|lookup|off|PATH|ID", default_value = "auto", value_parser = values::draft)]
    pub draft_model: Draft,
    /// Tokens that are drafted at a time at most
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// Use drafts: auto does as long as they save time
    #[arg(long, env = "MOESTRO_SPECULATION", value_enum, default_value_t)]
    pub speculation: Speculation,
}
