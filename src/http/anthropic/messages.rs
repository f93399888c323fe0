//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, translated into a [`super::conversation`] and
//! back. `request` is the way in, `answer` the way out.
//!
//! Choices of this server: without `thinking` the model does not reason, as Anthropic documents it, unless the server
//! was started with `--thinking on`; a signature of a thinking block is never checked; what a tool's error was is in its
//! text.

use super::{
    answer::{self, Answer},
    request::MessagesRequest,
};
use crate::http::{
    LoadedModel, ServerState,
    errors::ApiError,
    layers::{
        memory::MemoryPermit,
        request_log::{REQUEST_ID, RequestLog, unique_id},
    },
    output::parts,
    request::{body, fields},
    sse::Frames,
};
use axum::{
    Extension, Json,
    body::Body,
    extract::{Request, State},
    http::HeaderName,
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Anthropic's name for the request's id.
static ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

pub async fn messages(
    State(state): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    state.ensure_ready()?;
    let (request, permit) = read(&state, body).await?;
    if request.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens: Field required"));
    }
    let (lease, streams) = (state.models.lease(request.model()).await?, request.streams());
    let error = |out: &Frames, failure: &ApiError| out.event("error", &answer::error(failure));
    lease.respond(log.deadline, streams, error, move |app| reply(state, app, log, request, permit)).await
}

async fn reply(
    state: Arc<ServerState>,
    app: Arc<LoadedModel>,
    log: Arc<RequestLog>,
    request: MessagesRequest,
    permit: MemoryPermit,
) -> Result<Response, ApiError> {
    let (streams, progress) = (request.streams(), request.tells_progress());
    let conversation = request.conversation(state.keep_billing_header, app.thinking)?;
    let transcript = conversation.submit(&app, &log, permit).await?;
    let answer = Answer::new(format!("msg_{}", unique_id()), app.card.id.clone(), progress);
    match streams {
        true => Ok(parts::stream(transcript, answer, log)),
        false => answer.whole(transcript).await,
    }
}

/// The tokens that a request's prompt has, without generating anything.
pub async fn count_tokens(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Value>, ApiError> {
    state.ensure_ready()?;
    let (request, permit) = read(&state, body).await?;
    let app = state.model(request.model()).await?;
    let conversation = request.conversation(state.keep_billing_header, app.thinking)?;
    Ok(Json(json!({"input_tokens": conversation.count(&app, permit).await?})))
}

/// The request, and a share that has room for its translation, too.
async fn read(state: &ServerState, body: Body) -> Result<(MessagesRequest, MemoryPermit), ApiError> {
    let (request, mut permit) = body::known(state, body, fields::MESSAGES).await?;
    permit.grow(permit.bytes())?;
    Ok((request, permit))
}

/// Gives Anthropic's shape to whatever goes wrong under `/v1/messages`, a missing key or a wrong method included.
pub async fn shape(request: Request, next: Next) -> Response {
    let ours = request.uri().path().trim_start_matches("/v1").starts_with("/messages");
    let mut response = next.run(request).await;
    if !ours {
        return response;
    }
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let mut shaped = (error.status, Json(answer::error(&error))).into_response();
        for (name, value) in response.headers() {
            if !shaped.headers().contains_key(name) && name != axum::http::header::CONTENT_LENGTH {
                shaped.headers_mut().append(name, value.clone());
            }
        }
        response = shaped;
    }
    if let Some(id) = response.headers().get(&REQUEST_ID).cloned() {
        response.headers_mut().insert(ANTHROPIC_ID.clone(), id);
    }
    response
}
