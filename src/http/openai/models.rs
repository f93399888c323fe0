//! `GET /v1/models` and `/v1/models/{id}`: models on this machine.

use crate::http::{ServerState, errors::ApiError};
use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// A model as OpenAI's and Anthropic's APIs describe it. Optional fields are known for the loaded model only.
#[derive(Debug, Default, Serialize)]
pub struct ModelObject {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Context length in tokens, as vLLM names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// The same, as OpenRouter names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
    /// Experts per token, unless the model is dense.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    /// `text`, and `image` if the model sees images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_modalities: Option<Vec<&'static str>>,
    /// The model is in memory. Its experts may still be read on demand.
    pub loaded: bool,
    /// Anthropic's name of `object`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub display_name: String,
    pub created_at: String,
}

#[derive(Debug, Serialize)]
pub struct Capabilities {
    /// The model has a chat template.
    pub chat: bool,
    pub tools: bool,
    /// The model has reasoning tags.
    pub reasoning: bool,
    pub vision: bool,
}

impl ModelObject {
    /// `created` is Unix time in seconds.
    fn new(id: String, created: u64) -> Self {
        let display_name = id.clone();
        let (object, created_at) = ("model", timestamp(created));
        Self { id, object, created, owned_by: "moestro", kind: "model", display_name, created_at, ..Self::default() }
    }
}

pub async fn models(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let models = list(&state).await?;
    // `object` is OpenAI's, the other fields of a page are Anthropic's.
    let [first, last] = [models.first(), models.last()].map(|model| model.map(|model| model.id.clone()));
    Ok(Json(json!({"object": "list", "has_more": false, "first_id": first, "last_id": last, "data": models})))
}

/// One model by its exact id. Unlike the `model` of a request, other names do not stand for it.
pub async fn model(
    State(state): State<Arc<ServerState>>,
    Path(id): Path<String>,
) -> Result<Json<ModelObject>, ApiError> {
    let served = state.models.current_id().unwrap_or_default();
    let mut models = list(&state).await?.into_iter();
    models.find(|model| model.id == id).map(Json).ok_or_else(|| ApiError::no_such_model(&id, &served))
}

/// The loaded model, then the others.
async fn list(state: &ServerState) -> Result<Vec<ModelObject>, ApiError> {
    state.ensure_ready()?;
    let (loaded_id, model) = (state.models.loaded_id(), state.models.model());
    let loaded = model.zip(loaded_id.clone()).map(|(model, id)| ModelObject {
        max_model_len: Some(model.engine.context()),
        context_length: Some(model.engine.context()),
        experts_per_token: model.card.experts_per_token,
        quantization: model.card.quantisation.clone(),
        capabilities: Some(Capabilities {
            chat: model.template.is_some(),
            tools: model.template.is_some(),
            reasoning: model.tokenizer.id("</think>").is_some(),
            vision: model.engine.images().is_some(),
        }),
        input_modalities: Some(match model.engine.images() {
            Some(_) => vec!["text", "image"],
            None => vec!["text"],
        }),
        loaded: true,
        ..ModelObject::new(id, model.card.created)
    });
    let entries = state.models.list().await;
    let others = entries.iter().filter(|entry| loaded_id.as_ref() != Some(&entry.id)).map(|entry| {
        let created = entry.created.duration_since(UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs);
        ModelObject::new(entry.id.clone(), created)
    });
    Ok(loaded.into_iter().chain(others).collect())
}

/// Unix time in the format of RFC 3339.
fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok()).unwrap_or_default().to_string()
}
