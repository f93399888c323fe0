//! Answers in Anthropic's format: content blocks, as one body or as a stream of events.

use crate::http::{
    ApiError,
    layers::unique_id,
    models::LoadedModel,
    output::{self, Choices, FinishReason, Finished, Output, PromptProgress, Renderer, Usage},
    sse::Frames,
};
use axum::response::Response;
use base64::{Engine, prelude::BASE64_STANDARD};
use moestro_chat::{ToolCall, parser::Delta};
use serde_json::{Value, json};
use std::mem;

/// Signature of a thinking block. The API requires a signature, and clients send it back. This server does not check
/// signatures.
const SIGNATURE: &str = "moestro";

/// Field of the conversations that Anthropic's servers store.
const THREAD: &str = "thread";

pub struct MessagesRenderer {
    id: String,
    /// Name of the requested model. The id of the loaded model replaces the name once the model is known.
    model: String,
    /// True if the answer starts with reasoning.
    in_reasoning: bool,
    /// Kind of the block that is being streamed. `None` if no block is open.
    open: Option<BlockKind>,
    /// Index of the open block, or of the next block if no block is open.
    index: usize,
    /// Text that came while a tool call's block was open. The text gets a block after the call's block.
    pending: String,
    /// Text of the open thinking block, if the request omits the text of thinking. The block's signature then has the
    /// text, so that the client sends it back.
    omitted: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    ToolUse,
}

impl MessagesRenderer {
    pub fn new(model: String, in_reasoning: bool, omits_thinking: bool) -> Self {
        Self {
            id: format!("msg_{}", unique_id()),
            model,
            in_reasoning,
            open: None,
            index: 0,
            pending: String::new(),
            omitted: omits_thinking.then(String::new),
        }
    }

    fn message(&self, content: &[Value], finished: Option<&Finished>, usage: &Usage) -> Value {
        let (stop_reason, stop_sequence) = finished.map(stop_reason).unzip();
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence.flatten(),
            "usage": usage_object(usage),
        })
    }

    /// Opens a block of this kind if no such block is open. Every call gets a new block.
    fn open(&mut self, frames: &Frames, kind: BlockKind, block: impl FnOnce() -> Value) {
        if self.open == Some(kind) && kind != BlockKind::ToolUse {
            return;
        }
        self.close(frames);
        self.open = Some(kind);
        let event = json!({"type": "content_block_start", "index": self.index, "content_block": block()});
        frames.event("content_block_start", &event);
    }

    fn thinking(&mut self, frames: &Frames, text: &str) {
        self.open(frames, BlockKind::Thinking, || json!({"type": "thinking", "thinking": "", "signature": ""}));
        match &mut self.omitted {
            Some(omitted) if !text.is_empty() => omitted.push_str(text),
            _ => self.delta(frames, json!({"type": "thinking_delta", "thinking": text})),
        }
    }

    fn text(&mut self, frames: &Frames, text: &str) {
        self.open(frames, BlockKind::Text, || json!({"type": "text", "text": ""}));
        self.delta(frames, json!({"type": "text_delta", "text": text}));
    }

    fn delta(&self, frames: &Frames, delta: Value) {
        let event = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        frames.event("content_block_delta", &event);
    }

    fn close(&mut self, frames: &Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == BlockKind::Thinking {
            let omitted = self.omitted.as_mut().map(mem::take);
            self.delta(frames, json!({"type": "signature_delta", "signature": signature(omitted.as_deref())}));
        }
        frames.event("content_block_stop", &json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
        if !self.pending.is_empty() {
            let text = mem::take(&mut self.pending);
            self.text(frames, &text);
            self.close(frames);
        }
    }
}

impl Renderer for MessagesRenderer {
    fn keeps_output(&self) -> bool {
        self.omitted.is_some()
    }

    fn refuse(&mut self, frames: &Frames, error: &ApiError) {
        frames.event("error", &error_object(error));
    }

    fn prepare(&mut self, model: &LoadedModel, choices: &Choices) {
        self.model.clone_from(&model.card.id);
        self.in_reasoning = choices.chat.as_ref().is_some_and(|chat| chat.in_reasoning);
    }

    fn start(&mut self, frames: &Frames, usage: Usage) {
        let message = self.message(&[], None, &usage);
        frames.event("message_start", &json!({"type": "message_start", "message": message}));
        frames.event("ping", &json!({"type": "ping"}));
    }

    /// Sends an empty delta, because Claude Code does not count pings as events. If no block is open, opens a block
    /// first.
    fn idle(&mut self, frames: &Frames) {
        match self.open {
            Some(BlockKind::ToolUse) => self.delta(frames, json!({"type": "input_json_delta", "partial_json": ""})),
            Some(BlockKind::Thinking) => self.thinking(frames, ""),
            Some(BlockKind::Text) => self.text(frames, ""),
            None if self.in_reasoning => self.thinking(frames, ""),
            None => self.text(frames, ""),
        }
    }

    /// Reports progress in a ping event, which clients accept at any time.
    fn progress(&mut self, frames: &Frames, progress: PromptProgress) {
        frames.event("ping", &json!({"type": "ping", "prompt_progress": progress}));
    }

    fn output(&mut self, frames: &Frames, _choice: usize, output: &Output) {
        for delta in &output.deltas {
            match delta {
                Delta::Reasoning(text) => self.thinking(frames, text),
                Delta::Content(text) if self.open == Some(BlockKind::ToolUse) => self.pending += text,
                Delta::Content(text) => self.text(frames, text),
                Delta::ToolCall { id, name, .. } => {
                    let block = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(frames, BlockKind::ToolUse, block);
                }
                Delta::Arguments { json, .. } => {
                    self.delta(frames, json!({"type": "input_json_delta", "partial_json": json}));
                }
            }
        }
    }

    fn finish(&mut self, frames: &Frames, _choice: usize, finished: &Finished) {
        self.close(frames);
        let (stop_reason, stop_sequence) = stop_reason(finished);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let event = json!({"type": "message_delta", "delta": delta, "usage": usage_object(&finished.usage)});
        frames.event("message_delta", &event);
        frames.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn body(self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response {
        let (deltas, finished): (Vec<_>, Vec<_>) =
            answers.into_iter().map(|(output, finished)| (output.deltas, finished)).unzip();
        let content = blocks(deltas.into_iter().flatten(), self.omitted.is_some());
        output::json(&self.message(&content, finished.first(), &usage))
    }
}

/// Signature of a thinking block. The signature of a block without its text has the text.
fn signature(omitted: Option<&str>) -> String {
    omitted.map_or(SIGNATURE.to_owned(), |text| format!("{SIGNATURE}:{}", BASE64_STANDARD.encode(text)))
}

/// The text of a thinking block that was sent without its text. Empty if the signature is not this server's.
pub fn omitted_thinking(signature: &Value) -> String {
    let encoded = signature.as_str().and_then(|text| text.strip_prefix(SIGNATURE)?.strip_prefix(':'));
    let decoded = encoded.and_then(|encoded| BASE64_STANDARD.decode(encoded).ok());
    decoded.and_then(|text| String::from_utf8(text).ok()).unwrap_or_default()
}

/// The content blocks of a whole answer.
fn blocks(deltas: impl IntoIterator<Item = Delta>, omits_thinking: bool) -> Vec<Value> {
    let mut blocks = Vec::<Value>::new();
    let mut calls = Vec::<(usize, String)>::new();
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) if omits_thinking => {
                blocks.push(json!({"type": "thinking", "thinking": "", "signature": signature(Some(&text))}));
            }
            Delta::Reasoning(text) => {
                blocks.push(json!({"type": "thinking", "thinking": text, "signature": signature(None)}));
            }
            // Text that came inside a call and the text after the call form one block.
            Delta::Content(text) => match blocks.last_mut().and_then(|block| block.get_mut("text")) {
                Some(Value::String(before)) => before.push_str(&text),
                _ => blocks.push(json!({"type": "text", "text": text})),
            },
            Delta::ToolCall { id, name, .. } => {
                calls.push((blocks.len(), String::new()));
                blocks.push(json!({"type": "tool_use", "id": id, "name": name, "input": {}}));
            }
            Delta::Arguments { json, .. } => {
                if let Some((_, arguments)) = calls.last_mut() {
                    arguments.push_str(&json);
                }
            }
        }
    }
    for (block, arguments) in calls {
        blocks[block]["input"] = ToolCall::read_arguments(&arguments);
    }
    blocks
}

fn stop_reason(finished: &Finished) -> (&'static str, Option<&str>) {
    match (finished.reason, &finished.stop) {
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::ToolCalls | FinishReason::FunctionCall, _) => ("tool_use", None),
        (FinishReason::Stop, Some(stop)) => ("stop_sequence", Some(stop)),
        (FinishReason::Stop, None) => ("end_turn", None),
    }
}

/// `input_tokens` excludes the tokens from the prompt cache.
fn usage_object(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.cached_tokens;
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
        "service_tier": "standard",
    })
}

/// Anthropic's error object.
pub fn error_object(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let mut body = json!({"type": "error", "error": {"type": kind, "message": error.message()}});
    if error.param() == Some(THREAD) {
        // The tool runners of Anthropic's SDKs then send the whole conversation, without this field.
        body["error"]["details"] = json!({"error_code": "thread_unsupported_request", "unsupported": [THREAD]});
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_engine::error::EngineError;

    #[test]
    fn each_status_has_its_error_type() {
        for (error, kind) in [
            (ApiError::unauthorized(), "authentication_error"),
            (ApiError::wrong_host("evil"), "permission_error"),
            (ApiError::no_such_model("a", "b"), "not_found_error"),
            (ApiError::too_large(5), "request_too_large"),
            (ApiError::memory_in_use(), "overloaded_error"),
            (EngineError::TimedOut.into(), "timeout_error"),
            (ApiError::failed("x"), "api_error"),
            (ApiError::invalid("x", "y"), "invalid_request_error"),
        ] {
            assert_eq!(error_object(&error)["error"]["type"], kind);
        }
    }

    #[test]
    fn deltas_become_blocks_in_order() {
        let arguments = |json: &str| Delta::Arguments { index: 0, json: json.into() };
        let deltas = [
            Delta::Reasoning("ab".into()),
            Delta::Content("cd".into()),
            Delta::ToolCall { index: 0, id: "1".into(), name: "f".into() },
            arguments("{\"x\":"),
            Delta::Content("stray".into()),
            arguments("1}"),
        ];
        let expected = [
            json!({"type": "thinking", "thinking": "ab", "signature": SIGNATURE}),
            json!({"type": "text", "text": "cd"}),
            json!({"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}),
            json!({"type": "text", "text": "stray"}),
        ];
        assert_eq!(blocks(deltas, false), expected);
    }

    #[test]
    fn omitted_thinking_is_in_the_signature() {
        let found = blocks([Delta::Reasoning("hm é".into()), Delta::Content("a".into())], true);
        assert_eq!((&found[0]["thinking"], &found[1]["text"]), (&json!(""), &json!("a")));
        assert_eq!(omitted_thinking(&found[0]["signature"]), "hm é");
        for other in [json!(SIGNATURE), json!("moestro:*"), json!("EqQB"), json!(5), Value::Null] {
            assert_eq!(omitted_thinking(&other), "", "{other}");
        }
    }
}
