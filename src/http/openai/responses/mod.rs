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

use crate::http::{ApiError, ServerState, generate::Generator, layers::body_guard};
use axum::{
    Json,
    body::Body,
    extract::{Path, RawQuery, State},
    http::header,
    response::{IntoResponse, Response},
};
use renderer::ResponsesRenderer;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn responses(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (request, history, input, permit) = request::read(&server.state, body).await?;
    let renderer = ResponsesRenderer::new(&request, server.state.clone(), input.clone());
    let mut renderer_permit = permit.empty();
    renderer_permit.resize(renderer.bytes())?;
    let request = request.into_generation(history, input)?;
    let response = server.generate(request, permit, renderer).await?;
    Ok(body_guard::hold(response, renderer_permit))
}

/// Counts the tokens of a request's prompt without generating anything.
pub async fn input_tokens(server: Generator, body: Body) -> Result<Json<Value>, ApiError> {
    let (mut request, history, input, mut permit) = request::read(&server.state, body).await?;
    let name = request.common.model.clone();
    let chat = request.conversation(history, input)?;
    let model = server.model(name.as_deref(), &permit).await?;
    let tokens = model.count_tokens(&mut permit, chat, &server.state.image_urls).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": tokens})))
}

pub async fn get(
    State(state): State<Arc<ServerState>>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    if query.is_some_and(|query| query.split('&').any(|pair| pair == "stream=true")) {
        let text = "stream is not supported: a stored response is sent as one JSON object.";
        return Err(ApiError::unsupported("stream", text));
    }
    let text = state.responses.get(&id).ok_or_else(|| ApiError::no_such_response(&id, "response_id"))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

pub async fn delete(State(state): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    if state.responses.remove(&id) {
        Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
    } else {
        Err(ApiError::no_such_response(&id, "response_id"))
    }
}
