//! OpenAI's APIs: chat completions, completions, responses, and the list of models.

pub mod chat;
pub mod chunks;
pub mod completions;
pub mod models;
pub mod responses;
pub mod types;

use chunks::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, CompletionChoice, ContentToken, FunctionDelta, ResponseMeta,
    TokenLogprob, ToolCallDelta, unix_seconds,
};
pub use chunks::{CompletionLogprobs, TopLogprobs};
pub use types::{
    ChatRequest, CommonFields, CompletionPrompt, CompletionRequest, JsonSchema, OneOrMany, ResponseFormat, TextOrIds,
};
