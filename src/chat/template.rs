use crate::error::ChatError;
use serde_json::{Map, Value};
use std::path::Path;

/// What a chat template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// OpenAI chat messages, oldest first.
    pub messages: &'a [Value],
    /// OpenAI tool definitions.
    pub tools: Option<&'a [Value]>,
    /// Further variables of the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: &'a Map<String, Value>,
    /// End the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
}

/// A model's chat template.
pub struct Template {}

impl Template {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, in a model's directory.
    pub fn load(_dir: &Path) -> Result<Self, ChatError> {
        todo!()
    }

    /// The prompt of a conversation.
    pub fn render(&self, _conversation: &Conversation) -> Result<String, ChatError> {
        todo!()
    }

    /// Whether the answer to this prompt begins inside the model's reasoning.
    pub fn opens_in_reasoning(_prompt: &str) -> bool {
        todo!()
    }
}
