//! Bodies that the server sends: OpenAI's answers and chunks. Serde only. Types that borrow are written once a token.

use crate::{
    chat::Tokenizer,
    http::{layers::request_log::unique_id, models::LoadedModel},
};
use serde::{Serialize, Serializer};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// The reason for which an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
    /// The same where a request said `functions`.
    FunctionCall,
}

impl FinishReason {
    /// The word in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::FunctionCall => "function_call",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptDetails,
    pub completion_tokens_details: CompletionDetails,
    /// Told beside it.
    #[serde(skip)]
    pub timings: Timings,
}

/// Speculation in an answer: drafted tokens, those of them that were right, and the time that it saved (below zero: lost).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    pub saved_seconds: f64,
}

impl Timings {
    pub fn add(&mut self, other: Self) {
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.saved_seconds += other.saved_seconds;
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    pub cached_tokens: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CompletionDetails {
    pub reasoning_tokens: usize,
}

/// An answer or a chunk of one, around `C`, its choice.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: &'a [C],
    /// In a stream: absent unless asked for, and then `null` in every chunk but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Beside `usage`, if anything was drafted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// In a stream, if asked for: how far the prompt is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<Progress>,
}

/// The tokens of a prompt that have been evaluated, in the form that llama-server gives.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Progress {
    pub total: usize,
    /// Of `processed`, those that were known already.
    pub cache: usize,
    pub processed: usize,
    /// Milliseconds since the prompt began to be evaluated.
    pub time_ms: u64,
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: usize,
    pub message: Message,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: FinishReason,
}

#[derive(Debug, Default, Serialize)]
pub struct Message {
    pub role: &'static str,
    /// `null` in an answer that consists of tool calls only.
    pub content: Option<String>,
    pub refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Deprecated: the call, where a request said `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<Function>,
}

#[derive(Debug, Serialize)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: Function,
}

#[derive(Debug, Serialize)]
pub struct Function {
    pub name: String,
    /// JSON in a string, as OpenAI has it.
    pub arguments: String,
}

#[derive(Debug, Serialize)]
pub struct ChatChunk<'a> {
    pub index: usize,
    pub delta: ChatDelta<'a>,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<FinishReason>,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta<'a>; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionDelta<'a>>,
}

/// `id`, `type` and `name` come with the first delta of a call only.
#[derive(Debug, Serialize)]
pub struct ToolCallDelta<'a> {
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionDelta<'a>,
}

#[derive(Debug, Serialize)]
pub struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    pub arguments: &'a str,
}

/// One entry a token of the content.
#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<TokenLogprob>,
    pub refusal: Option<Vec<TokenLogprob>>,
}

#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    #[serde(flatten)]
    pub token: Scored,
    pub top_logprobs: Vec<Scored>,
}

/// A token and its log-probability. `bytes` are exact even where `token`, being text, cannot be.
#[derive(Debug, Serialize)]
pub struct Scored {
    pub token: String,
    #[serde(serialize_with = "finite")]
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Serialize)]
pub struct TextChoice<'a> {
    pub index: usize,
    pub text: &'a str,
    pub logprobs: Option<TextLogprobs>,
    pub finish_reason: Option<FinishReason>,
}

/// The log-probabilities of `/v1/completions`: four arrays of one length.
#[derive(Debug, Default, Serialize)]
pub struct TextLogprobs {
    pub tokens: Vec<String>,
    /// `null` for the first token of an echoed prompt: nothing precedes it.
    #[serde(serialize_with = "finite_or_null")]
    pub token_logprobs: Vec<Option<f32>>,
    /// The likeliest tokens and the token itself.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// The token's offset in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// Tokens and their log-probabilities, likeliest first; an object in JSON. They stay `f32` until they are written, like
/// those of `token_logprobs`: clients compare the two to see whether a token was the likeliest.
#[derive(Debug, Default)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, finite_logprob(*logprob))))
    }
}

/// What all chunks of one answer share. It does not hold the model: a client that reads slowly would keep it in memory.
pub struct ResponseMeta {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub tokenizer: Arc<Tokenizer>,
}

impl ResponseMeta {
    pub fn new(app: &LoadedModel, prefix: &str, object: &'static str) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (id, model) = (format!("{prefix}-{}", unique_id()), app.card.id.clone());
        Self { id, object, created, model, tokenizer: app.tokenizer.clone() }
    }

    pub fn envelope<'a, C>(&'a self, choices: &'a [C], usage: Option<Option<Usage>>) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            system_fingerprint: concat!("moestro-", env!("CARGO_PKG_VERSION")),
            choices,
            usage,
            timings: usage.flatten().map(|usage| usage.timings).filter(|timings| timings.drafted_tokens > 0),
            prompt_progress: None,
        }
    }
}

/// JSON has no infinity, and a client's sum should not meet a `null`: an impossible token gets OpenAI's -9999.
fn finite_logprob(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

fn finite<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(finite_logprob(*logprob))
}

fn finite_or_null<S: Serializer>(logprobs: &[Option<f32>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(logprobs.iter().map(|logprob| logprob.map(finite_logprob)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_tokens_logprob_is_a_number() {
        let infinite = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN].map(finite_logprob);
        assert_eq!((infinite, finite_logprob(-0.5)), ([-9999.0; 3], -0.5));
    }

    #[test]
    fn speculation_in_several_answers_adds_up() {
        let mut sum = Timings::default();
        for saved_seconds in [0.5, -0.25, 1.0] {
            sum.add(Timings { drafted_tokens: 7, accepted_tokens: 3, saved_seconds });
        }
        assert_eq!(sum, Timings { drafted_tokens: 21, accepted_tokens: 9, saved_seconds: 1.25 });
    }
}
