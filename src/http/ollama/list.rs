//! `GET /api/version`, `/api/tags` and `/api/ps`, `POST /api/show`: models as Ollama's clients list them.

use crate::http::{
    ApiError, ServerState,
    models::plain_name,
    openai::models::{self, ModelObject},
    request::body,
};
use axum::{Json, body::Body, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Version of Ollama whose API is implemented here. VS Code refuses versions before 0.6.4.
const VERSION: &str = "0.12.6";

/// Model family that is reported to clients. Clients read the context length from the key `qwen3_5.context_length`.
const ARCHITECTURE: &str = "qwen3_5";

pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

pub async fn tags(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let models: Vec<Value> = models::list(&state).await?.iter().map(entry).collect();
    Ok(Json(json!({"models": models})))
}

/// The model in memory. `expires_at` is a date far in the future: only `--keep-alive` unloads the model.
pub async fn ps(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let loaded = models::list(&state).await?.into_iter().filter(|model| model.loaded);
    let models = loaded.map(|model| {
        let mut entry = entry(&model);
        entry["expires_at"] = "2318-01-01T00:00:00Z".into();
        entry["size_vram"] = 0.into();
        entry["context_length"] = model.context_length.into();
        entry
    });
    Ok(Json(json!({"models": models.collect::<Vec<_>>()})))
}

#[derive(Debug, Deserialize)]
pub struct ShowRequest {
    model: Option<String>,
    /// Older name of `model`.
    name: Option<String>,
}

pub async fn show(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, _permit) = body::json::<ShowRequest>(&state, body).await?;
    let Some(name) = request.model.or(request.name) else {
        return Err(ApiError::json(Some("model".into()), "missing field `model`"));
    };
    let served = state.models.current_id().unwrap_or_default();
    let mut all = models::list(&state).await?.into_iter();
    let model =
        all.find(|model| model.id == plain_name(&name)).ok_or_else(|| ApiError::no_such_model(&name, &served))?;
    let mut info = json!({"general.architecture": ARCHITECTURE, "general.basename": model.id});
    if let Some(context) = model.context_length {
        info[format!("{ARCHITECTURE}.context_length")] = context.into();
    }
    // The capabilities of a model that is not loaded are unknown. The supported families have templates with tools and
    // reasoning.
    let (tools, thinking, vision) = model
        .capabilities
        .as_ref()
        .map_or((true, true, false), |capabilities| (capabilities.tools, capabilities.reasoning, capabilities.vision));
    let optional = [(tools, "tools"), (thinking, "thinking"), (vision, "vision")];
    let capabilities = optional.into_iter().filter(|(has, _)| *has).map(|(_, name)| name);
    let capabilities: Vec<&str> = ["completion"].into_iter().chain(capabilities).collect();
    Ok(Json(json!({
        "modelfile": "", "parameters": "", "template": "", "details": details(&model), "model_info": info,
        "capabilities": capabilities, "modified_at": model.created_at,
    })))
}

/// A model in a list.
fn entry(model: &ModelObject) -> Value {
    json!({
        "name": model.id, "model": model.id, "modified_at": model.created_at,
        "size": model.size.unwrap_or_default(),
        "digest": hex::encode(Sha256::digest(&model.id)), "details": details(model),
    })
}

fn details(model: &ModelObject) -> Value {
    json!({
        "parent_model": "", "format": "safetensors", "family": ARCHITECTURE, "families": [ARCHITECTURE],
        "parameter_size": "", "quantization_level": model.quantization.as_deref().unwrap_or_default(),
    })
}
