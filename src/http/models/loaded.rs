//! A loaded model: its engine, tokenizer, chat template and defaults.

use crate::{
    chat::{Template, Tokenizer, grammar::GrammarCompiler},
    engine::{Handle, Sampling},
};
use std::sync::Arc;

/// What clients see of a model.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// Id in the list of models: `org/name` for a model from the hub, else a name.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// Experts per token; `None` for a dense model.
    pub experts_per_token: Option<usize>,
    /// Encoding of the weights, for people.
    pub quantisation: Option<String>,
}

/// Limits of requests that flags set. `None`: only the context limits.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestLimits {
    /// Maximum number of tokens of an answer, if a chat request does not say.
    pub max_tokens: Option<usize>,
    /// Maximum number of tokens of reasoning, if a request does not say.
    pub thinking_budget: Option<usize>,
    /// Maximum number of tokens of a prompt.
    pub max_prompt_tokens: Option<usize>,
}

pub struct LoadedModel {
    pub engine: Handle,
    pub tokenizer: Arc<Tokenizer>,
    /// Compiles grammars for constrained answers.
    pub grammars: Arc<GrammarCompiler>,
    /// A model without a template answers completions only.
    pub template: Option<Template>,
    pub card: ModelCard,
    /// Sampling parameters that a request does not set.
    pub defaults: Sampling,
    /// Default of `enable_thinking`.
    pub thinking: Option<bool>,
    pub limits: RequestLimits,
    /// Memory plan, shown by `/health`.
    pub plan: serde_json::Value,
}
