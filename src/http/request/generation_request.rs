//! [`GenerationRequest`]: the request of a client, in the same type for every API.

use crate::http::{
    ApiError,
    openai::{CommonFields, CompletionPrompt},
    request::{
        EndMarker, ImagePart, RequestedFormat,
        messages::normalize,
        tools::{self, ToolPath},
    },
};
use moestro_chat::Message;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A checked request. The sampling parameters, the context length and the grammar depend on the model, so they are
/// checked in [`GenerationRequest::prepare`].
#[derive(Debug)]
pub struct GenerationRequest {
    pub prompt: PromptInput,
    pub common: CommonFields,
    /// Number of choices per prompt.
    pub n: usize,
    /// Maximum number of tokens of the answer. `None` means up to the end of the context.
    pub max_tokens: Option<usize>,
    pub stops: Vec<String>,
    /// Number of alternatives to list with each token.
    pub logprobs: Option<usize>,
    /// True if the prompt is part of the answer.
    pub echo: bool,
    pub format: Option<RequestedFormat>,
    /// Maximum number of tokens of reasoning.
    pub thinking_budget: Option<usize>,
    pub parallel_tool_calls: bool,
}

#[derive(Debug)]
pub enum PromptInput {
    Chat(ChatPrompt),
    Text(CompletionPrompt),
}

/// A conversation that is ready for the chat template.
#[derive(Debug, Clone)]
pub struct ChatPrompt {
    pub messages: Vec<Message<ImagePart>>,
    /// Checked tools. Messages may define deferred tools.
    pub tools: Vec<Value>,
    /// True if `tool_choice` is `none`: the prompt has the tools, but the model may not call tools.
    pub forbids_calls: bool,
    /// Tools of an earlier request. The prompt has them, with calls forbidden, if it fits into the context with them.
    pub reused_tools: Option<Arc<[Value]>>,
    /// Other variables of the template.
    pub kwargs: Map<String, Value>,
    /// Value of `enable_thinking` if neither the request nor the server sets it. If this is `None`, the template
    /// decides.
    pub default_thinking: Option<bool>,
    /// True if the prompt ends with the start of a new assistant message.
    pub add_generation_prompt: bool,
    /// Marker at the end of the last message, if the answer continues that message.
    pub end_marker: Option<EndMarker>,
    /// Name of the field with the messages, for errors.
    pub param: &'static str,
}

impl GenerationRequest {
    /// A request with the defaults of all fields that not every API has.
    pub fn new(common: CommonFields, stops: Vec<String>, prompt: PromptInput) -> Self {
        Self {
            prompt,
            common,
            n: 1,
            max_tokens: None,
            stops,
            logprobs: None,
            echo: false,
            format: None,
            thinking_budget: None,
            parallel_tool_calls: true,
        }
    }

    pub fn model(&self) -> Option<&str> {
        self.common.model.as_deref()
    }

    pub fn streams(&self) -> bool {
        self.common.streams()
    }
}

impl ChatPrompt {
    /// Creates the conversation of translated messages and tools. If `continues` is true, the answer continues the last
    /// message. `tool_path` names fields of tools in errors.
    pub fn new(
        messages: Vec<Message<ImagePart>>,
        continues: bool,
        tools: Vec<Value>,
        tool_path: ToolPath,
    ) -> Result<Self, ApiError> {
        let mut messages = normalize(messages);
        let tools = tools::checked(tools, tool_path, &messages.iter().flat_map(Message::tools).collect())?;
        Ok(Self {
            end_marker: if continues { Some(EndMarker::insert(&mut messages)?) } else { None },
            messages,
            tools,
            forbids_calls: false,
            reused_tools: None,
            kwargs: Map::new(),
            default_thinking: None,
            add_generation_prompt: !continues,
            param: "messages",
        })
    }

    /// Sets `enable_thinking`, unless the request has set it.
    pub fn set_thinking(&mut self, thinking: Option<bool>) {
        if let Some(thinking) = thinking {
            self.kwargs.entry("enable_thinking").or_insert(thinking.into());
        }
    }
}
