//! `POST /v1/responses/compact`: replaces a conversation by its user messages and a summary that the model writes.
//!
//! The summary is a `compaction` item. The item's `encrypted_content` is plain text, as in reasoning items.

use crate::{
    chat::parser::Delta,
    http::{
        ServerState,
        errors::ApiError,
        generate::generate,
        layers::{
            body_guard,
            memory::value_bytes,
            request_log::{RequestLog, unique_id},
        },
        models::LoadedModel,
        openai::{
            chunks::unix_seconds,
            responses::{items::ENCRYPTED_PREFIX, renderer::usage_object, request},
        },
        output::{
            choices::Choices,
            generation::{Finished, Output},
            renderer::Renderer,
            usage::{PromptProgress, Usage},
        },
        sse::Frames,
    },
};
use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Request for the summary, sent as the last message of the conversation.
const REQUEST: &str = "Summarize this conversation for the assistant that will continue it without seeing it. State the \
                       goals, the decisions, what was done and found (with names of files, commands and values), and \
                       the open steps. Write only the summary.";

pub async fn compact(
    State(state): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    let (mut request, history, mut input, permit) = request::read(&state, body).await?;
    let kept: Vec<Value> = history.iter().chain(&input).filter(|item| item["role"] == "user").cloned().collect();
    let mut kept_permit = state.memory.permit();
    kept_permit.resize(3 * kept.iter().map(value_bytes).sum::<usize>())?;
    input.push(json!({"role": "user", "content": REQUEST}));
    // The prompt keeps the tools, so that the cached beginning of the prompt is used, but the answer must be text.
    request.answer_as_text();
    let request = request.into_generation(history, input)?;
    let response = generate(&state, log, request, permit, CompactionRenderer { kept }).await?;
    Ok(body_guard::hold(response, kept_permit))
}

/// Writes the compacted conversation. The answer is never streamed.
struct CompactionRenderer {
    /// The user messages.
    kept: Vec<Value>,
}

impl Renderer for CompactionRenderer {
    fn refuse(frames: &Frames, error: &ApiError) {
        frames.error(error);
    }

    fn prepare(&mut self, _: &LoadedModel, _: &Choices) {}

    fn progress(&mut self, _: &Frames, _: PromptProgress) {}

    fn output(&mut self, _: &Frames, _: usize, _: &Output) {}

    fn body(self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response {
        let deltas = answers.into_iter().flat_map(|(output, _)| output.deltas);
        let text = deltas.filter_map(|delta| if let Delta::Content(text) = delta { Some(text) } else { None });
        let summary = json!({"id": format!("cmp_{}", unique_id()), "type": "compaction",
                             "encrypted_content": format!("{ENCRYPTED_PREFIX}{}", text.collect::<String>())});
        let output: Vec<Value> = self.kept.into_iter().chain([summary]).collect();
        let body = json!({"id": format!("resp_{}", unique_id()), "object": "response.compaction",
                          "created_at": unix_seconds(), "output": output, "usage": usage_object(&usage)});
        Json(body).into_response()
    }
}
