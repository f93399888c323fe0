//! `POST /v1/responses`, and `GET` and `DELETE` of what it keeps: OpenAI's newer API, translated into a
//! [`super::conversation`] and back. `request` is the way in, `answer` the way out, `store` what `previous_response_id`
//! goes on from.
//!
//! Choices of this server: reasoning is told in its own words, as `reasoning_text`, or as the summary if one was asked
//! for; the `encrypted_content` that clients may ask for is the reasoning itself. Tools that OpenAI's servers run are
//! never called here.

mod answer;
mod items;
mod request;
mod store;

pub use store::Store;

use crate::http::{
    LoadedModel, ServerState,
    errors::ApiError,
    layers::{
        body_guard,
        memory::MemoryPermit,
        request_log::{RequestLog, unique_id},
    },
    output::parts,
    request::{body, fields},
    sse::Frames,
};
use answer::Answer;
use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    http::header,
    response::{IntoResponse, Response},
};
use request::ResponsesRequest;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn responses(
    State(state): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    state.ensure_ready()?;
    let (request, permit) = body::known::<ResponsesRequest>(&state, body, fields::RESPONSES).await?;
    request.check()?;
    let (lease, streams) = (state.models.lease(request.model.as_deref()).await?, request.streams());
    let error = |out: &Frames, failure: &ApiError| {
        let event = json!({"type": "error", "sequence_number": 0, "code": "server_error", "message": failure.message(), "param": null});
        out.event("error", &event);
    };
    lease.respond(log.deadline, streams, error, move |app| reply(state, app, log, request, permit)).await
}

async fn reply(
    state: Arc<ServerState>,
    app: Arc<LoadedModel>,
    log: Arc<RequestLog>,
    mut request: ResponsesRequest,
    mut permit: MemoryPermit,
) -> Result<Response, ApiError> {
    // The items are translated.
    let mut count = |bytes: usize| permit.grow(permit.bytes() + 2 * bytes);
    let history = match &request.previous_response_id {
        Some(id) => {
            let kept = state.responses.history(id, count)?;
            kept.ok_or_else(|| ApiError::no_such_response(id, "previous_response_id"))?
        }
        None => {
            count(0)?;
            Vec::new()
        }
    };
    let input = request.input(&state.responses, &mut permit)?;
    let answer = Answer::new(format!("resp_{}", unique_id()), &app, &request, state.clone(), input.clone());
    let mut told = state.memory.permit();
    told.resize(answer.bytes())?;
    let streams = request.streams();
    let new = input.len();
    let conversation = request.conversation(&[history, input].concat(), new)?;
    let transcript = conversation.submit(&app, &log, permit).await?;
    let response = match streams {
        true => parts::stream(transcript, answer, log),
        false => answer.whole(transcript).await?,
    };
    Ok(body_guard::hold(response, told))
}

pub async fn get(State(state): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let text = state.responses.get(&id).ok_or_else(|| ApiError::no_such_response(&id, "response_id"))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

pub async fn delete(State(state): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    match state.responses.remove(&id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ApiError::no_such_response(&id, "response_id")),
    }
}
