//! Answers in Ollama's format: one JSON object, or one line per piece of text and a last line with counts and times.

use crate::http::{
    ApiError,
    models::LoadedModel,
    output::{self, AnswerCall, AnswerText, Choices, FinishReason, Finished, Output, Renderer, Usage},
    sse::{Frames, StreamFormat},
};
use axum::response::Response;
use moestro_chat::{ToolCall, parser::Delta};
use serde_json::{Value, json};
use std::time::Instant;

pub struct OllamaRenderer {
    /// The requested name, which clients expect in the answer.
    model: String,
    /// True for `/api/chat`, where text comes in a message.
    is_chat: bool,
    arrived: Instant,
    /// Time at which the model was ready.
    loaded: Option<Instant>,
    /// The call that is being received. Ollama sends whole calls.
    call: Option<AnswerCall>,
}

impl OllamaRenderer {
    pub fn chat(model: String) -> Self {
        Self { model, is_chat: true, arrived: Instant::now(), loaded: None, call: None }
    }

    pub fn generate(model: String) -> Self {
        Self { is_chat: false, ..Self::chat(model) }
    }

    /// One object of the answer, with new text, reasoning and calls.
    fn object(&self, content: &str, thinking: &str, calls: Vec<Value>, is_done: bool) -> Value {
        let mut object = json!({"model": self.model, "created_at": jiff::Timestamp::now().to_string()});
        if self.is_chat {
            let mut message = json!({"role": "assistant", "content": content});
            if !thinking.is_empty() {
                message["thinking"] = thinking.into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            object["message"] = message;
        } else {
            object["response"] = content.into();
            if !thinking.is_empty() {
                object["thinking"] = thinking.into();
            }
        }
        object["done"] = is_done.into();
        object
    }

    fn write(&self, frames: &Frames, content: &str, thinking: &str, calls: Vec<Value>) {
        frames.data(&self.object(content, thinking, calls, false));
    }

    /// Writes the received call. Called after the last argument of the call.
    fn write_call(&mut self, frames: &Frames) {
        if let Some(call) = self.call.take() {
            self.write(frames, "", "", vec![call_object(call)]);
        }
    }

    /// Adds the finish reason, counts, and times in nanoseconds.
    fn finished(&self, mut object: Value, finished: &Finished) -> Value {
        let nanoseconds = |ms: f64| (ms * 1e6) as u64;
        let usage = &finished.usage;
        let timings = &finished.usage.timings;
        let load = self.loaded.map_or(0, |loaded| (loaded - self.arrived).as_nanos() as u64);
        let fields = json!({
            "done_reason": if finished.reason == FinishReason::Length { "length" } else { "stop" },
            "total_duration": self.arrived.elapsed().as_nanos() as u64,
            "load_duration": load,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prompt_ms),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timings.predicted_ms),
        });
        if let (Value::Object(object), Value::Object(fields)) = (&mut object, fields) {
            object.extend(fields);
        }
        object
    }
}

impl Renderer for OllamaRenderer {
    const STREAM: StreamFormat = StreamFormat::Lines;

    fn refuse(&mut self, frames: &Frames, error: &ApiError) {
        frames.data(&json!({"error": error.message()}));
    }

    fn prepare(&mut self, _: &LoadedModel, _: &Choices) {
        self.loaded = Some(Instant::now());
    }

    fn idle(&mut self, frames: &Frames) {
        self.write(frames, "", "", Vec::new());
    }

    fn output(&mut self, frames: &Frames, _choice: usize, output: &Output) {
        for delta in &output.deltas {
            if let (Delta::Arguments { json, .. }, Some(call)) = (delta, &mut self.call) {
                call.arguments += json;
                continue;
            }
            self.write_call(frames);
            match delta {
                Delta::Reasoning(text) => self.write(frames, "", text, Vec::new()),
                Delta::Content(text) => self.write(frames, text, "", Vec::new()),
                Delta::ToolCall { id, name, .. } => {
                    self.call = Some(AnswerCall { id: id.clone(), name: name.clone(), arguments: String::new() });
                }
                Delta::Arguments { .. } => {}
            }
        }
    }

    fn finish(&mut self, frames: &Frames, _choice: usize, finished: &Finished) {
        self.write_call(frames);
        frames.data(&self.finished(self.object("", "", Vec::new(), true), finished));
    }

    fn body(self, answers: Vec<(Output, Finished)>, _: Usage) -> Response {
        // A request has one answer.
        let body = answers.into_iter().next().map(|(output, finished)| {
            let AnswerText { reasoning, content, calls } = AnswerText::new(output.deltas);
            let calls = calls.into_iter().map(call_object).collect();
            self.finished(self.object(&content, &reasoning, calls, true), &finished)
        });
        output::json(&body)
    }
}

/// A whole call as Ollama writes it.
fn call_object(AnswerCall { name, arguments, .. }: AnswerCall) -> Value {
    json!({"function": {"name": name, "arguments": ToolCall::read_arguments(&arguments)}})
}

/// The answer to a request without a prompt, which only loads or unloads the model.
pub fn loaded(renderer: OllamaRenderer, unloads: bool) -> Response {
    let mut body = renderer.object("", "", Vec::new(), true);
    body["done_reason"] = if unloads { "unload" } else { "load" }.into();
    output::json(&body)
}
