//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, translated into a [`super::conversation`] and
//! back. `request` is the way in, `answer` the way out.
//!
//! Choices of this server: without `thinking` the model does not reason, as Anthropic documents it, unless the server
//! was started with `--thinking on`; a signature of a thinking block is never checked; what a tool's error was is in its
//! text.

mod answer;
mod request;

use super::{
    App, Door,
    access::{REQUEST_ID, RequestLog, unique},
    api_error::ApiError,
    body,
    budget::Share,
    fields,
    stream::Frames,
    wire,
};
use answer::Answer;
use axum::{
    Extension, Json,
    body::Body,
    extract::{Request, State},
    http::HeaderName,
    middleware::Next,
    response::{IntoResponse, Response},
};
use request::MessagesRequest;
use serde_json::{Value, json};
use std::sync::Arc;

/// Anthropic's name for the request's id.
static ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

pub async fn messages(
    State(door): State<Arc<Door>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    door.ready()?;
    let (request, share) = read(&door, body).await?;
    if request.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens: Field required"));
    }
    let (seat, streams) = (door.models.seat(request.model()).await?, request.streams());
    let error = |out: &Frames, failure: &ApiError| out.event("error", &answer::error(failure));
    seat.then(log.deadline, streams, error, move |app| reply(door, app, log, request, share)).await
}

async fn reply(
    door: Arc<Door>,
    app: Arc<App>,
    log: Arc<RequestLog>,
    request: MessagesRequest,
    share: Share,
) -> Result<Response, ApiError> {
    let (streams, progress) = (request.streams(), request.tells_progress());
    let conversation = request.conversation(door.keep_billing_header, app.thinking)?;
    let transcript = conversation.submit(&app, &log, share).await?;
    let answer = Answer::new(format!("msg_{}", unique()), app.card.id.clone(), progress);
    match streams {
        true => Ok(wire::stream(transcript, answer, log)),
        false => answer.whole(transcript).await,
    }
}

/// The tokens that a request's prompt has, without generating anything.
pub async fn count_tokens(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Value>, ApiError> {
    door.ready()?;
    let (request, share) = read(&door, body).await?;
    let app = door.app(request.model()).await?;
    let conversation = request.conversation(door.keep_billing_header, app.thinking)?;
    Ok(Json(json!({"input_tokens": conversation.count(&app, share).await?})))
}

/// The request, and a share that has room for its translation, too.
async fn read(door: &Door, body: Body) -> Result<(MessagesRequest, Share), ApiError> {
    let (request, mut share) = body::known(door, body, fields::MESSAGES).await?;
    share.add(share.bytes())?;
    Ok((request, share))
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
