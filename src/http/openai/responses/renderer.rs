//! Answers of the Responses API: output items, as one body or as a stream of events. The stream's last event contains
//! the body.

use crate::http::{
    ApiError, ServerState,
    layers::{memory, unique_id, value_bytes},
    models::LoadedModel,
    openai::{
        chat::content_token,
        responses::{
            items::ENCRYPTED_PREFIX,
            request::{ENCRYPTED_REASONING, ResponsesRequest, TOOL_SEARCH},
        },
        unix_seconds,
    },
    output::{self, Choices, FinishReason, Finished, Output, PromptProgress, Renderer, Usage},
    sse::Frames,
};
use axum::response::Response;
use moestro_chat::{Tokenizer, parser::Delta};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, mem, sync::Arc};

/// Renders an answer. Methods that are called with `frames` also write events. Methods that are called with `None` only
/// build the body.
pub struct ResponsesRenderer {
    state: Arc<ServerState>,
    /// Set when the model is known.
    tokenizer: Option<Arc<Tokenizer>>,
    /// The response object without its output.
    response: Value,
    /// Completed items.
    output: Vec<Value>,
    /// The item that is being written. `None` if no item is open.
    open: Option<OpenItem>,
    /// Text that came while a call's item was open. The text gets an item after the call's item.
    pending: String,
    /// Log-probabilities of tokens whose text has not been written yet.
    logprobs: Vec<Value>,
    /// Number of the next event.
    sequence: u64,
    /// Number of the first event that is written.
    first_event: u64,
    /// True if reasoning is sent as the summary.
    has_summary: bool,
    /// True if reasoning items include `encrypted_content`.
    has_encrypted: bool,
    /// Namespaces by function name. A call of a function in a namespace includes the namespace.
    namespaces: BTreeMap<String, String>,
    /// True if a call of `tool_search` is a `tool_search_call`.
    has_search: bool,
    /// The input, if the response is stored.
    stored_input: Option<Vec<Value>>,
}

struct OpenItem {
    id: String,
    kind: ItemKind,
    /// Reasoning, text or arguments, depending on `kind`.
    text: String,
    /// Log-probabilities of the text's tokens, as an array.
    logprobs: Value,
}

#[derive(Clone, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Message,
    Call {
        call_id: String,
        name: String,
        namespace: Option<String>,
    },
    /// A call of a tool search that the client runs.
    Search {
        call_id: String,
    },
}

impl ResponsesRenderer {
    /// `history` has the items of earlier responses.
    pub fn new(request: &ResponsesRequest, state: Arc<ServerState>, history: &[Value], input: Vec<Value>) -> Self {
        let is_stored = request.store.unwrap_or(true);
        let reasoning = request.reasoning.as_ref();
        let summary = reasoning.and_then(|reasoning| reasoning.summary.as_deref());
        let text = request.text.as_ref();
        let format = text.and_then(|text| text.format.clone());
        let verbosity = text.and_then(|text| text.verbosity.as_deref()).unwrap_or("medium");
        let response = json!({
            "id": format!("resp_{}", unique_id()),
            "object": "response",
            "created_at": unix_seconds(),
            "status": "in_progress",
            "background": false,
            "completed_at": null,
            "error": null,
            "incomplete_details": null,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": null,
            "model": request.common.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.and_then(|reasoning| reasoning.effort.as_deref()), "summary": summary},
            "service_tier": "default",
            "store": is_stored,
            "temperature": request.common.temperature,
            "text": {"format": format.unwrap_or_else(|| json!({"type": "text"})), "verbosity": verbosity},
            "tool_choice": request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": request.tools.clone().unwrap_or_default(),
            "top_logprobs": request.top_logprobs.unwrap_or(0),
            "top_p": request.common.top_p,
            "truncation": "disabled",
            "usage": null,
            "user": request.user,
            "metadata": request.metadata.clone().unwrap_or_default(),
        });
        Self {
            has_summary: summary.is_some(),
            has_encrypted: request.includes(ENCRYPTED_REASONING),
            namespaces: request.namespaces(history.iter().chain(&input)),
            has_search: request.has_search(history.iter().chain(&input)),
            stored_input: is_stored.then_some(input),
            ..Self::without_output(state, response)
        }
    }

    /// A renderer for a response that has no output yet.
    fn without_output(state: Arc<ServerState>, response: Value) -> Self {
        Self {
            state,
            tokenizer: None,
            response,
            output: Vec::new(),
            open: None,
            pending: String::new(),
            logprobs: Vec::new(),
            sequence: 0,
            first_event: 0,
            has_summary: false,
            has_encrypted: false,
            namespaces: BTreeMap::new(),
            has_search: false,
            stored_input: None,
        }
    }

    fn push(&mut self, frames: Option<&Frames>, output: &Output) {
        if let Some(tokenizer) = &self.tokenizer {
            let tokens = output.logprobs.iter().map(|(id, logprobs)| json!(content_token(tokenizer, *id, logprobs)));
            self.logprobs.extend(tokens);
        }
        for delta in &output.deltas {
            match delta {
                Delta::Reasoning(text) => {
                    self.open_item(frames, ItemKind::Reasoning);
                    self.push_text(frames, text);
                }
                Delta::Content(text) if self.is_in_call() => self.pending += text,
                Delta::Content(text) => self.push_message(frames, text),
                Delta::ToolCall { id, name, .. } => {
                    self.close_item(frames, "completed");
                    let namespace = self.namespaces.get(name).cloned();
                    let kind = if self.has_search && name == TOOL_SEARCH {
                        ItemKind::Search { call_id: id.clone() }
                    } else {
                        ItemKind::Call { call_id: id.clone(), name: name.clone(), namespace }
                    };
                    self.open_item(frames, kind);
                }
                Delta::Arguments { json, .. } => self.push_text(frames, json),
            }
        }
    }

    fn push_message(&mut self, frames: Option<&Frames>, text: &str) {
        self.open_item(frames, ItemKind::Message);
        self.push_text(frames, text);
    }

    fn is_in_call(&self) -> bool {
        matches!(&self.open, Some(OpenItem { kind: ItemKind::Call { .. } | ItemKind::Search { .. }, .. }))
    }

    /// Opens an item of this kind if no such item is open.
    fn open_item(&mut self, frames: Option<&Frames>, kind: ItemKind) {
        if self.open.as_ref().is_some_and(|item| item.kind == kind) {
            return;
        }
        self.close_item(frames, "completed");
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { .. } => "fc",
            ItemKind::Search { .. } => "tsc",
        };
        self.begin_item(frames, format!("{prefix}_{}", unique_id()), kind);
    }

    fn begin_item(&mut self, frames: Option<&Frames>, id: String, kind: ItemKind) {
        let mut item = OpenItem { id, kind, text: String::new(), logprobs: json!([]) };
        let added = self.item_object(&item, json!([]), "in_progress");
        self.emit(frames, "response.output_item.added", json!({"output_index": self.output.len(), "item": added}));
        self.emit_part(frames, &mut item, "added");
        self.open = Some(item);
    }

    /// Appends text to the open item.
    fn push_text(&mut self, frames: Option<&Frames>, text: &str) {
        let Some(mut item) = self.open.take() else { return };
        item.text += text;
        let is_message = item.kind == ItemKind::Message;
        let logprobs = if is_message { mem::take(&mut self.logprobs) } else { Vec::new() };
        if frames.is_some() {
            let mut fields = json!({"delta": text});
            if is_message {
                fields["logprobs"] = logprobs.as_slice().into();
            }
            self.emit_text(frames, &item, "delta", fields);
        }
        if let Value::Array(all) = &mut item.logprobs {
            all.extend(logprobs);
        }
        self.open = Some(item);
    }

    fn close_item(&mut self, frames: Option<&Frames>, status: &str) {
        let Some(mut item) = self.open.take() else { return };
        let text = &item.text;
        let logprobs = item.logprobs.take();
        let fields = match &item.kind {
            ItemKind::Reasoning => json!({"text": text}),
            ItemKind::Message => json!({"text": text, "logprobs": logprobs}),
            ItemKind::Call { name, .. } => json!({"name": name, "arguments": text}),
            ItemKind::Search { .. } => Value::Null,
        };
        item.logprobs = self.emit_text(frames, &item, "done", fields)["logprobs"].take();
        self.emit_part(frames, &mut item, "done");
        let logprobs = item.logprobs.take();
        let done = self.item_object(&item, logprobs, status);
        self.emit(frames, "response.output_item.done", json!({"output_index": self.output.len(), "item": done}));
        self.output.push(done);
        if !self.pending.is_empty() {
            let text = mem::take(&mut self.pending);
            self.push_message(frames, &text);
            self.close_item(frames, status);
        }
    }

    /// Writes the event about an item's text, and returns its fields. `stage` is `delta` or `done`. The arguments of a
    /// tool search have no event.
    fn emit_text(&mut self, frames: Option<&Frames>, item: &OpenItem, stage: &str, fields: Value) -> Value {
        let text = match item.kind {
            ItemKind::Reasoning if self.has_summary => "reasoning_summary_text",
            ItemKind::Reasoning => "reasoning_text",
            ItemKind::Message => "output_text",
            ItemKind::Call { .. } => "function_call_arguments",
            ItemKind::Search { .. } => return fields,
        };
        self.emit_in(frames, item, format!("response.{text}.{stage}"), fields)
    }

    /// The event that starts or ends the only part of an item. `stage` is `added` or `done`. Calls have no parts. The
    /// log-probabilities may be large, so they are moved into the event and back, not copied.
    fn emit_part(&mut self, frames: Option<&Frames>, item: &mut OpenItem, stage: &str) {
        let (event, part) = match &item.kind {
            ItemKind::Call { .. } | ItemKind::Search { .. } => return,
            ItemKind::Reasoning if self.has_summary => {
                ("reasoning_summary_part", text_part("summary_text", &item.text))
            }
            ItemKind::Reasoning => ("content_part", text_part("reasoning_text", &item.text)),
            ItemKind::Message => ("content_part", output_text(&item.text, item.logprobs.take())),
        };
        let mut fields = self.emit_in(frames, item, format!("response.{event}.{stage}"), json!({"part": part}));
        item.logprobs = fields["part"]["logprobs"].take();
    }

    /// The item as it appears in `output`.
    fn item_object(&self, item: &OpenItem, logprobs: Value, status: &str) -> Value {
        let OpenItem { id, kind, text, .. } = item;
        let parts = |part: Value| if status == "in_progress" { json!([]) } else { json!([part]) };
        match kind {
            ItemKind::Reasoning => {
                let (summary, content) = if self.has_summary {
                    (parts(text_part("summary_text", text)), json!([]))
                } else {
                    (json!([]), parts(text_part("reasoning_text", text)))
                };
                let is_done = status != "in_progress";
                let encrypted = (self.has_encrypted && is_done).then(|| format!("{ENCRYPTED_PREFIX}{text}"));
                json!({"id": id, "type": "reasoning", "summary": summary, "content": content,
                       "encrypted_content": encrypted, "status": status})
            }
            ItemKind::Message => {
                let content = parts(output_text(text, logprobs));
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            ItemKind::Search { call_id } => {
                let arguments: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
                json!({"id": id, "type": "tool_search_call", "status": status, "call_id": call_id,
                       "execution": "client", "arguments": arguments})
            }
            ItemKind::Call { call_id, name, namespace } => {
                let mut call = json!({"id": id, "type": "function_call", "status": status, "call_id": call_id,
                                      "name": name, "arguments": text});
                if let Some(namespace) = namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
        }
    }

    /// Writes an event about the text or a part of an item, and returns its fields.
    fn emit_in(&mut self, frames: Option<&Frames>, item: &OpenItem, event: String, fields: Value) -> Value {
        let mut all = json!({"item_id": item.id, "output_index": self.output.len()});
        match &item.kind {
            ItemKind::Reasoning if self.has_summary => all["summary_index"] = 0.into(),
            ItemKind::Reasoning | ItemKind::Message => all["content_index"] = 0.into(),
            ItemKind::Call { .. } | ItemKind::Search { .. } => {}
        }
        if let (Value::Object(all), Value::Object(fields)) = (&mut all, fields) {
            all.extend(fields);
        }
        self.emit(frames, &event, all)
    }

    /// Writes an event and returns its fields.
    fn emit(&mut self, frames: Option<&Frames>, event: &str, mut fields: Value) -> Value {
        if let Some(frames) = frames {
            fields["type"] = event.into();
            fields["sequence_number"] = self.sequence.into();
            if self.sequence >= self.first_event {
                frames.event(event, &fields);
            }
            self.sequence += 1;
        }
        fields
    }

    /// Writes an event with the response object. The object may be large, so it is moved into the event and back, not
    /// copied.
    fn emit_response(&mut self, frames: Option<&Frames>, event: &str) {
        let fields = json!({"response": mem::take(&mut self.response)});
        self.response = self.emit(frames, event, fields)["response"].take();
    }

    fn close(&mut self, frames: Option<&Frames>, finished: &Finished) {
        let is_cut = finished.reason == FinishReason::Length;
        let status = if is_cut { "incomplete" } else { "completed" };
        self.close_item(frames, status);
        self.response["output"] = mem::take(&mut self.output).into();
        self.response["status"] = status.into();
        self.response["usage"] = usage_object(&finished.usage);
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"})
        } else {
            self.response["completed_at"] = unix_seconds().into()
        }
        if let Some(input) = self.stored_input.take() {
            let previous = self.response["previous_response_id"].as_str().map(str::to_owned);
            self.state.responses.insert(previous, input, &self.response);
        }
        self.emit_response(frames, &format!("response.{status}"));
    }
}

/// Writes a stored response as a stream: the events of its answer, with one delta for each text. The events before
/// `first_event` are left out.
pub fn replay(state: Arc<ServerState>, mut stored: Value, first_event: u64, frames: &Frames) {
    let items = stored["output"].take();
    let mut response = stored.clone();
    response["status"] = "in_progress".into();
    response["output"] = json!([]);
    response["incomplete_details"] = Value::Null;
    response["completed_at"] = Value::Null;
    response["usage"] = Value::Null;
    let mut renderer = ResponsesRenderer { first_event, ..ResponsesRenderer::without_output(state, response) };
    renderer.start(frames, Usage::default());
    for item in items.as_array().into_iter().flatten() {
        renderer.replay_item(frames, item);
    }
    stored["output"] = items;
    let event = format!("response.{}", stored["status"].as_str().unwrap_or("completed"));
    renderer.response = stored;
    renderer.emit_response(Some(frames), &event);
}

impl ResponsesRenderer {
    fn replay_item(&mut self, frames: &Frames, item: &Value) {
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.has_encrypted = item["encrypted_content"].is_string();
        self.has_summary = item["summary"].as_array().is_some_and(|summary| !summary.is_empty());
        let part = if self.has_summary { &item["summary"][0] } else { &item["content"][0] };
        let text = match item["type"].as_str() {
            Some("function_call") => string(&item["arguments"]),
            Some("tool_search_call") => item["arguments"].to_string(),
            _ => string(&part["text"]),
        };
        let kind = match item["type"].as_str() {
            Some("tool_search_call") => ItemKind::Search { call_id: string(&item["call_id"]) },
            Some("reasoning") => ItemKind::Reasoning,
            Some("function_call") => ItemKind::Call {
                call_id: string(&item["call_id"]),
                name: string(&item["name"]),
                namespace: item["namespace"].as_str().map(str::to_owned),
            },
            _ => ItemKind::Message,
        };
        self.begin_item(Some(frames), string(&item["id"]), kind);
        self.logprobs = part["logprobs"].as_array().cloned().unwrap_or_default();
        self.push_text(Some(frames), &text);
        self.close_item(Some(frames), item["status"].as_str().unwrap_or("completed"));
    }
}

impl Renderer for ResponsesRenderer {
    const LOGPROB_BYTES: usize = memory::RESPONSES_LOGPROB_BYTES;

    fn keeps_output(&self) -> bool {
        true
    }

    /// The request's fields in the response, once as a value and up to twice as text, and the stored input.
    fn held_bytes(&self) -> usize {
        3 * value_bytes(&self.response) + self.stored_input.iter().flatten().map(value_bytes).sum::<usize>()
    }

    /// OpenAI's SDKs require `response.created` before any other event, and Codex ignores `error` events.
    fn refuse(&mut self, frames: &Frames, error: &ApiError) {
        self.start(frames, Usage::default());
        self.error(frames, error);
    }

    /// Sets the model's id, and the model's sampling defaults for parameters that the request does not set.
    fn prepare(&mut self, model: &LoadedModel, _: &Choices) {
        self.response["model"] = model.card.id.as_str().into();
        self.tokenizer = Some(model.tokenizer.clone());
        for (name, default) in [("temperature", model.defaults.temperature), ("top_p", model.defaults.top_p)] {
            if self.response[name].is_null() {
                self.response[name] = decimal(default).into();
            }
        }
    }

    fn start(&mut self, frames: &Frames, _usage: Usage) {
        self.emit_response(Some(frames), "response.created");
        self.emit_response(Some(frames), "response.in_progress");
    }

    /// Sends an empty delta of the open item, or repeats `response.in_progress` if the open item has no deltas or no item
    /// is open. SSE comments would not keep Codex waiting, since it does not count them as events.
    fn idle(&mut self, frames: &Frames) {
        match &self.open {
            Some(item) if !matches!(item.kind, ItemKind::Search { .. }) => self.push_text(Some(frames), ""),
            _ => self.emit_response(Some(frames), "response.in_progress"),
        }
    }

    fn progress(&mut self, frames: &Frames, progress: PromptProgress) {
        self.emit(Some(frames), "response.prompt_progress", json!({"prompt_progress": progress}));
    }

    fn output(&mut self, frames: &Frames, _choice: usize, output: &Output) {
        self.push(Some(frames), output);
    }

    fn finish(&mut self, frames: &Frames, _choice: usize, finished: &Finished) {
        self.close(Some(frames), finished);
    }

    fn error(&mut self, frames: &Frames, error: &ApiError) {
        self.response["status"] = "failed".into();
        self.response["error"] = response_error(error);
        self.response["output"] = mem::take(&mut self.output).into();
        self.emit_response(Some(frames), "response.failed");
    }

    fn body(mut self, answers: Vec<(Output, Finished)>, _usage: Usage) -> Response {
        for (output, finished) in &answers {
            self.push(None, output);
            self.close(None, finished);
        }
        output::json(&self.response)
    }
}

/// The error object of a failed response: the fields of other responses' errors, and a code, which OpenAI requires.
fn response_error(error: &ApiError) -> Value {
    let mut object = error.body()["error"].take();
    if error.is_queue_full() {
        object["code"] = "rate_limit_exceeded".into();
    } else if object["code"].is_null() {
        object["code"] = "server_error".into();
    }
    object
}

/// The shortest decimal number that means `value`: 0.6, not 0.6000000238418579.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

fn text_part(kind: &str, text: &str) -> Value {
    json!({"type": kind, "text": text})
}

fn output_text(text: &str, logprobs: Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

pub fn usage_object(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_defaults_are_short_numbers() {
        assert_eq!(json!([decimal(0.6), decimal(0.95), decimal(1.0)]).to_string(), "[0.6,0.95,1.0]");
    }
}
