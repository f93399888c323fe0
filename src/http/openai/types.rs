//! Request bodies of OpenAI's APIs: serde types only. Other modules check the values.
//!
//! A field that is `null` counts as absent. Unknown fields are ignored here; see [`crate::http::request::fields`].

use crate::http::request::content_parts::ImagePart;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Fields that chat completions and completions share. They are parsed from the body separately, because errors of serde's
/// `flatten` do not name the field.
#[derive(Debug, Default, Deserialize)]
pub struct CommonFields {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub max_tokens: Option<i64>,
    pub n: Option<i64>,
    pub stop: Option<OneOrMany>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    /// 0 and -1 disable it.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// The name of `repetition_penalty` in llama-server and Ollama.
    pub repeat_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    /// Keys are token ids; JSON keys are strings.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub seed: Option<i64>,
    /// From llama-server: whether to use and fill the prompt cache. Defaults to true.
    pub cache_prompt: Option<bool>,
    /// From vLLM: requests with different salts share no cached state.
    pub cache_salt: Option<String>,
    /// From llama-server: whether a stream reports prompt progress.
    pub return_progress: Option<bool>,
    /// Waiting requests of different users take turns. Any JSON value, since OpenAI's servers ignore it.
    pub user: Option<Value>,
}

/// `POST /v1/chat/completions` without [`CommonFields`]. Requests of other APIs are translated into it.
#[derive(Debug, Default, Deserialize)]
pub struct ChatRequest {
    pub messages: Vec<Value>,
    /// The images of messages that were translated from another API. `None`: the messages are a client's own.
    #[serde(skip)]
    pub images: Option<Vec<ImagePart>>,
    pub max_completion_tokens: Option<i64>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub response_format: Option<ResponseFormat>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// From vLLM: continue the last message instead of starting a new one.
    pub continue_final_message: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    /// Short for `chat_template_kwargs: {"enable_thinking": ...}`, which overrides it.
    pub enable_thinking: Option<bool>,
    /// Deprecated name of `tools`.
    pub functions: Option<Vec<Value>>,
    /// Deprecated name of `tool_choice`.
    pub function_call: Option<Value>,
    pub reasoning_effort: Option<String>,
    pub reasoning: Option<ReasoningFields>,
    pub thinking: Option<ThinkingFields>,
    /// Maximum number of tokens of reasoning. The next two fields are other names of it.
    pub thinking_budget: Option<i64>,
    pub max_thinking_tokens: Option<i64>,
    pub thinking_token_budget: Option<i64>,
    /// From vLLM: alternatives to `response_format`, newest first.
    pub structured_outputs: Option<Value>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<Value>,
    pub guided_choice: Option<Value>,
    pub guided_grammar: Option<Value>,
    /// From llama-server.
    pub json_schema: Option<Value>,
    pub grammar: Option<Value>,
}

/// From OpenRouter, and from OpenAI's Responses.
#[derive(Debug, Deserialize)]
pub struct ReasoningFields {
    pub effort: Option<String>,
    pub max_tokens: Option<i64>,
    pub enabled: Option<bool>,
}

/// From Anthropic.
#[derive(Debug, Deserialize)]
pub struct ThinkingFields {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub budget_tokens: Option<i64>,
}

/// `POST /v1/completions` without [`CommonFields`].
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    pub prompt: CompletionPrompt,
    pub echo: Option<bool>,
    pub logprobs: Option<i64>,
    pub suffix: Option<String>,
    pub best_of: Option<i64>,
}

/// One prompt or several, as text or token ids.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, an array of token ids, or an array of strings and such arrays")]
pub enum CompletionPrompt {
    One(TextOrIds),
    Many(Vec<TextOrIds>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum TextOrIds {
    Text(String),
    Ids(Vec<i64>),
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
    /// From llama-server, with the type `json_object`.
    pub schema: Option<Value>,
    /// Our extension, with the type `regex`.
    pub regex: Option<String>,
    /// Our extension, with the type `lark`.
    pub lark: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct JsonSchema {
    pub schema: Option<Value>,
    pub strict: Option<bool>,
}
