//! `POST /tokenize` and `/detokenize`, as in vLLM, and `GET /tokenizer_info`. These requests do not wait in the
//! engine's queue.

use crate::http::{
    ApiError,
    generate::Generator,
    layers::{body_guard, memory},
    output::completion_logprobs,
    request::{ChatPrompt, EncodedChat, body, messages, sampling_params, tools},
};
use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// `POST /tokenize`: a `prompt`, or `messages` for the model's chat template.
#[derive(Debug, Deserialize)]
pub struct TokenizeRequest {
    pub model: Option<String>,
    /// Text to tokenize, under vLLM's name.
    pub prompt: Option<String>,
    /// Text to tokenize, under llama-server's name.
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

/// Returns the tokens of a `prompt`, or of `messages` and `tools` as the chat endpoint renders them.
pub async fn tokenize(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (request, mut permit) = body::json::<TokenizeRequest>(&server.state, body).await?;
    permit.leave_entrance();
    let model = server.model(request.model.as_deref(), &permit).await?;
    // The prompt may be longer than the context. Only memory limits its length.
    let tokens = match (request.prompt.or(request.content), request.messages) {
        (Some(prompt), None) => model.tokenize(&mut permit, prompt, usize::MAX).await?.0,
        (None, Some(messages)) => {
            let continues = request.continue_final_message.unwrap_or(false);
            let tools = request.tools.unwrap_or_default();
            let read = move || ChatPrompt::new(messages::read(messages)?, continues, tools, tools::chat_path);
            let mut chat = body::translate(&permit, read).await?;
            chat.kwargs = request.chat_template_kwargs.unwrap_or_default();
            chat.add_generation_prompt = request.add_generation_prompt.unwrap_or(!continues);
            let messages = std::mem::take(&mut chat.messages);
            let messages = model.decode_images(&mut permit, messages, &server.state.image_urls, None).await?;
            let EncodedChat { ids, .. } = model.encode_chat(&mut permit, messages, chat, usize::MAX).await?;
            ids
        }
        _ => return Err(ApiError::invalid("prompt", "Send either prompt or messages.")),
    };
    let has_strings = request.return_token_strs.unwrap_or(false);
    permit.grow(memory::token_list_bytes(tokens.len(), has_strings))?;
    let texts = || tokens.iter().map(|&id| model.tokenizer.token(id).unwrap_or_default()).collect();
    let token_strs = has_strings.then(texts);
    let tokenized = Tokenized { count: tokens.len(), max_model_len: model.engine.context(), tokens, token_strs };
    Ok(body_guard::hold(Json(tokenized).into_response(), permit))
}

/// Returns the chat template and the context length in vLLM's format. lm-evaluation-harness uses both to render prompts
/// and to count tokens.
pub async fn info(server: Generator) -> Result<Json<Value>, ApiError> {
    let model = server.model(None, &server.state.memory.permit()).await?;
    let mut info = model.template.as_ref().map_or_else(|| json!({}), |template| template.info().clone());
    info["tokenizer_class"] = "PreTrainedTokenizerFast".into();
    info["model_max_length"] = model.engine.context().into();
    Ok(Json(info))
}

/// Returns the text of `tokens`, including special tokens.
pub async fn detokenize(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (request, mut permit) = body::json::<DetokenizeRequest>(&server.state, body).await?;
    permit.leave_entrance();
    let model = server.model(request.model.as_deref(), &permit).await?;
    let ids = sampling_params::token_ids("tokens", &request.tokens, model.engine.vocab())?;
    permit.grow(memory::decoded_bytes(ids.iter().map(|&id| model.tokenizer.token_bytes(id).len()).sum()))?;
    let text = completion_logprobs::text(&model.tokenizer, &ids);
    // vLLM's name and llama-server's name of the text.
    let body = Json(json!({"prompt": text, "content": text})).into_response();
    Ok(body_guard::hold(body, permit))
}
