//! `POST /v1/messages` and `/v1/messages/count_tokens`.

use crate::http::{
    ApiError, ServerState,
    anthropic::{
        renderer::{MessagesRenderer, error_object},
        request::MessagesRequest,
    },
    errors,
    generate::Generator,
    layers::{MemoryPermit, REQUEST_ID},
    request::{ParsedValues, body, fields},
};
use axum::{Json, body::Body, extract::Request, http::HeaderName, middleware::Next, response::Response};
use serde_json::{Value, json};

/// Anthropic's name of the request id header.
static ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

pub async fn messages(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (request, permit) = read(&server.state, body).await?;
    if request.common.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens: Field required"));
    }
    let model = request.common.model.clone().unwrap_or_default();
    let renderer = MessagesRenderer::new(model, request.thinks(), request.omits_thinking());
    let keeps_header = server.state.keep_billing_header;
    let request = body::translate(&permit, move || request.into_generation(keeps_header)).await?;
    server.generate(request, permit, renderer).await
}

/// Counts the tokens of a request's prompt without generating anything. Checks the request as if it were answered.
pub async fn count_tokens(server: Generator, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, permit) = read(&server.state, body).await?;
    let keeps_header = server.state.keep_billing_header;
    let request = body::translate(&permit, move || request.into_generation(keeps_header)).await?;
    let tokens = server.count_tokens(request, permit).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}

async fn read(state: &ServerState, body: Body) -> Result<(MessagesRequest, MemoryPermit), ApiError> {
    let (common, mut request, permit) =
        body::request::<_, MessagesRequest>(state, body, fields::MESSAGES, ParsedValues::Translated).await?;
    request.common = common;
    Ok((request, permit))
}

/// Layer that converts errors to Anthropic's format: every error of these paths, including a missing key and a wrong
/// method, and on other paths the errors of clients that send `anthropic-version`.
pub async fn convert_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_client = request.headers().contains_key("anthropic-version") && !path.starts_with("/api/");
    let is_anthropic = is_client || path.trim_start_matches("/v1").starts_with("/messages");
    let response = next.run(request).await;
    if !is_anthropic {
        return response;
    }
    let mut response = errors::reshape(response, error_object);
    if let Some(id) = response.headers().get(&REQUEST_ID).cloned() {
        response.headers_mut().insert(ANTHROPIC_ID.clone(), id);
    }
    response
}
