//! Administration: `GET /health`, `/metrics` and `/experts`, `DELETE /prompt_cache`, `POST /models/unload`.

use crate::http::{ApiError, ServerState, layers::auth, request::body};
use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use moestro_base::{
    metrics::{self, Metrics},
    platform::os,
};
use moestro_engine::GPU_INTERACTIVITY_REMEDY;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum number of waiting requests that `/health` lists. `requests.queued` is the number of all.
const MAX_LISTED: usize = 32;

/// 200 if the server accepts requests and the model's files could be read and loaded, else 503. If an API key is set,
/// the answer to a request without the key contains no file paths.
pub async fn health(State(state): State<Arc<ServerState>>, request: Request) -> Response {
    let is_authorized = auth::is_authorized(&state, &request);
    let not_ready = |status: &str| (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status}))).into_response();
    if state.is_shutting_down() {
        return not_ready("shutting_down");
    }
    if state.ensure_ready().is_err() {
        return not_ready("loading");
    }
    // No model is in memory, but a request would load a model.
    let Some(model) = state.models.model() else {
        let version = env!("CARGO_PKG_VERSION");
        let next = state.models.current_id();
        let mut body = json!({"status": "ok", "model": null, "next": next, "version": version});
        let Some(why) = state.models.load_failure() else { return Json(body).into_response() };
        body["status"] = "degraded".into();
        body["reason"] = if is_authorized { why } else { "the model cannot be loaded".into() }.into();
        return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    };
    let (running, queued) = model.engine.load();
    let waits_for = if running < model.engine.parallel() { "memory" } else { "requests" };
    let waiting = model.engine.waiting(MAX_LISTED).into_iter().enumerate();
    let queue: Vec<_> = waiting
        .map(|(index, (prompt, waited))| {
            let seconds = (waited.as_secs_f64() * 1e3).round() / 1e3;
            json!({"position": index + 1, "prompt_tokens": prompt, "waiting_seconds": seconds, "waits_for": waits_for})
        })
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let degraded = state.storage_health.failure();
    let status = if degraded.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let mut body = json!({
        "status": if degraded.is_some() { "degraded" } else { "ok" },
        "model": model.card.id,
        "version": version,
        "context": model.engine.context(),
        "requests": {"running": running, "queued": queued},
        "queue": queue,
        "plan": model.plan,
        // `used` is measured. `reserved` is what the memory plan reserves.
        "memory": {"used": os::resident_memory(), "reserved": model.plan["reserved"]},
        "quantization": model.card.quantization,
        "prompt_cache": model.engine.prompt_cache(),
    });
    if let Some(disk) = body["prompt_cache"]["disk"].as_object_mut().filter(|_| !is_authorized) {
        disk.shift_remove("dir");
    }
    if let Some(reason) = degraded {
        body["reason"] = if is_authorized { reason } else { "the model's files cannot be read".into() }.into();
    }
    add_faults(&mut body, &state.metrics);
    (status, Json(body)).into_response()
}

/// Adds the faults that do not change what the model answers. The status stays 200.
fn add_faults(body: &mut Value, metrics: &Metrics) {
    let damaged = metrics.pack_damaged_records.get();
    if damaged > 0 {
        let note = "damaged records are read from the checkpoint instead; run `moestro pack` to write a new pack";
        body["pack"] = json!({"damaged_records": damaged, "note": note});
    }
    let interrupted = metrics.gpu_interactivity_errors.get();
    if interrupted > 0 {
        let note = format!("macOS ended GPU work that delayed the screen; {GPU_INTERACTIVITY_REMEDY}");
        body["gpu"]["interactivity_errors"] = interrupted.into();
        body["gpu"]["remedy"] = note.into();
    }
    if metrics.gpu_lost.get() > 0 {
        let note = "the GPU failed and the CPU computes instead; restart the server to try the GPU again";
        body["gpu"]["lost"] = true.into();
        body["gpu"]["note"] = note.into();
    }
}

/// Clears the prompt cache of the loaded model, and deletes the prompt caches that other models have on disk.
pub async fn clear_prompt_cache(State(state): State<Arc<ServerState>>) -> Result<StatusCode, ApiError> {
    state.ensure_ready()?;
    state.models.clear_prompt_caches().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Metrics in the Prometheus format, or in OpenMetrics if the client accepts it.
pub async fn metrics(State(state): State<Arc<ServerState>>, headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (content_type, text) = if accepts.contains("application/openmetrics-text") {
        (metrics::OPENMETRICS, state.metrics.render_openmetrics())
    } else {
        (metrics::PROMETHEUS, state.metrics.render())
    };
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

/// `POST /models/unload` with `{"model": id}`, compatible with llama-server. Unloads the model after the requests in
/// progress. The next request loads the model again.
pub async fn unload(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, _permit) = body::json::<UnloadRequest>(&state, body).await?;
    let id = state.models.find(&request.model).await;
    if id.is_some_and(|id| state.models.unload(&id)) {
        Ok(Json(json!({"success": true})))
    } else {
        Err(ApiError::not_in_memory(&request.model, state.models.loaded_id().as_deref()))
    }
}

#[derive(Deserialize)]
pub struct UnloadRequest {
    model: String,
}

/// Lists the experts in memory and how often each expert was selected, see [`moestro_base::metrics::ExpertHeatmap::layers`].
pub async fn experts(State(state): State<Arc<ServerState>>) -> Json<Value> {
    Json(json!({"layers": state.metrics.heatmap().layers()}))
}
