//! Anthropic's answer: content blocks, as one body or as a stream of events.

use crate::chat::{json_numbers, parser::Delta};
use crate::http::{
    errors::ApiError,
    openai::chunks::{FinishReason, Usage},
    output::{
        generation::{Ending, Transcript, Turn},
        parts::{Part, Parts, Wire},
    },
    sse::Frames,
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::mem;

/// Thinking blocks carry one, and clients send it back. This server has no use for it.
const SIGNATURE: &str = "moestro";

/// An answer being written.
pub struct Answer {
    id: String,
    model: String,
    /// The block that is open, and the index of it or of the next one.
    open: Option<Block>,
    index: usize,
    /// Text that came inside or after a call, which this format has no place for until the call is over.
    held: String,
    /// A stream says how far the prompt is.
    progress: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

impl Answer {
    pub fn new(id: String, model: String, progress: bool) -> Self {
        Self { id, model, open: None, index: 0, held: String::new(), progress }
    }

    /// One body.
    pub async fn whole(self, mut transcript: Transcript) -> Result<Response, ApiError> {
        let mut parts = Parts::default();
        let ending = transcript.tell(|turn| parts.add(&turn.deltas)).await?;
        let content: Vec<Value> = parts.0.into_iter().map(block).collect();
        let (stop_reason, stop_sequence) = stopped(&ending);
        let body = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage(&ending.usage),
        });
        Ok(Json(body).into_response())
    }

    /// Opens a block of this kind, unless it is open.
    fn open(&mut self, out: &Frames, kind: Block, start: impl FnOnce() -> Value) {
        if self.open == Some(kind) && kind != Block::ToolUse {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let event = json!({"type": "content_block_start", "index": self.index, "content_block": start()});
        out.event("content_block_start", &event);
    }

    fn text(&mut self, out: &Frames, text: &str) {
        self.open(out, Block::Text, || json!({"type": "text", "text": ""}));
        self.delta(out, json!({"type": "text_delta", "text": text}));
    }

    fn delta(&self, out: &Frames, delta: Value) {
        let event = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        out.event("content_block_delta", &event);
    }

    fn close(&mut self, out: &Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Block::Thinking {
            self.delta(out, json!({"type": "signature_delta", "signature": SIGNATURE}));
        }
        out.event("content_block_stop", &json!({"type": "content_block_stop", "index": self.index}));
        self.index += 1;
        if !self.held.is_empty() {
            let text = mem::take(&mut self.held);
            self.text(out, &text);
            self.close(out);
        }
    }
}

impl Wire for Answer {
    fn begin(&mut self, out: &Frames, used: Usage) {
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(&used),
        });
        out.event("message_start", &json!({"type": "message_start", "message": message}));
        out.event("ping", &json!({"type": "ping"}));
    }

    fn turn(&mut self, out: &Frames, turn: &Turn) {
        if let Some(progress) = turn.progress.filter(|_| self.progress) {
            // Clients take a ping at any time.
            out.event("ping", &json!({"type": "ping", "prompt_progress": progress}));
        }
        for delta in &turn.deltas {
            match delta {
                Delta::Reasoning(text) => {
                    let start = || json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(out, Block::Thinking, start);
                    self.delta(out, json!({"type": "thinking_delta", "thinking": text}));
                }
                Delta::Content(text) if self.open == Some(Block::ToolUse) => self.held += text,
                Delta::Content(text) => self.text(out, text),
                Delta::ToolCall { id, name, .. } => {
                    let start = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(out, Block::ToolUse, start);
                }
                Delta::Arguments { json, .. } => {
                    self.delta(out, json!({"type": "input_json_delta", "partial_json": json}));
                }
            }
        }
    }

    fn end(&mut self, out: &Frames, ending: &Ending) {
        self.close(out);
        let (stop_reason, stop_sequence) = stopped(ending);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let event = json!({"type": "message_delta", "delta": delta, "usage": usage(&ending.usage)});
        out.event("message_delta", &event);
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn error(&mut self, out: &Frames, failure: &ApiError) {
        out.event("error", &error(failure));
    }
}

fn block(part: Part) -> Value {
    match part {
        Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": SIGNATURE}),
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Call { id, name, arguments } => {
            // Anthropic's own way to say that a call was cut off: its text under this name.
            let input = serde_json::from_str(&json_numbers::quote_huge(&arguments))
                .unwrap_or_else(|_| json!({"INVALID_JSON": arguments}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

fn stopped(ending: &Ending) -> (&'static str, Option<&str>) {
    match (ending.reason, &ending.stop) {
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::ToolCalls | FinishReason::FunctionCall, _) => ("tool_use", None),
        (FinishReason::Stop, Some(stop)) => ("stop_sequence", Some(stop)),
        (FinishReason::Stop, None) => ("end_turn", None),
    }
}

/// `input_tokens` does not count what came from a cache.
fn usage(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.cached_tokens;
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    })
}

/// Anthropic's error object.
pub fn error(error: &ApiError) -> Value {
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
    json!({"type": "error", "error": {"type": kind, "message": error.message()}})
}
