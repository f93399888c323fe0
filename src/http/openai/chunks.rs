//! Response bodies and stream chunks of chat completions and completions. This file has only serde types. Types that
//! are written once per token borrow their contents.

use crate::http::{
    layers::unique_id,
    output::{AnswerTimings, FinishReason, PromptProgress, Usage},
    sse::Frames,
};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};

/// Fields that all chunks of one response share.
pub struct ResponseMeta {
    id: String,
    object: &'static str,
    created: u64,
    /// Empty until the model is known.
    pub model: String,
    /// True if a stream ends with a chunk for the usage.
    includes_usage: bool,
}

impl ResponseMeta {
    /// `prefix` starts the response id.
    pub fn new(prefix: &str, object: &'static str, includes_usage: bool) -> Self {
        Self {
            id: format!("{prefix}-{}", unique_id()),
            object,
            created: unix_seconds(),
            model: String::new(),
            includes_usage,
        }
    }

    /// A chunk of a stream. Its `usage` is null, or absent if the client did not ask for the usage.
    pub fn chunk<'a, C>(&'a self, choices: &'a [C]) -> Envelope<'a, C> {
        self.envelope(choices, self.includes_usage.then_some(None))
    }

    /// A whole body, or the last chunk of a stream, which has the usage.
    pub fn body<'a, C>(&'a self, choices: &'a [C], usage: Usage) -> Envelope<'a, C> {
        self.envelope(choices, Some(Some(usage)))
    }

    /// Writes a chunk without choices that reports prompt progress.
    pub fn write_progress(&self, frames: &Frames, progress: PromptProgress) {
        let envelope = self.envelope::<ChatChunkChoice>(&[], None);
        frames.data(&Envelope { prompt_progress: Some(progress), ..envelope });
    }

    /// Ends a stream, with a chunk for the usage if the client asked for it.
    pub fn write_end(&self, frames: &Frames, usage: Usage) {
        if self.includes_usage {
            frames.data(&self.body::<ChatChunkChoice>(&[], usage));
        }
        frames.done();
    }

    fn envelope<'a, C>(&'a self, choices: &'a [C], usage: Option<Option<Usage>>) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object: self.object,
            created: self.created,
            model: &self.model,
            system_fingerprint: concat!("moestro-", env!("CARGO_PKG_VERSION")),
            choices,
            usage,
            timings: usage.flatten().map(|usage| usage.timings),
            prompt_progress: None,
        }
    }
}

/// Current time in Unix seconds.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A response body or a chunk of a stream. `C` is the type of a choice.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// Present if `usage` is present and not null.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<AnswerTimings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: usize,
    /// `content` is null if the message has only tool calls. `function_call` replaces `tool_calls` if the request used
    /// the deprecated `functions`.
    pub message: Value,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: FinishReason,
}

#[derive(Debug, Serialize)]
pub struct ChatChunkChoice<'a> {
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

/// Only the first delta of a call has `id`, `type` and `name`.
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

/// Log-probabilities of the content, with one entry per content token.
#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ContentToken>,
    pub refusal: Option<Vec<ContentToken>>,
}

#[derive(Debug, Serialize)]
pub struct ContentToken {
    #[serde(flatten)]
    pub token: TokenLogprob,
    pub top_logprobs: Vec<TokenLogprob>,
}

/// `bytes` is exact even if the token is not valid UTF-8 on its own.
#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    pub token: String,
    #[serde(serialize_with = "finite")]
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Serialize)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<FinishReason>,
}

/// Four arrays of the same length.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// Null for the first token of an echoed prompt, which has no predecessor.
    #[serde(serialize_with = "finite_or_null")]
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens, and the token itself.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Offset of the token in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// Tokens and their log-probabilities, most likely first. Serialized as a JSON object.
///
/// The values stay `f32` until they are written, like `token_logprobs`. Clients compare values of both for equality to
/// see whether a token was the most likely token.
#[derive(Debug, Default)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, finite_logprob(*logprob))))
    }
}

/// JSON has no infinity, and clients sum these values. An impossible token gets -9999, as in OpenAI's API.
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
    fn infinite_logprobs_become_numbers() {
        let infinite = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN].map(finite_logprob);
        assert_eq!((infinite, finite_logprob(-0.5)), ([-9999.0; 3], -0.5));
    }
}
