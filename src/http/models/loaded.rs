//! A loaded model: its engine, tokenizer, chat template and defaults. The host lists and loads models through
//! [`ModelLoader`].

use super::names::ModelEntry;
use crate::error::CommandError;
use moestro_chat::{Template, Tokenizer, grammar::GrammarCompiler};
use moestro_engine::{Handle, Sampling};
use std::sync::Arc;

/// A model's metadata for clients.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// Id in the list of models: `org/name` for a model from the hub, else a name.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// Number of experts per token. `None` for a dense model.
    pub experts_per_token: Option<usize>,
    /// Human-readable encoding of the weights.
    pub quantization: Option<String>,
}

/// Limits of requests, set by flags. `None` means that only the context length limits a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestLimits {
    /// Maximum number of tokens of an answer, if a chat request sets no maximum.
    pub max_tokens: Option<usize>,
    /// Maximum number of tokens of reasoning, if a request sets no maximum.
    pub thinking_budget: Option<usize>,
    /// Maximum number of tokens of a prompt.
    pub max_prompt_tokens: Option<usize>,
}

pub struct LoadedModel {
    pub engine: Handle,
    pub tokenizer: Arc<Tokenizer>,
    /// Compiles grammars for constrained answers.
    pub grammars: Arc<GrammarCompiler>,
    /// `None` if the model has no template. Chat requests are then refused.
    pub template: Option<Template>,
    pub card: ModelCard,
    /// Defaults of sampling parameters that a request does not set.
    pub defaults: Sampling,
    /// Default of `enable_thinking`. `None` if the template decides.
    pub thinking: Option<bool>,
    pub limits: RequestLimits,
    /// Memory plan, shown by `/health`.
    pub plan: serde_json::Value,
}

/// A loaded model together with the function that unloads it.
pub struct HostedModel {
    /// Id in the list of models.
    pub id: String,
    pub model: LoadedModel,
    /// Blocks until the memory is free. The host calls this function after the last request has dropped the model.
    pub unload: Box<dyn FnOnce() + Send>,
}

/// Why a model cannot be loaded.
#[derive(Debug, Clone)]
pub struct LoadFailure {
    /// For the log, with the paths of files.
    pub detail: String,
    /// For clients, without directories.
    pub message: String,
}

impl From<CommandError> for LoadFailure {
    fn from(error: CommandError) -> Self {
        Self { detail: error.to_string(), message: error.client_message() }
    }
}

impl From<&str> for LoadFailure {
    fn from(sentence: &str) -> Self {
        Self { detail: sentence.to_owned(), message: sentence.to_owned() }
    }
}

/// Lists and loads models. All methods block.
pub trait ModelLoader: Send + Sync + 'static {
    fn list(&self) -> Vec<ModelEntry>;

    /// Checks a model without loading its weights. Called while another model is loaded and answers requests, before
    /// that model is unloaded to make room for this model.
    fn check(&self, id: &str) -> Result<(), LoadFailure> {
        let _ = id;
        Ok(())
    }

    fn load(&self, id: &str) -> Result<HostedModel, LoadFailure>;

    /// Deletes the prompt caches that all models, loaded or not, have on disk.
    ///
    /// # Errors
    /// A sentence for the client.
    fn clear_prompt_caches(&self) -> Result<(), String> {
        Ok(())
    }
}
