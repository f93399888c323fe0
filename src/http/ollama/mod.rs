//! Ollama's API, for desktop tools that support no other API. The port of `--ollama-port` serves Ollama's API in
//! addition to the other APIs.
//!
//! Decisions of this server: names may end with `:latest`. The context length is set by the server, so `num_ctx` has no
//! effect. `keep_alive: 0` unloads the model after the answer. For any other value, `--keep-alive` decides.

mod list;
mod renderer;
mod request;

pub use list::{ps, show, tags, version};

use crate::http::{
    ApiError, ServerState, errors,
    generate::Generator,
    layers::{MemoryPermit, body_guard},
    request::{GenerationRequest, ParsedValues, body, fields},
};
use axum::{
    body::Body,
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use renderer::{OllamaRenderer, loaded};
use request::{OllamaChat, OllamaCommon, OllamaGenerate};
use serde_json::json;
use std::sync::Arc;

pub async fn running() -> &'static str {
    "Ollama is running"
}

pub async fn chat(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (common, request, permit) =
        body::request::<OllamaCommon, OllamaChat>(&server.state, body, fields::OLLAMA_CHAT, ParsedValues::Kept).await?;
    let renderer = OllamaRenderer::chat(common.model.clone());
    let generation = body::translate(&permit, {
        let common = common.clone();
        move || request.into_chat(common)
    })
    .await?;
    answer(server, permit, renderer, common, generation).await
}

pub async fn generate(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (common, request, permit) =
        body::request::<OllamaCommon, OllamaGenerate>(&server.state, body, fields::OLLAMA_GENERATE, ParsedValues::Kept)
            .await?;
    let renderer = OllamaRenderer::generate(common.model.clone());
    let generation = body::translate(&permit, {
        let common = common.clone();
        move || request.into_generation(common)
    })
    .await?;
    answer(server, permit, renderer, common, generation).await
}

/// Answers a request. A request without a prompt only loads the model, or unloads it if `keep_alive` is 0.
async fn answer(
    server: Generator,
    permit: MemoryPermit,
    renderer: OllamaRenderer,
    common: OllamaCommon,
    request: Option<GenerationRequest>,
) -> Result<Response, ApiError> {
    let unloads = common.unloads();
    let id = if unloads { server.state.models.find(&common.model).await } else { None };
    let unload = id.map(|id| UnloadOnDrop { state: server.state.clone(), id });
    let Some(request) = request else {
        if !unloads {
            server.model(Some(&common.model), &permit).await?;
        }
        return Ok(loaded(renderer, unloads));
    };
    let response = server.generate(request, permit, renderer).await?;
    Ok(body_guard::hold(response, unload))
}

/// Unloads a model after its answer.
struct UnloadOnDrop {
    state: Arc<ServerState>,
    id: String,
}

impl Drop for UnloadOnDrop {
    fn drop(&mut self) {
        self.state.models.unload(&self.id);
    }
}

/// Layer that gives every error of these paths Ollama's shape.
pub async fn convert_errors(request: Request, next: Next) -> Response {
    let is_ollama = request.uri().path().starts_with("/api/");
    let response = next.run(request).await;
    if !is_ollama {
        return response;
    }
    errors::reshape(response, |error| json!({"error": error.message()})).into_response()
}
