//! `POST /tokenize` and `/detokenize`, as vLLM has them. They do not touch the engine's queue.

use super::{
    Door,
    answers::{Detokenized, Tokenized},
    body, check,
    prompt::{self, Chat},
    reject::Reject,
    types::{DetokenizeRequest, TokenizeRequest},
};
use axum::{Json, body::Body, extract::State};
use std::sync::Arc;

/// The tokens of a `prompt`, or of `messages` (with `tools`) as the chat endpoint would render them.
pub async fn tokenize(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Tokenized>, Reject> {
    let app = door.app()?;
    let request: TokenizeRequest = body::parse(&body::read(body, door.body_limit).await?)?;
    check::model(request.model.as_deref(), &app.card)?;
    let text = match (request.prompt, request.messages) {
        (Some(prompt), None) => prompt,
        (None, Some(messages)) => app.render(&Chat {
            messages: prompt::messages(messages)?,
            tools: prompt::tools(request.tools, None)?,
            kwargs: request.chat_template_kwargs.unwrap_or_default(),
            add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
        })?,
        _ => return Err(Reject::invalid("prompt", "Give either a prompt or messages.")),
    };
    let tokens = app.encode(text).await?;
    let names = || tokens.iter().map(|&id| app.tokenizer.token(id).unwrap_or_default()).collect();
    let token_strs = request.return_token_strs.unwrap_or(false).then(names);
    Ok(Json(Tokenized { count: tokens.len(), max_model_len: app.engine.context(), tokens, token_strs }))
}

/// The text of `tokens`, special ones included.
pub async fn detokenize(State(door): State<Arc<Door>>, body: Body) -> Result<Json<Detokenized>, Reject> {
    let app = door.app()?;
    let request: DetokenizeRequest = body::parse(&body::read(body, door.body_limit).await?)?;
    check::model(request.model.as_deref(), &app.card)?;
    let ids = check::ids("tokens", &request.tokens, app.engine.vocab())?;
    Ok(Json(Detokenized { prompt: app.text(&ids) }))
}
