//! The life of a generation request, the same for every API.
//!
//! `ChatRequest -> GenerationRequest -> prompt text -> token ids -> engine::Request -> logits -> Event -> delta -> SSE frame`
//!
//! A handler parses its API's body into a [`GenerationRequest`] and passes the [`Renderer`] that writes the answer.

use crate::http::{
    ServerState,
    errors::ApiError,
    layers::{memory::MemoryPermit, request_log::RequestLog},
    models::LoadedModel,
    output::{
        choices::Choices,
        renderer::{self, Renderer},
    },
    request::GenerationRequest,
};
use axum::response::Response;
use std::sync::Arc;

/// Waits for the model, queues the request and answers with one body or a stream.
pub async fn generate<R: Renderer>(
    state: &ServerState,
    log: Arc<RequestLog>,
    request: GenerationRequest,
    permit: MemoryPermit,
    renderer: impl FnOnce(&LoadedModel, &Choices) -> R + Send + 'static,
) -> Result<Response, ApiError> {
    let lease = state.models.lease(request.model()).await?;
    let (deadline, streams, urls) = (log.deadline, request.streams(), state.image_urls.clone());
    let answer = async move |model: Arc<LoadedModel>| {
        let mut choices = request.prepare(&model, &urls, &log, permit).await?;
        let renderer = renderer(&model, &choices);
        let first = choices.submit(0)?;
        log.mark_generation();
        match streams {
            true => Ok(renderer::stream(choices, first, renderer)),
            false => renderer::body(choices, first, renderer).await,
        }
    };
    lease.respond(deadline, streams, R::refuse, answer).await
}
