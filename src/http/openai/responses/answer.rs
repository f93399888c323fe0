//! The answer of the Responses API: items, as one body or as a stream of events. A body is what the stream ends with.

use crate::chat::parser::Delta;
use crate::http::{
    LoadedModel, ServerState,
    errors::ApiError,
    layers::request_log::unique_id,
    openai::{
        chunks::{FinishReason, Usage},
        responses::{request::ResponsesRequest, store::size},
    },
    output::{
        generation::{Ending, Transcript, Turn},
        parts::Wire,
    },
    sse::Frames,
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    mem,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Before reasoning in `encrypted_content`.
pub const KEPT: &str = "moestro:";

/// An answer being written.
pub struct Answer {
    state: Arc<ServerState>,
    /// The response so far: its items are those that are complete.
    response: Value,
    output: Vec<Value>,
    /// The item that is being written.
    open: Option<Item>,
    /// Text that came inside or after a call: its item waits until the call is over.
    held: String,
    /// The number of the next event.
    sequence: u64,
    /// Reasoning is told as its summary.
    summary: bool,
    /// Reasoning is given to the client to keep.
    encrypted: bool,
    /// A stream says how far the prompt is.
    progress: bool,
    /// Functions that are in a namespace, which their calls name.
    namespaces: BTreeMap<String, String>,
    /// The input, if the response is to be kept.
    keep: Option<Vec<Value>>,
}

struct Item {
    id: String,
    kind: Kind,
    /// Reasoning, text or arguments.
    text: String,
}

#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, name: String, namespace: Option<String> },
}

impl Answer {
    pub fn new(
        id: String,
        app: &LoadedModel,
        request: &ResponsesRequest,
        state: Arc<ServerState>,
        input: Vec<Value>,
    ) -> Self {
        let keeps = request.store.unwrap_or(true);
        let reasoning = request.reasoning.as_ref();
        let summary = reasoning.and_then(|reasoning| reasoning.summary.as_deref());
        let format = request.text.as_ref().and_then(|text| text.format.clone());
        let response = json!({
            "id": id,
            "object": "response",
            "created_at": now(),
            "status": "in_progress",
            "background": false,
            "completed_at": null,
            "error": null,
            "incomplete_details": null,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": null,
            "model": app.card.id,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.and_then(|reasoning| reasoning.effort.as_deref()), "summary": summary},
            "service_tier": "default",
            "store": keeps,
            "temperature": request.temperature.unwrap_or(f64::from(app.defaults.temperature)),
            "text": {"format": format.unwrap_or_else(|| json!({"type": "text"})), "verbosity": "medium"},
            "tool_choice": request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": request.tools.clone().unwrap_or_default(),
            "top_logprobs": 0,
            "top_p": request.top_p.unwrap_or(f64::from(app.defaults.top_p)),
            "truncation": "disabled",
            "usage": null,
            "user": request.user,
            "metadata": request.metadata.clone().unwrap_or_default(),
        });
        Self {
            state,
            response,
            output: Vec::new(),
            open: None,
            held: String::new(),
            sequence: 0,
            summary: summary.is_some(),
            encrypted: request.wants_reasoning_back(),
            progress: request.return_progress.unwrap_or(false),
            namespaces: request.namespaces(),
            keep: keeps.then_some(input),
        }
    }

    /// Memory that the answer takes beside what the model says: what it tells again of the request, in memory and as text twice
    /// at a time, and the input that is to be kept.
    pub fn bytes(&self) -> usize {
        3 * size(&self.response) + self.keep.iter().flatten().map(size).sum::<usize>()
    }

    /// One body.
    pub async fn whole(mut self, mut transcript: Transcript) -> Result<Response, ApiError> {
        let ending = transcript.tell(|turn| self.read(None, &turn)).await?;
        self.finish(None, &ending);
        Ok(Json(self.response).into_response())
    }

    fn read(&mut self, out: Option<&Frames>, turn: &Turn) {
        for delta in &turn.deltas {
            match delta {
                Delta::Reasoning(text) => {
                    self.begin_item(out, Kind::Reasoning);
                    self.delta(out, text);
                }
                Delta::Content(text) if self.calling() => self.held += text,
                Delta::Content(text) => self.message(out, text),
                Delta::ToolCall { id, name, .. } => {
                    self.end_item(out, "completed");
                    let namespace = self.namespaces.get(name).cloned();
                    self.begin_item(out, Kind::Call { call_id: id.clone(), name: name.clone(), namespace });
                }
                Delta::Arguments { json, .. } => self.delta(out, json),
            }
        }
    }

    fn message(&mut self, out: Option<&Frames>, text: &str) {
        self.begin_item(out, Kind::Message);
        self.delta(out, text);
    }

    fn calling(&self) -> bool {
        matches!(&self.open, Some(Item { kind: Kind::Call { .. }, .. }))
    }

    /// Opens an item of this kind, unless it is open.
    fn begin_item(&mut self, out: Option<&Frames>, kind: Kind) {
        if self.open.as_ref().is_some_and(|item| item.kind == kind) {
            return;
        }
        self.end_item(out, "completed");
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let item = Item { id: format!("{prefix}_{}", unique_id()), kind, text: String::new() };
        let added = item.value("in_progress", self.summary, false);
        self.emit(out, "response.output_item.added", json!({"output_index": self.output.len(), "item": added}));
        if let Some((event, part)) = item.part(self.summary, "added") {
            self.emit_in(out, &item, event, json!({"part": part}));
        }
        self.open = Some(item);
    }

    fn delta(&mut self, out: Option<&Frames>, text: &str) {
        let Some(mut item) = self.open.take() else { return };
        item.text += text;
        if out.is_some() {
            let event = match (&item.kind, self.summary) {
                (Kind::Reasoning, true) => "response.reasoning_summary_text.delta",
                (Kind::Reasoning, false) => "response.reasoning_text.delta",
                (Kind::Message, _) => "response.output_text.delta",
                (Kind::Call { .. }, _) => "response.function_call_arguments.delta",
            };
            let mut fields = json!({"delta": text});
            if item.kind == Kind::Message {
                fields["logprobs"] = json!([]);
            }
            self.emit_in(out, &item, event, fields);
        }
        self.open = Some(item);
    }

    fn end_item(&mut self, out: Option<&Frames>, status: &str) {
        let Some(item) = self.open.take() else { return };
        let text = &item.text;
        let (event, fields) = match (&item.kind, self.summary) {
            (Kind::Reasoning, true) => ("response.reasoning_summary_text.done", json!({"text": text})),
            (Kind::Reasoning, false) => ("response.reasoning_text.done", json!({"text": text})),
            (Kind::Message, _) => ("response.output_text.done", json!({"text": text, "logprobs": []})),
            (Kind::Call { name, .. }, _) => {
                ("response.function_call_arguments.done", json!({"name": name, "arguments": text}))
            }
        };
        self.emit_in(out, &item, event, fields);
        if let Some((event, part)) = item.part(self.summary, "done") {
            self.emit_in(out, &item, event, json!({"part": part}));
        }
        let value = item.value(status, self.summary, self.encrypted);
        self.emit(out, "response.output_item.done", json!({"output_index": self.output.len(), "item": value}));
        self.output.push(value);
        if !self.held.is_empty() {
            let text = mem::take(&mut self.held);
            self.message(out, &text);
            self.end_item(out, status);
        }
    }

    /// An event about a part of an item.
    fn emit_in(&mut self, out: Option<&Frames>, item: &Item, event: &str, fields: Value) {
        let mut all = json!({"item_id": item.id, "output_index": self.output.len()});
        match (&item.kind, self.summary) {
            (Kind::Reasoning, true) => all["summary_index"] = 0.into(),
            (Kind::Reasoning, false) | (Kind::Message, _) => all["content_index"] = 0.into(),
            (Kind::Call { .. }, _) => {}
        }
        if let (Value::Object(all), Value::Object(fields)) = (&mut all, fields) {
            all.extend(fields);
        }
        self.emit(out, event, all);
    }

    fn emit(&mut self, out: Option<&Frames>, event: &str, mut fields: Value) {
        if let Some(out) = out {
            self.write(out, event, &mut fields);
        }
    }

    fn write(&mut self, out: &Frames, event: &str, fields: &mut Value) {
        fields["type"] = event.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.event(event, fields);
    }

    /// The answer is complete, or as long as it may be.
    fn finish(&mut self, out: Option<&Frames>, ending: &Ending) {
        let cut = ending.reason == FinishReason::Length;
        let status = if cut { "incomplete" } else { "completed" };
        self.end_item(out, status);
        self.response["output"] = mem::take(&mut self.output).into();
        self.response["status"] = status.into();
        self.response["usage"] = usage(&ending.usage);
        match cut {
            true => self.response["incomplete_details"] = json!({"reason": "max_output_tokens"}),
            false => self.response["completed_at"] = now().into(),
        }
        if let Some(input) = self.keep.take() {
            let previous = self.response["previous_response_id"].as_str().map(str::to_owned);
            self.state.responses.keep(previous, input, &self.response);
        }
        self.emit_response(out, &format!("response.{status}"));
    }

    fn emit_response(&mut self, out: Option<&Frames>, event: &str) {
        if let Some(out) = out {
            // It may be large: it is told from where it is.
            let mut fields = json!({"response": mem::take(&mut self.response)});
            self.write(out, event, &mut fields);
            self.response = fields["response"].take();
        }
    }
}

impl Item {
    /// The item as it stands in an answer.
    fn value(&self, status: &str, summary: bool, encrypted: bool) -> Value {
        let Self { id, text, .. } = self;
        let begun = status != "in_progress";
        match &self.kind {
            Kind::Reasoning => {
                let part = |kind: &str| if begun { json!([{"type": kind, "text": text}]) } else { json!([]) };
                let summary =
                    if summary { (part("summary_text"), json!([])) } else { (json!([]), part("reasoning_text")) };
                let kept = encrypted.then(|| format!("{KEPT}{text}"));
                json!({"id": id, "type": "reasoning", "summary": summary.0, "content": summary.1,
                       "encrypted_content": kept, "status": status})
            }
            Kind::Message => {
                let content = if begun { json!([output_text(text)]) } else { json!([]) };
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Kind::Call { call_id, name, namespace } => {
                let mut call = json!({"id": id, "type": "function_call", "status": status, "call_id": call_id,
                                      "name": name, "arguments": text});
                if let Some(namespace) = namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
        }
    }

    /// The event that begins or ends the item's one part, and the part; a call has none.
    fn part(&self, summary: bool, which: &str) -> Option<(&'static str, Value)> {
        let added = which == "added";
        let text = &self.text;
        match (&self.kind, summary) {
            (Kind::Call { .. }, _) => None,
            (Kind::Reasoning, true) => {
                let name = ["response.reasoning_summary_part.done", "response.reasoning_summary_part.added"];
                Some((name[usize::from(added)], json!({"type": "summary_text", "text": text})))
            }
            (kind, _) => {
                let name = ["response.content_part.done", "response.content_part.added"];
                let part = match kind {
                    Kind::Message => output_text(text),
                    _ => json!({"type": "reasoning_text", "text": text}),
                };
                Some((name[usize::from(added)], part))
            }
        }
    }
}

impl Wire for Answer {
    fn begin(&mut self, out: &Frames, _usage: Usage) {
        self.emit_response(Some(out), "response.created");
        self.emit_response(Some(out), "response.in_progress");
    }

    fn turn(&mut self, out: &Frames, turn: &Turn) {
        if let Some(progress) = turn.progress.filter(|_| self.progress) {
            self.emit(Some(out), "response.prompt_progress", json!({"prompt_progress": progress}));
        }
        self.read(Some(out), turn);
    }

    fn end(&mut self, out: &Frames, ending: &Ending) {
        self.finish(Some(out), ending);
    }

    fn error(&mut self, out: &Frames, error: &ApiError) {
        self.response["status"] = "failed".into();
        self.response["error"] = json!({"code": "server_error", "message": error.message()});
        self.response["output"] = mem::take(&mut self.output).into();
        self.emit_response(Some(out), "response.failed");
    }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    })
}

/// Unix seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
