//! `GET /health`, `/metrics`, `/v1/models` and `/v1/models/{id}`; `DELETE /prompt_cache`,
//! `GET /experts`, `POST /models/unload`.

use super::{
    Door, access,
    answers::{Capabilities, Model},
    api_error::ApiError,
    body,
};
use crate::metrics;
use axum::{
    Json,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
};

/// A failure of the storage counts this long if nothing is asked of it since: a router that sends requests to healthy
/// servers only would never learn that it is well again.
const FORGET: Duration = Duration::from_secs(60);

/// The state of the model's files, as the last answers found it.
#[derive(Default)]
pub struct Health {
    failed: Mutex<Option<(Instant, String)>>,
}

impl Health {
    /// An answer failed for want of storage, or was complete.
    pub fn storage(&self, failed: Option<&dyn std::fmt::Display>) {
        let failed = failed.map(|why| (Instant::now(), why.to_string()));
        *self.failed.lock() = failed;
    }

    fn degraded(&self) -> Option<String> {
        let failed = self.failed.lock();
        failed.as_ref().filter(|(at, _)| at.elapsed() < FORGET).map(|(_, why)| why.clone())
    }
}

/// 200 when a request would be accepted or queued and, as far as is known, answered; else 503. Where there is a key, paths of
/// this machine are told only to who has it.
pub async fn health(State(door): State<Arc<Door>>, request: Request) -> Response {
    let trusted = access::trusts(&door, &request);
    let not_ready = |status: &str| (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status}))).into_response();
    if door.closing() {
        return not_ready("shutting_down");
    }
    if door.ready().is_err() {
        return not_ready("loading");
    }
    // Between two models, and after one has given its memory back: a request would wait, and be answered.
    let Some(app) = door.models.app() else {
        let (version, next) = (env!("CARGO_PKG_VERSION"), door.models.name());
        return Json(json!({"status": "ok", "model": null, "next": next, "version": version})).into_response();
    };
    let (running, queued) = app.engine.load();
    let waiting = app.engine.waiting().into_iter().enumerate();
    let queue: Vec<_> = waiting
        .map(|(index, (prompt, waited))| {
            let seconds = (waited.as_secs_f64() * 1e3).round() / 1e3;
            json!({"position": index + 1, "prompt_tokens": prompt, "waiting_seconds": seconds})
        })
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let degraded = door.health.degraded();
    let status = if degraded.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let mut body = json!({
        "status": if degraded.is_some() { "degraded" } else { "ok" },
        "model": app.card.id,
        "version": version,
        "context": app.engine.context(),
        "requests": {"running": running, "queued": queued},
        "queue": queue,
        "plan": app.plan,
        "prompt_cache": app.engine.prompt_cache(),
    });
    if let Some(disk) = body["prompt_cache"]["disk"].as_object_mut().filter(|_| !trusted) {
        disk.shift_remove("dir");
    }
    if let Some(reason) = degraded {
        body["reason"] = if trusted { reason } else { "the model's files cannot be read".into() }.into();
    }
    // Answers are right all the same, so this is no reason to send requests elsewhere.
    let damaged = door.metrics.pack_damaged_records.get();
    if damaged > 0 {
        let note = "damaged records are read from the checkpoint instead; `moestro pack` makes a new one";
        body["pack"] = json!({"damaged_records": damaged, "note": note});
    }
    if door.metrics.gpu_lost.get() > 0 {
        let note = "the GPU was given up after an error, and the CPU computes; a new start may find it well again";
        body["gpu"] = json!({"lost": true, "note": note});
    }
    (status, Json(body)).into_response()
}

/// Empties the prompt cache, on the disk of models that are not loaded, too.
pub async fn clear_prompt_cache(State(door): State<Arc<Door>>) -> Result<StatusCode, ApiError> {
    door.ready()?;
    door.models.forget_prompts().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// In Prometheus' text format, or in OpenMetrics for whoever asks for it.
pub async fn metrics(State(door): State<Arc<Door>>, headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (kind, text) = match accepts.contains("application/openmetrics-text") {
        true => (metrics::OPENMETRICS, door.metrics.render_openmetrics()),
        false => (metrics::CONTENT_TYPE, door.metrics.render()),
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

pub async fn models(State(door): State<Arc<Door>>) -> Result<Json<Value>, ApiError> {
    let cards = cards(&door).await?;
    // OpenAI's list and Anthropic's page have different names for what is around it.
    let [first, last] = [cards.first(), cards.last()].map(|card| card.map(|card| card.id.clone()));
    Ok(Json(json!({"object": "list", "has_more": false, "first_id": first, "last_id": last, "data": cards})))
}

/// Unlike a request's `model`, this must be the model's very id: a client asks what there is.
pub async fn model(State(door): State<Arc<Door>>, Path(id): Path<String>) -> Result<Json<Model>, ApiError> {
    let served = door.models.name().unwrap_or_default();
    let mut cards = cards(&door).await?.into_iter();
    cards.find(|card| card.id == id).map(Json).ok_or_else(|| ApiError::no_such_model(&id, &served))
}

/// `POST /models/unload` with `{"model": id}`, as llama-server has it: the model gives its memory back after the answers under
/// way, and is loaded again when it is asked.
pub async fn unload(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, _share) = body::json::<Unload>(&door, body).await?;
    match door.models.stop(&request.model) {
        true => Ok(Json(json!({"success": true}))),
        false => Err(ApiError::not_in_memory(&request.model, door.models.loaded().as_deref())),
    }
}

#[derive(Deserialize)]
pub struct Unload {
    model: String,
}

/// Which experts are in memory, and how often each was asked for: a text a layer, see [`crate::metrics::Board::layers`].
pub async fn experts(State(door): State<Arc<Door>>) -> Json<Value> {
    Json(json!({"layers": door.metrics.board().layers()}))
}

/// The model that is loaded, then the others on this machine.
async fn cards(door: &Door) -> Result<Vec<Model>, ApiError> {
    door.ready()?;
    let (loaded, app) = (door.models.loaded(), door.models.app());
    let here = app.zip(loaded.clone()).map(|(app, id)| Model {
        id,
        object: "model",
        created: app.card.created,
        owned_by: "moestro",
        max_model_len: Some(app.engine.context()),
        context_length: Some(app.engine.context()),
        experts_per_token: app.card.experts_per_token,
        quantization: app.card.quantisation.clone(),
        capabilities: Some(Capabilities {
            chat: app.template.is_some(),
            tools: app.template.is_some(),
            reasoning: app.tokenizer.id("</think>").is_some(),
            vision: false,
        }),
        loaded: true,
        kind: "model",
        display_name: app.card.id.clone(),
        created_at: timestamp(app.card.created),
    });
    let listed = door.models.listed().await;
    let others = listed.iter().filter(|model| loaded.as_ref() != Some(&model.id)).map(|model| {
        let created = model.created.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Model {
            id: model.id.clone(),
            object: "model",
            created,
            owned_by: "moestro",
            max_model_len: None,
            context_length: None,
            experts_per_token: None,
            quantization: None,
            capabilities: None,
            loaded: false,
            kind: "model",
            display_name: model.id.clone(),
            created_at: timestamp(created),
        }
    });
    Ok(here.into_iter().chain(others).collect())
}

/// Seconds since 1970 as RFC 3339 has them.
fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok()).unwrap_or_default().to_string()
}
