//! `GET /health`, `/metrics`, `/v1/models` and `/v1/models/{id}`; `DELETE /prompt_cache`.

use super::{
    App, Door,
    answers::{Capabilities, Model},
    reject::Reject,
};
use crate::metrics;
use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
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
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = failed;
    }

    fn degraded(&self) -> Option<String> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.as_ref().filter(|(at, _)| at.elapsed() < FORGET).map(|(_, why)| why.clone())
    }
}

/// 200 when a request would be accepted or queued and, as far as is known, answered; else 503.
pub async fn health(State(door): State<Arc<Door>>) -> Response {
    let not_ready = |status: &str| (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": status}))).into_response();
    if door.closing() {
        return not_ready("shutting_down");
    }
    let Ok(app) = door.app() else { return not_ready("loading") };
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
    if let Some(reason) = degraded {
        body["reason"] = reason.into();
    }
    (status, Json(body)).into_response()
}

/// Empties the prompt cache.
pub async fn clear_prompt_cache(State(door): State<Arc<Door>>) -> Result<StatusCode, Reject> {
    door.app()?.engine.clear_prompt_cache();
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

pub async fn models(State(door): State<Arc<Door>>) -> Result<Json<Value>, Reject> {
    let card = card(door.app()?);
    // OpenAI's list and Anthropic's page of one have different names for what is around it.
    Ok(Json(json!({"object": "list", "has_more": false, "first_id": card.id, "last_id": card.id, "data": [card]})))
}

/// Unlike a request's `model`, this must be the model's very id: a client asks what there is.
pub async fn model(State(door): State<Arc<Door>>, Path(id): Path<String>) -> Result<Response, Reject> {
    let app = door.app()?;
    match id == app.card.id {
        true => Ok(Json(card(app)).into_response()),
        false => Err(Reject::no_such_model(&id, &app.card.id)),
    }
}

fn card(app: &App) -> Model<'_> {
    Model {
        id: &app.card.id,
        object: "model",
        created: app.card.created,
        owned_by: "moestro",
        max_model_len: app.engine.context(),
        context_length: app.engine.context(),
        experts_per_token: app.card.experts_per_token,
        quantization: app.card.quantisation.as_deref(),
        capabilities: Capabilities {
            chat: app.template.is_some(),
            tools: app.template.is_some(),
            reasoning: app.tokenizer.id("</think>").is_some(),
            vision: false,
        },
        loaded: true,
        kind: "model",
        display_name: &app.card.id,
        created_at: i64::try_from(app.card.created)
            .ok()
            .and_then(|seconds| jiff::Timestamp::from_second(seconds).ok())
            .unwrap_or_default()
            .to_string(),
    }
}
