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
    /// Memory plan, shown by `/health`.
    pub plan: serde_json::Value,
}
