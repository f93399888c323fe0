//! `POST /tokenize` and `/detokenize`, as vLLM has them. They do not touch the engine's queue.

use crate::http::{
    ServerState,
    errors::ApiError,
    output::completion_logprobs,
    request::{ChatPrompt, body, continue_final::EndMarker, messages, sampling_params as params, tools},
};
use axum::{Json, body::Body, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Memory for each token of an answer: its digits and a comma, and the room that a growing answer has to spare.
const NUMBERED: usize = 24;
/// The same where its text is told, too: a string in memory, and in JSON.
const NAMED: usize = 160;
/// Memory for each byte of a text that is told: the bytes, the text, and in JSON up to six characters for each.
const DECODED: usize = 16;

/// `POST /tokenize`: a `prompt`, or `messages` rendered by the model's template.
#[derive(Debug, Deserialize)]
pub struct TokenizeRequest {
    pub model: Option<String>,
    /// As vLLM names it.
    pub prompt: Option<String>,
    /// As llama-server does.
    pub content: Option<String>,
    pub messages: Option<Vec<Value>>,
    pub tools: Option<Vec<Value>>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub return_token_strs: Option<bool>,
}

/// `POST /detokenize`.
#[derive(Debug, Deserialize)]
pub struct DetokenizeRequest {
    pub model: Option<String>,
    pub tokens: Vec<i64>,
}

#[derive(Debug, Serialize)]
pub struct Tokenized {
    pub count: usize,
    pub max_model_len: usize,
    pub tokens: Vec<u32>,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
pub struct Detokenized {
    /// As vLLM names it.
    pub prompt: String,
    /// As llama-server does.
    pub content: String,
}

/// The tokens of a `prompt`, or of `messages` (with `tools`) as the chat endpoint would render them.
pub async fn tokenize(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Tokenized>, ApiError> {
    state.ensure_ready()?;
    let (request, mut permit) = body::json::<TokenizeRequest>(&state, body).await?;
    let app = state.model(request.model.as_deref()).await?;
    params::check_model(request.model.as_deref(), &app.card)?;
    let text = match (request.prompt.or(request.content), request.messages) {
        (Some(prompt), None) => prompt,
        (None, Some(messages)) => {
            let mut messages = messages::checked(messages)?;
            let continues = request.continue_final_message.unwrap_or(false);
            let chat = ChatPrompt {
                end_marker: if continues { Some(EndMarker::insert(&mut messages)?) } else { None },
                messages,
                tools: tools::offered(request.tools, None)?,
                kwargs: request.chat_template_kwargs.unwrap_or_default(),
                add_generation_prompt: request.add_generation_prompt.unwrap_or(!continues),
                default_thinking: None,
            };
            app.render(&mut permit, chat).await?.0
        }
        _ => return Err(ApiError::invalid("prompt", "Give either a prompt or messages.")),
    };
    // Any text may be counted that memory allows, also one that is longer than the context.
    let (tokens, _) = app.tokenize(&mut permit, text, usize::MAX).await?;
    let strings = request.return_token_strs.unwrap_or(false);
    permit.grow(tokens.len() * if strings { NAMED } else { NUMBERED })?;
    let names = || tokens.iter().map(|&id| app.tokenizer.token(id).unwrap_or_default()).collect();
    let token_strs = strings.then(names);
    Ok(Json(Tokenized { count: tokens.len(), max_model_len: app.engine.context(), tokens, token_strs }))
}

/// The template and limits with which a client renders and counts on its own, as vLLM gives them, for
/// lm-evaluation-harness.
pub async fn info(State(state): State<Arc<ServerState>>) -> Result<Json<Value>, ApiError> {
    let app = state.model(None).await?;
    let mut info = app.template.as_ref().map_or_else(|| json!({}), |template| template.info().clone());
    info["tokenizer_class"] = "PreTrainedTokenizerFast".into();
    info["model_max_length"] = app.engine.context().into();
    Ok(Json(info))
}

/// The text of `tokens`, special ones included.
pub async fn detokenize(State(state): State<Arc<ServerState>>, body: Body) -> Result<Json<Detokenized>, ApiError> {
    state.ensure_ready()?;
    let (request, mut permit) = body::json::<DetokenizeRequest>(&state, body).await?;
    let app = state.model(request.model.as_deref()).await?;
    params::check_model(request.model.as_deref(), &app.card)?;
    let ids = params::token_ids("tokens", &request.tokens, app.engine.vocab())?;
    permit.grow(ids.iter().map(|&id| app.tokenizer.token_bytes(id).len() * DECODED).sum())?;
    let text = completion_logprobs::text(&app.tokenizer, &ids);
    Ok(Json(Detokenized { content: text.clone(), prompt: text }))
}
