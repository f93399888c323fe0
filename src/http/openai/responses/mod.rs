//! `POST /v1/responses`, `/v1/responses/compact` and `/v1/responses/input_tokens`, and `GET` and `DELETE` of stored
//! responses: OpenAI's newer API, translated to and from a generation request.
//!
//! Decisions of this server: reasoning is sent as plain `reasoning_text`, or as the summary if the request asks for a
//! summary. The `encrypted_content` that a client may ask for is the reasoning as plain text. Tools that OpenAI's
//! servers run are never called.

mod compact;
mod input_items;
mod items;
mod renderer;
mod request;
mod store;

pub use compact::compact;
pub use input_items::input_items;
pub use store::ResponseStore;

use crate::http::{
    ApiError, ServerState,
    generate::Generator,
    layers::{body_guard, memory},
    request::{PathId, body},
    sse::{self, Frames, StreamFormat},
};
use axum::{
    Json,
    body::Body,
    extract::{Query, State},
    http::{Uri, header},
    response::{IntoResponse, Response},
};
use renderer::ResponsesRenderer;
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};

/// Number of times that a stored response is in memory while it is sent as a stream: as values, and in its events.
const STREAM_COPIES: usize = 6;

pub async fn responses(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (request, history, input, permit) = request::read(&server.state, body).await?;
    let renderer = ResponsesRenderer::new(&request, server.state.clone(), &history, input.clone());
    let request = body::translate(&permit, move || request.into_generation(history, input)).await?;
    server.generate(request, permit, renderer).await
}

/// Counts the tokens of a request's prompt without generating anything. Checks the request as if it were answered.
pub async fn input_tokens(server: Generator, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, history, input, permit) = request::read(&server.state, body).await?;
    let request = body::translate(&permit, move || request.into_generation(history, input)).await?;
    let tokens = server.count_tokens(request, permit).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": tokens})))
}

/// Sends a stored response: as one JSON object, or as a stream with `?stream=true`. A stream that `starting_after` names
/// an event of begins after that event.
pub async fn get(State(state): State<Arc<ServerState>>, PathId(id): PathId, uri: Uri) -> Result<Response, ApiError> {
    let text = state.responses.get(&id).ok_or_else(|| ApiError::no_such_response(&id, "response_id"))?;
    let query = Query::<BTreeMap<String, String>>::try_from_uri(&uri).unwrap_or_default().0;
    if query.get("stream").is_none_or(|stream| stream != "true") {
        return Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response());
    }
    let first_event = match query.get("starting_after").map(|number| number.parse::<u64>()) {
        None => 0,
        Some(Ok(number)) => number.saturating_add(1),
        Some(Err(_)) => return Err(ApiError::wrong_value("starting_after", "must be the number of an event.")),
    };
    let permit = state.memory.permit().reserve(memory::parsed_bytes(&text) * STREAM_COPIES)?;
    let stored: Value = body::parse(&text)?;
    let write = |frames: Frames| async move { renderer::replay(state, stored, first_event, &frames) };
    Ok(body_guard::hold(sse::respond(StreamFormat::Events, write), permit))
}

pub async fn delete(State(state): State<Arc<ServerState>>, PathId(id): PathId) -> Result<Json<Value>, ApiError> {
    if state.responses.remove(&id) {
        Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
    } else {
        Err(ApiError::no_such_response(&id, "response_id"))
    }
}
