//! `POST /tokenize` and `/detokenize`, as vLLM has them. They do not touch the engine's queue.

use super::{
    Door,
    answers::{Detokenized, Tokenized},
    api_error::ApiError,
    body, check,
    prefill::Mark,
    prompt::{self, Chat},
    scores,
    types::{DetokenizeRequest, TokenizeRequest},
};
use axum::{Json, body::Body, extract::State};
use serde_json::{Value, json};
use std::sync::Arc;

/// Memory for each token of an answer: its digits and a comma, and the room that a growing answer has to spare.
const NUMBERED: usize = 24;
/// The same where its text is told, too: a string in memory, and in JSON.
const NAMED: usize = 160;
/// Memory for each byte of a text that is told: the bytes, the text, and in JSON up to six characters for each.
const DECODED: usize = 16;

/// The tokens of a `prompt`, or of `messages` (with `tools`) as the chat endpoint would render them.
pub async fn tokenize(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Tokenized>, ApiError> {
    door.ready()?;
    let (request, mut share) = body::json::<TokenizeRequest>(&door, body).await?;
    let app = door.app(request.model.as_deref()).await?;
    check::model(request.model.as_deref(), &app.card)?;
    let text = match (request.prompt.or(request.content), request.messages) {
        (Some(prompt), None) => prompt,
        (None, Some(messages)) => {
            let mut messages = prompt::messages(messages)?;
            let goes_on = request.continue_final_message.unwrap_or(false);
            let chat = Chat {
                open: if goes_on { Some(Mark::put(&mut messages)?) } else { None },
                messages,
                tools: prompt::tools(request.tools, None)?,
                kwargs: request.chat_template_kwargs.unwrap_or_default(),
                add_generation_prompt: request.add_generation_prompt.unwrap_or(!goes_on),
            };
            app.render(&mut share, chat).await?.0
        }
        _ => return Err(ApiError::invalid("prompt", "Give either a prompt or messages.")),
    };
    // Any text may be counted that memory allows, also one that is longer than the context.
    let (tokens, _) = app.tokenize(&mut share, text, usize::MAX).await?;
    let strings = request.return_token_strs.unwrap_or(false);
    share.add(tokens.len() * if strings { NAMED } else { NUMBERED })?;
    let names = || tokens.iter().map(|&id| app.tokenizer.token(id).unwrap_or_default()).collect();
    let token_strs = strings.then(names);
    Ok(Json(Tokenized { count: tokens.len(), max_model_len: app.engine.context(), tokens, token_strs }))
}

/// The template and limits with which a client renders and counts on its own, as vLLM gives them, for
/// lm-evaluation-harness.
pub async fn info(State(door): State<Arc<Door>>) -> Result<Json<Value>, ApiError> {
    let app = door.app(None).await?;
    let mut info = app.template.as_ref().map_or_else(|| json!({}), |template| template.info().clone());
    info["tokenizer_class"] = "PreTrainedTokenizerFast".into();
    info["model_max_length"] = app.engine.context().into();
    Ok(Json(info))
}

/// The text of `tokens`, special ones included.
pub async fn detokenize(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Detokenized>, ApiError> {
    door.ready()?;
    let (request, mut share) = body::json::<DetokenizeRequest>(&door, body).await?;
    let app = door.app(request.model.as_deref()).await?;
    check::model(request.model.as_deref(), &app.card)?;
    let ids = check::ids("tokens", &request.tokens, app.engine.vocab())?;
    share.add(ids.iter().map(|&id| app.tokenizer.token_bytes(id).len() * DECODED).sum())?;
    let text = scores::text(&app.tokenizer, &ids);
    Ok(Json(Detokenized { content: text.clone(), prompt: text }))
}
