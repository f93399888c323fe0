//! The one conversation that all wire formats are translated into: OpenAI's chat request. Whatever comes after it (the
//! checks, the prompt, the sampling, the transcript) knows no wire format.

use crate::http::{
    LoadedModel,
    errors::ApiError,
    layers::{memory::MemoryPermit, request_log::RequestLog},
    openai::{
        chat,
        types::{ChatRequest, Common},
    },
    output::generation::Transcript,
};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A conversation that wants its next turn.
#[derive(Debug, Default)]
pub struct Conversation {
    pub common: Common,
    pub chat: ChatRequest,
    /// The fields' names here and in the format that the client speaks, for errors: see [`ApiError::renamed`].
    pub names: &'static [(&'static str, &'static str)],
}

impl Conversation {
    /// Checks it and queues it.
    pub async fn submit(
        self,
        app: &Arc<LoadedModel>,
        log: &Arc<RequestLog>,
        permit: MemoryPermit,
    ) -> Result<Transcript, ApiError> {
        let submitted = chat::submit(app, log, &self.common, self.chat, permit).await;
        submitted.map_err(|error| error.renamed(self.names))
    }

    /// The number of tokens of its prompt.
    pub async fn count(self, app: &Arc<LoadedModel>, mut permit: MemoryPermit) -> Result<usize, ApiError> {
        self.common.check(&app.card)?;
        let chat = chat::conversation(self.chat).map_err(|error| error.renamed(self.names))?;
        let (prompt, _) = app.render(&mut permit, chat).await?;
        let (ids, _) = app.tokenize(&mut permit, prompt, usize::MAX).await?;
        Ok(ids.len())
    }
}

/// An assistant's message. Reasoning and calls are there only if there are any.
pub fn assistant(content: String, reasoning: String, calls: Vec<Value>) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    message.insert("content".into(), content.into());
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    message.into()
}
