//! `POST /v1/responses/compact`: replaces a conversation by its user messages and a summary that the model writes.
//!
//! The summary is a `compaction` item. The item's `encrypted_content` is plain text, as in reasoning items.

use crate::http::{
    ApiError,
    generate::Generator,
    layers::{unique_id, value_bytes},
    openai::{
        responses::{items::ENCRYPTED_PREFIX, renderer::usage_object, request},
        unix_seconds,
    },
    output::{self, AnswerText, FinishReason, Finished, Output, Renderer, Usage},
    request::body,
};
use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// Request for the summary, sent as the last message of the conversation.
const REQUEST: &str = "Summarize this conversation for the assistant that will continue it without seeing it. State the \
                       goals, the decisions, what was done and found (with names of files, commands and values), and \
                       the open steps. Write only the summary.";

pub async fn compact(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (mut request, history, mut input, permit) = request::read(&server.state, body).await?;
    let is_user = |item: &&Value| item["role"] == "user" && (item["type"].is_null() || item["type"] == "message");
    let kept: Vec<Value> = history.iter().chain(&input).filter(is_user).cloned().collect();
    input.push(json!({"role": "user", "content": REQUEST}));
    // The prompt keeps the tools, so that the cached beginning of the prompt is used, but the answer must be text.
    request.answer_as_text();
    let request = body::translate(&permit, move || request.into_generation(history, input)).await?;
    server.generate(request, permit, CompactionRenderer { kept }).await
}

/// Gives a kept message the fields that OpenAI's API returns.
fn complete(message: &mut Value) {
    message["type"] = "message".into();
    if message["id"].is_null() {
        message["id"] = format!("msg_{}", unique_id()).into();
    }
    if message["status"].is_null() {
        message["status"] = "completed".into();
    }
    if let Some(text) = message["content"].as_str() {
        message["content"] = json!([{"type": "input_text", "text": text}]);
    }
}

/// Writes the compacted conversation. The answer is never streamed.
struct CompactionRenderer {
    /// The user messages.
    kept: Vec<Value>,
}

impl Renderer for CompactionRenderer {
    fn held_bytes(&self) -> usize {
        3 * self.kept.iter().map(value_bytes).sum::<usize>()
    }

    /// A summary that is cut off would lose the rest of the conversation, so it is an error.
    fn body(self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response {
        if answers.iter().any(|(_, finished)| finished.reason == FinishReason::Length) {
            return ApiError::summary_cut(usage.completion_tokens).into_response();
        }
        let deltas = answers.into_iter().flat_map(|(output, _)| output.deltas).collect();
        let text = AnswerText::new(deltas).content;
        let summary = json!({"id": format!("cmp_{}", unique_id()), "type": "compaction",
                             "encrypted_content": format!("{ENCRYPTED_PREFIX}{text}")});
        let mut output = self.kept;
        output.iter_mut().for_each(complete);
        output.push(summary);
        let body = json!({"id": format!("resp_{}", unique_id()), "object": "response.compaction",
                          "created_at": unix_seconds(), "output": output, "usage": usage_object(&usage)});
        output::json(&body)
    }
}
