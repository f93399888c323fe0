//! `GET /v1/models`, `/v1/models/{id}` and `/api/v0/models`: models on this machine.

use crate::http::{
    ApiError, ServerState,
    models::{CLAUDE_PREFIX, plain_name},
    request::PathId,
};
use axum::{
    Json,
    extract::{RawQuery, State},
    http::HeaderMap,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// Header that Anthropic's clients send.
const ANTHROPIC_VERSION: &str = "anthropic-version";

/// A model as OpenAI's and Anthropic's APIs describe it. Optional fields are set only for the loaded model.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ModelObject {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Context length in tokens, under vLLM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// Context length in tokens, under OpenRouter's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
    /// Context length in tokens, under Anthropic's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_input_tokens: Option<usize>,
    /// Number of experts per token. Absent for a dense model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts_per_token: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    /// `text`, and `image` if the model sees images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_modalities: Option<Vec<&'static str>>,
    /// Bytes of the weight files. Absent if the served model is not in the list of models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// True if the model is in memory. The model's experts may still be read on demand.
    pub loaded: bool,
    /// Anthropic's name of `object`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub display_name: String,
    /// Anthropic's stage of a model. No model of this server is retired.
    pub lifecycle: &'static str,
    pub created_at: String,
}

#[derive(Debug, Clone, Serialize)]
pub struct Capabilities {
    /// True if the model has a chat template.
    pub chat: bool,
    pub tools: bool,
    /// True if the model has reasoning tags.
    pub reasoning: bool,
    pub vision: bool,
}

impl ModelObject {
    /// `created` is Unix time in seconds.
    fn new(id: String, created: u64) -> Self {
        let display_name = id.clone();
        let object = "model";
        let created_at = timestamp(created);
        Self {
            id,
            object,
            created,
            owned_by: "moestro",
            kind: "model",
            display_name,
            lifecycle: "active",
            created_at,
            ..Self::default()
        }
    }
}

/// The list of models, for the clients of three APIs:
///
/// * OpenAI clients read `data`.
/// * Anthropic clients send the header `anthropic-version`. For them, `data` also has each model under a second id,
///   which Claude Code shows. Their `capabilities` are an object of Anthropic's, which the models do not have.
/// * Codex sends `client_version` and reads `models`. The list `models` is empty, because an entry would need the
///   instructions that Codex sends for a model.
pub async fn models(
    State(state): State<Arc<ServerState>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let mut models = list(&state).await?;
    if headers.contains_key(ANTHROPIC_VERSION) {
        models.iter_mut().for_each(|model| model.capabilities = None);
        let alias = |model: &ModelObject| ModelObject { id: format!("{CLAUDE_PREFIX}{}", model.id), ..model.clone() };
        let aliases: Vec<_> = models.iter().map(alias).collect();
        models.extend(aliases);
    }
    // `object` is OpenAI's field. The other fields of a page are Anthropic's fields.
    let [first, last] = [models.first(), models.last()].map(|model| model.map(|model| model.id.clone()));
    let mut page = json!({"object": "list", "has_more": false, "first_id": first, "last_id": last, "data": models});
    if query.is_some_and(|query| query.split('&').any(|pair| pair.starts_with("client_version="))) {
        page["models"] = json!([]);
    }
    Ok(Json(page))
}

/// Describes one model, given by its exact id. Generation requests also accept other names of a model.
pub async fn model(
    State(state): State<Arc<ServerState>>,
    PathId(id): PathId,
    headers: HeaderMap,
) -> Result<Json<ModelObject>, ApiError> {
    let served = state.models.current_id().unwrap_or_default();
    let id = id.trim_end_matches('/');
    let mut models = list(&state).await?.into_iter();
    let known = models.find(|model| model.id == plain_name(id)).ok_or_else(|| ApiError::no_such_model(id, &served))?;
    let capabilities = known.capabilities.filter(|_| !headers.contains_key(ANTHROPIC_VERSION));
    Ok(Json(ModelObject { id: id.to_owned(), capabilities, ..known }))
}

/// `GET /api/v0/models`: LM Studio's list, with context and capabilities.
pub async fn lm_studio(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let entry = |model: ModelObject| {
        let can = |test: fn(&Capabilities) -> bool| model.capabilities.as_ref().is_some_and(test);
        json!({
            "id": model.id,
            "object": "model",
            "type": if can(|capabilities| capabilities.vision) { "vlm" } else { "llm" },
            "publisher": model.id.split_once('/').map_or("local", |(publisher, _)| publisher),
            "compatibility_type": "mlx",
            "quantization": model.quantization,
            "state": if model.loaded { "loaded" } else { "not-loaded" },
            "max_context_length": model.context_length,
            "loaded_context_length": model.context_length,
            "capabilities": if can(|capabilities| capabilities.tools) { &["tool_use"][..] } else { &[] },
        })
    };
    let models: Vec<Value> = list(&state).await?.into_iter().map(entry).collect();
    Ok(Json(json!({"object": "list", "data": models})))
}

/// Lists the loaded model first, then the other models.
pub async fn list(state: &ServerState) -> Result<Vec<ModelObject>, ApiError> {
    state.ensure_ready()?;
    let entries = state.models.list().await;
    let loaded_id = state.models.loaded_id();
    let model = state.models.model();
    let size = |id: &String| entries.iter().find(|entry| entry.id == *id).map(|entry| entry.size);
    let loaded = model.zip(loaded_id.clone()).map(|(model, id)| ModelObject {
        max_model_len: Some(model.engine.context()),
        context_length: Some(model.engine.context()),
        max_input_tokens: Some(model.engine.context()),
        experts_per_token: model.card.experts_per_token,
        quantization: model.card.quantization.clone(),
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
        size: size(&id),
        loaded: true,
        ..ModelObject::new(id, model.card.created)
    });
    let others = entries.iter().filter(|entry| loaded_id.as_ref() != Some(&entry.id)).map(|entry| {
        let created = entry.created.duration_since(UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs);
        ModelObject { size: Some(entry.size), ..ModelObject::new(entry.id.clone(), created) }
    });
    Ok(loaded.into_iter().chain(others).collect())
}

/// Unix time in the format of RFC 3339.
fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok()).unwrap_or_default().to_string()
}
