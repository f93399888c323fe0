//! Request bodies of OpenAI's APIs: serde types only. Other modules check the values.
//!
//! A field that is `null` counts as absent. Unknown fields are ignored here, and handled in
//! [`crate::http::request::fields`].

use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Fields of both chat completions and completions. These fields are parsed separately from the other fields of a body,
/// because errors of serde's `flatten` do not name the field.
#[derive(Debug, Default, Deserialize)]
pub struct CommonFields {
    /// Start of the paths of the sampling parameters in the request, for errors.
    #[serde(skip)]
    pub parent: &'static str,
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub max_tokens: Option<i64>,
    pub n: Option<i64>,
    pub stop: Option<OneOrMany>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    /// Limit of top-k sampling. 0 and -1 mean no limit.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// Name of `repetition_penalty` in llama-server and Ollama.
    pub repeat_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    /// Biases by token id. Token ids are strings here, because JSON keys are strings.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub seed: Option<i64>,
    /// True (the default) to read and fill the prompt cache. A field of llama-server.
    pub cache_prompt: Option<bool>,
    /// Field of vLLM: requests with different salts share no cached state.
    pub cache_salt: Option<String>,
    /// True if a stream reports prompt progress. A field of llama-server.
    pub return_progress: Option<bool>,
    /// Name of a user. Waiting requests of different users take turns. Any JSON value is accepted, because OpenAI's
    /// servers ignore this field.
    pub user: Option<Value>,
}

/// `POST /v1/chat/completions` without [`CommonFields`].
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
    /// True to continue the last message instead of starting a new message. A field of vLLM.
    pub continue_final_message: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    /// Short form of `chat_template_kwargs: {"enable_thinking": ...}`. If both are set, `chat_template_kwargs` wins.
    pub enable_thinking: Option<bool>,
    /// Deprecated name of `tools`.
    pub functions: Option<Vec<Value>>,
    /// Deprecated name of `tool_choice`.
    pub function_call: Option<Value>,
    pub reasoning_effort: Option<String>,
    pub reasoning: Option<ReasoningFields>,
    pub thinking: Option<ThinkingFields>,
    /// Maximum number of tokens of reasoning.
    pub thinking_budget: Option<i64>,
    /// Another name of `thinking_budget`.
    pub max_thinking_tokens: Option<i64>,
    /// Another name of `thinking_budget`.
    pub thinking_token_budget: Option<i64>,
    /// vLLM's alternative to `response_format`.
    pub structured_outputs: Option<Value>,
    /// vLLM's older field for a JSON schema of the answer.
    pub guided_json: Option<Value>,
    /// vLLM's older field for a regular expression of the answer.
    pub guided_regex: Option<Value>,
    /// vLLM's older field for a list of possible answers.
    pub guided_choice: Option<Value>,
    /// SGLang's field for a regular expression of the answer.
    pub regex: Option<Value>,
    /// llama-server's field for a JSON schema of the answer.
    pub json_schema: Option<Value>,
}

/// `reasoning` in the APIs of OpenRouter and in OpenAI's Responses.
#[derive(Debug, Deserialize)]
pub struct ReasoningFields {
    pub effort: Option<String>,
    pub max_tokens: Option<i64>,
    pub enabled: Option<bool>,
}

/// `thinking` in Anthropic's API.
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

/// The prompt, or several prompts, each as text or as token ids.
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
    /// JSON schema for the type `json_object`. A field of llama-server.
    pub schema: Option<Value>,
    /// Regular expression for the type `regex`, which is an extension of this server.
    pub regex: Option<String>,
    /// Lark grammar for the type `lark`, which is an extension of this server.
    pub lark: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct JsonSchema {
    pub schema: Option<Value>,
    pub strict: Option<bool>,
}
