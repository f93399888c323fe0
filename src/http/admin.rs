//! `GET /health`, `/metrics`, `/v1/models` and `/v1/models/{id}`; `DELETE /prompt_cache`,
//! `GET /experts`, `POST /models/unload`.

use crate::http::{ServerState, errors::ApiError, layers::auth, request::body};
use crate::metrics;
use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// 200 when a request would be accepted or queued and, as far as is known, answered; else 503. Where there is a key, paths of
/// this machine are told only to who has it.
pub async fn health(State(state): State<Arc<ServerState>>, request: Request) -> Response {
    let trusted = auth::is_authorized(&state, &request);
    let not_ready = |status: &str| (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status}))).into_response();
    if state.is_shutting_down() {
        return not_ready("shutting_down");
    }
    if state.ensure_ready().is_err() {
        return not_ready("loading");
    }
    // Between two models, and after one has given its memory back: a request would wait, and be answered.
    let Some(app) = state.models.model() else {
        let (version, next) = (env!("CARGO_PKG_VERSION"), state.models.current_id());
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
    let degraded = state.storage_health.failure();
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
    let damaged = state.metrics.pack_damaged_records.get();
    if damaged > 0 {
        let note = "damaged records are read from the checkpoint instead; `moestro pack` makes a new one";
        body["pack"] = json!({"damaged_records": damaged, "note": note});
    }
    if state.metrics.gpu_lost.get() > 0 {
        let note = "the GPU was given up after an error, and the CPU computes; a new start may find it well again";
        body["gpu"] = json!({"lost": true, "note": note});
    }
    (status, Json(body)).into_response()
}

/// Empties the prompt cache, on the disk of models that are not loaded, too.
pub async fn clear_prompt_cache(State(state): State<Arc<ServerState>>) -> Result<StatusCode, ApiError> {
    state.ensure_ready()?;
    state.models.clear_prompt_caches().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// In Prometheus' text format, or in OpenMetrics for whoever asks for it.
pub async fn metrics(State(state): State<Arc<ServerState>>, headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (kind, text) = match accepts.contains("application/openmetrics-text") {
        true => (metrics::OPENMETRICS, state.metrics.render_openmetrics()),
        false => (metrics::CONTENT_TYPE, state.metrics.render()),
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// `POST /models/unload` with `{"model": id}`, as llama-server has it: the model gives its memory back after the answers under
/// way, and is loaded again when it is asked.
pub async fn unload(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, _permit) = body::json::<Unload>(&state, body).await?;
    match state.models.unload(&request.model) {
        true => Ok(Json(json!({"success": true}))),
        false => Err(ApiError::not_in_memory(&request.model, state.models.loaded_id().as_deref())),
    }
}

#[derive(Deserialize)]
pub struct Unload {
    model: String,
}

/// Which experts are in memory, and how often each was asked for: a text a layer, see [`crate::metrics::Board::layers`].
pub async fn experts(State(state): State<Arc<ServerState>>) -> Json<Value> {
    Json(json!({"layers": state.metrics.board().layers()}))
}
