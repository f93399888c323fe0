//! Handles a generation request of any API.
//!
//! `request of an API -> GenerationRequest -> prompt text -> token ids -> engine::Request -> logits -> Event -> delta ->
//! SSE frame`
//!
//! A handler parses its API's body into a [`GenerationRequest`] and passes the [`Renderer`] that writes the answer.

use crate::http::{
    ApiError, ServerState,
    layers::{MemoryPermit, RequestLog, body_guard, with_deadline},
    models::LoadedModel,
    output::{Renderer, renderer},
    request::{GenerationRequest, PromptInput},
};
use axum::{extract::FromRequestParts, http::request::Parts, response::Response};
use moestro_engine::QueueShare;
use std::sync::Arc;

/// The server and the log of a request that needs a model. Until a model has been loaded or set as the default, the
/// request gets 503.
pub struct Generator {
    pub state: Arc<ServerState>,
    log: Arc<RequestLog>,
}

impl FromRequestParts<Arc<ServerState>> for Generator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        state.ensure_ready()?;
        let log = parts.extensions.get::<Arc<RequestLog>>().cloned();
        let log = log.ok_or_else(|| ApiError::failed("The request has no log."))?;
        Ok(Self { state: state.clone(), log })
    }
}

impl Generator {
    /// Waits until the requested model is loaded, and returns it.
    pub async fn model(&self, requested: Option<&str>, permit: &MemoryPermit) -> Result<Arc<LoadedModel>, ApiError> {
        let share = QueueShare { client: self.log.client(()), bytes: permit.bytes() };
        self.state.lease(requested, share).await?.wait().await
    }

    /// Number of tokens of a request's prompt. Refuses every request that [`Generator::generate`] refuses, except for a
    /// prompt that is too long.
    pub async fn count_tokens(&self, request: GenerationRequest, mut permit: MemoryPermit) -> Result<usize, ApiError> {
        let request = self.with_remembered_tools(request, &permit).await?;
        // The model may have to be loaded.
        permit.leave_entrance();
        let model = self.model(request.model(), &permit).await?;
        let choices = request.prepare(&model, &self.state.image_urls, &self.log, permit, None).await?;
        Ok(choices.prompts.iter().map(Vec::len).sum())
    }

    /// Remembers the tools of a request, if the server reuses tools. A request without tools gets the tools of the
    /// conversation that it continues.
    async fn with_remembered_tools(
        &self,
        mut request: GenerationRequest,
        permit: &MemoryPermit,
    ) -> Result<GenerationRequest, ApiError> {
        let Some(remembered) = self.state.remembered_tools.clone() else { return Ok(request) };
        if request.common.cache_prompt == Some(false) {
            return Ok(request);
        }
        let key = self.log.key();
        let look_up = move || {
            if let PromptInput::Chat(chat) = &mut request.prompt {
                let owner = (key, request.common.cache_salt.as_deref(), request.common.model.as_deref());
                chat.reused_tools = remembered.find_or_insert(owner, &chat.tools, &chat.messages);
            }
            request
        };
        // The messages may have megabytes of images.
        permit.run(0, look_up).await
    }

    /// Waits for the model, queues the request and answers with one body or a stream.
    ///
    /// If the model must be loaded first, a stream begins immediately, so that the client knows that the server is
    /// working. Every later error, such as an expired deadline, is then reported in the stream.
    pub async fn generate<R: Renderer>(
        self,
        request: GenerationRequest,
        mut permit: MemoryPermit,
        mut renderer: R,
    ) -> Result<Response, ApiError> {
        let held = permit.reserve(renderer.held_bytes())?;
        let held_bytes = held.bytes();
        let request = self.with_remembered_tools(request, &permit).await?;
        let Self { state, log } = self;
        let client = request.common.client(&log);
        let bytes = permit.bytes() + held_bytes;
        let lease = state.lease(request.model(), QueueShare { client, bytes }).await?;
        let streams = request.streams();
        let must_wait = lease.must_wait();
        if must_wait {
            permit.leave_entrance();
        }
        let request_log = log.clone();
        let urls = state.image_urls.clone();
        let ready = async move {
            let model = lease.wait().await?;
            let context = model.engine.context();
            let mut choices = request.prepare(&model, &urls, &request_log, permit, Some(context)).await?;
            choices.request.waiting_bytes = choices.permit.bytes() + held_bytes;
            let first = choices.submit(0)?;
            // Later choices use the same memory.
            choices.request.waiting_bytes = 0;
            request_log.mark_generation();
            Ok((model, choices, first))
        };
        let response = if streams && must_wait {
            let deadline = log.deadline;
            let ready = async move { with_deadline(deadline, ready).await? };
            renderer::stream_later(log, ready, renderer)
        } else {
            let (model, choices, first) = ready.await?;
            renderer.prepare(&model, &choices);
            drop(model);
            if streams {
                renderer::stream(choices, first, renderer)
            } else {
                renderer::body(choices, first, renderer).await?
            }
        };
        Ok(body_guard::hold(response, held))
    }
}
