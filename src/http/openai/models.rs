//! `GET /v1/models` and `/v1/models/{id}`: the models on this machine.

use crate::http::{ServerState, errors::ApiError};
use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{sync::Arc, time::UNIX_EPOCH};

#[derive(Debug, Serialize)]
pub struct Model {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Context length in tokens, under vLLM's name; like most of the rest only known of a model that is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// The same under OpenRouter's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
    /// Experts that each token visits, if the model has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<usize>,
    /// The encoding of the weights, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    /// Its weights are in memory, or its experts on the way there as they are asked for.
    pub loaded: bool,
    /// The last three are what Anthropic says of a model.
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub display_name: String,
    pub created_at: String,
}

#[derive(Debug, Serialize)]
pub struct Capabilities {
    /// It has a template for conversations, and so for tools.
    pub chat: bool,
    pub tools: bool,
    /// It has tags for reasoning.
    pub reasoning: bool,
    pub vision: bool,
}

pub async fn models(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let cards = cards(&state).await?;
    // OpenAI's list and Anthropic's page have different names for what is around it.
    let [first, last] = [cards.first(), cards.last()].map(|card| card.map(|card| card.id.clone()));
    Ok(Json(json!({"object": "list", "has_more": false, "first_id": first, "last_id": last, "data": cards})))
}

/// Unlike a request's `model`, this must be the model's very id: a client asks what there is.
pub async fn model(State(state): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Json<Model>, ApiError> {
    let served = state.models.current_id().unwrap_or_default();
    let mut cards = cards(&state).await?.into_iter();
    cards.find(|card| card.id == id).map(Json).ok_or_else(|| ApiError::no_such_model(&id, &served))
}

/// The model that is loaded, then the others on this machine.
async fn cards(state: &ServerState) -> Result<Vec<Model>, ApiError> {
    state.ensure_ready()?;
    let (loaded, app) = (state.models.loaded_id(), state.models.model());
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
    let listed = state.models.list().await;
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
