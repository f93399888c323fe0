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

use super::{
    App, Door,
    access::{RequestLog, unique},
    api_error::ApiError,
    body,
    budget::Share,
    fields, held,
    stream::Frames,
    wire,
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
    State(door): State<Arc<Door>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    door.ready()?;
    let (request, share) = body::known::<ResponsesRequest>(&door, body, fields::RESPONSES).await?;
    request.check()?;
    let (seat, streams) = (door.models.seat(request.model.as_deref()).await?, request.streams());
    let error = |out: &Frames, failure: &ApiError| {
        let event = json!({"type": "error", "sequence_number": 0, "code": "server_error", "message": failure.message(), "param": null});
        out.event("error", &event);
    };
    seat.then(log.deadline, streams, error, move |app| reply(door, app, log, request, share)).await
}

async fn reply(
    door: Arc<Door>,
    app: Arc<App>,
    log: Arc<RequestLog>,
    mut request: ResponsesRequest,
    mut share: Share,
) -> Result<Response, ApiError> {
    // The items are translated.
    let mut count = |bytes: usize| share.add(share.bytes() + 2 * bytes);
    let history = match &request.previous_response_id {
        Some(id) => {
            let kept = door.responses.history(id, count)?;
            kept.ok_or_else(|| ApiError::no_such_response(id, "previous_response_id"))?
        }
        None => {
            count(0)?;
            Vec::new()
        }
    };
    let input = request.input(&door.responses, &mut share)?;
    let answer = Answer::new(format!("resp_{}", unique()), &app, &request, door.clone(), input.clone());
    let mut told = door.budget.share();
    told.hold(answer.bytes())?;
    let streams = request.streams();
    let new = input.len();
    let conversation = request.conversation(&[history, input].concat(), new)?;
    let transcript = conversation.submit(&app, &log, share).await?;
    let response = match streams {
        true => wire::stream(transcript, answer, log),
        false => answer.whole(transcript).await?,
    };
    Ok(held::with(response, told))
}

pub async fn get(State(door): State<Arc<Door>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let text = door.responses.get(&id).ok_or_else(|| ApiError::no_such_response(&id, "response_id"))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

pub async fn delete(State(door): State<Arc<Door>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    match door.responses.remove(&id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ApiError::no_such_response(&id, "response_id")),
    }
}
