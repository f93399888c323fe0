//! Bodies that clients send: OpenAI's requests, and vLLM's for the tokenizer. Serde only; `check.rs` knows what is
//! allowed.
//!
//! A field that is `null` counts as absent, a field that nobody knows is ignored. Bodies that the server sends are in
//! `answers.rs`.

use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The common fields of `/v1/chat/completions` and `/v1/completions`. They are read from the body on their own, because
/// serde's `flatten` would lose the path that names a wrong field.
#[derive(Debug, Default, Deserialize)]
pub struct Common {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub max_tokens: Option<i64>,
    pub n: Option<i64>,
    pub stop: Option<OneOrMany>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    /// 0 and -1 are off.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// llama-server's and Ollama's name for `repetition_penalty`.
    pub repeat_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    /// Token id (JSON keys are strings) to bias.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub seed: Option<i64>,
    /// llama-server's: whether to go on from what earlier prompts left, and to leave something. True unless said.
    pub cache_prompt: Option<bool>,
    /// llama-server's: whether a stream says how far the prompt is.
    pub return_progress: Option<bool>,
}

/// `POST /v1/chat/completions`, without [`Common`]; also what other formats' conversations are translated into.
#[derive(Debug, Default, Deserialize)]
pub struct ChatRequest {
    pub messages: Vec<Value>,
    pub max_completion_tokens: Option<i64>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub response_format: Option<ResponseFormat>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// vLLM's: go on from the last message instead of beginning one.
    pub continue_final_message: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    /// Short for `chat_template_kwargs: {"enable_thinking": ...}`, which wins if both are given.
    pub enable_thinking: Option<bool>,
    /// The deprecated forms of `tools` and `tool_choice`.
    pub functions: Option<Vec<Value>>,
    pub function_call: Option<Value>,
    pub reasoning_effort: Option<String>,
    pub reasoning: Option<Reasoning>,
    pub thinking: Option<Thinking>,
    /// Tokens that reasoning may take; so are the next two.
    pub thinking_budget: Option<i64>,
    pub max_thinking_tokens: Option<i64>,
    pub thinking_token_budget: Option<i64>,
    /// vLLM's names for what `response_format` says, newer and older.
    pub structured_outputs: Option<Value>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<Value>,
    pub guided_choice: Option<Value>,
    pub guided_grammar: Option<Value>,
    /// llama-server's.
    pub json_schema: Option<Value>,
    pub grammar: Option<Value>,
}

/// OpenRouter's, and OpenAI's in Responses.
#[derive(Debug, Deserialize)]
pub struct Reasoning {
    pub effort: Option<String>,
    pub max_tokens: Option<i64>,
    pub enabled: Option<bool>,
}

/// Anthropic's.
#[derive(Debug, Deserialize)]
pub struct Thinking {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub budget_tokens: Option<i64>,
}

/// `POST /v1/completions`, without [`Common`].
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    pub prompt: Prompt,
    pub echo: Option<bool>,
    pub logprobs: Option<i64>,
    pub suffix: Option<String>,
    pub best_of: Option<i64>,
}

/// One prompt or several, as text or as token ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids or an array of such arrays"
)]
pub enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<i64>),
    Batch(Vec<Vec<i64>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub json_schema: Option<JsonSchema>,
    /// With `json_object`, as llama-server has it.
    pub schema: Option<Value>,
    /// With the types of these names, which are extensions.
    pub regex: Option<String>,
    pub lark: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct JsonSchema {
    pub schema: Option<Value>,
    pub strict: Option<bool>,
}
