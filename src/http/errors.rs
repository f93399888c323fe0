//! Errors at the door: each becomes a status and OpenAI's error object, `{"error": {message, type, param, code}}`.
//!
//! | status | when |
//! |---|---|
//! | 400 | not JSON, a wrong type, a value out of range, something not supported; a prompt longer than the context |
//! | 401 | no API key, or a wrong one |
//! | 403 | a `Host` or an `Origin` that is not allowed |
//! | 404, 405 | no such path or model; the path exists, but not with this method |
//! | 408 | the body did not come |
//! | 413 | a body over the limit, or a request that would take more memory than the plan leaves to requests |
//! | 415 | a body that does not say that it is JSON |
//! | 422 | a well-formed conversation that the model's chat template refuses |
//! | 429 | the queue is full; `Retry-After` says when to try again |
//! | 500 | the model failed: the message says where |
//! | 503 | the model is still loading, the server is shutting down, or other requests hold the memory |
//! | 504 | the request took longer than `--request-timeout` |
//!
//! A stream has sent its 200 by the time the model can fail. It then ends with one `data: {"error": ...}` event, which
//! the OpenAI SDKs raise as an `APIError`; no `finish_reason` and no `[DONE]` pretend that the answer was complete.

use crate::error::{ChatError, EngineError, ModelError};
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

/// OpenAI's error object.
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    pub error: ErrorObject<'a>,
}

#[derive(Debug, Serialize)]
pub struct ErrorObject<'a> {
    pub message: &'a str,
    #[serde(rename = "type")]
    pub kind: &'a str,
    pub param: Option<&'a str>,
    pub code: Option<&'a str>,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

/// A refusal, ready to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, code, param: None, message: message.into(), retry_after: None }
    }

    /// A value that is wrong; `param` names it as the client wrote it, such as `messages[0].role`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID, Some("invalid_value"), message);
        Self { param: Some(param.into()), ..error }
    }

    /// A field that nobody knows, and that cannot have been meant.
    pub fn unknown(param: &str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID, Some("unknown_parameter"), message);
        Self { param: Some(param.into()), ..error }
    }

    /// A request that is right in OpenAI's API but that this server cannot serve.
    pub fn unsupported(param: &str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID, Some("unsupported_parameter"), message);
        Self { param: Some(param.into()), ..error }
    }

    /// A body that is not the JSON that was expected. `path` is where, if a field can be named.
    pub fn json(path: Option<String>, message: impl Into<String>) -> Self {
        let code = if path.is_some() { "invalid_type" } else { "invalid_json" };
        Self { param: path, ..Self::new(StatusCode::BAD_REQUEST, INVALID, Some(code), message) }
    }

    /// The same in the words of another format. `names` are pairs: the name of a field as chat completions have it, or the
    /// beginning of a path into it, and the client's.
    pub fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        let Some(param) = &self.param else { return self };
        let rename = |(ours, theirs): &(&str, &str)| {
            // A name that begins with a bracket stands behind an index.
            let at = param.find(ours).filter(|&at| at == 0 || ours.starts_with(']'))?;
            Some([&param[..at], theirs, &param[at + ours.len()..]].concat())
        };
        if let Some(theirs) = names.iter().find_map(rename) {
            self.message = self.message.replace(param, &theirs);
            self.param = Some(theirs);
        }
        self
    }

    pub fn context(prompt: usize, context: usize, param: &str) -> Self {
        Self::over_context(&prompt.to_string(), context, param)
    }

    /// A prompt that was not tokenized to its end: it has `least` tokens or more.
    pub fn over_context_by(least: usize, context: usize, param: &str) -> Self {
        Self::over_context(&format!("at least {least}"), context, param)
    }

    fn over_context(prompt: &str, context: usize, param: &str) -> Self {
        let message = format!(
            "This model's context length is {context} tokens, and the prompt has {prompt} of them: it leaves no room \
             for an answer. Shorten the prompt, or start the server with a larger --ctx-size."
        );
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID, Some("context_length_exceeded"), message);
        Self { param: Some(param.into()), ..error }
    }

    pub fn unauthorized() -> Self {
        let message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.";
        Self::new(StatusCode::UNAUTHORIZED, INVALID, Some("invalid_api_key"), message)
    }

    pub fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("The model `{asked}` does not exist here. This server serves `{served}`.");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, Some("model_not_found"), message);
        Self { param: Some("model".into()), ..error }
    }

    pub fn no_such_response(id: &str, param: &str) -> Self {
        let message =
            format!("The response `{id}` is not kept here. It was asked not to be, or has made room for others.");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, Some("response_not_found"), message);
        Self { param: Some(param.into()), ..error }
    }

    pub fn no_such_item(id: &str, param: &str) -> Self {
        let message = format!("{param} names the item `{id}`, which no response that is kept here has. Send it whole.");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, Some("item_not_found"), message);
        Self { param: Some(param.into()), ..error }
    }

    pub fn no_such_path(method: &str, path: &str) -> Self {
        let message = format!("Unknown path: {method} {path}");
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("not_found"), message)
    }

    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}.");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, Some("method_not_allowed"), message)
    }

    pub fn too_large(limit: usize) -> Self {
        let message = format!("The body is larger than {limit} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, Some("request_too_large"), message)
    }

    /// A request for which `bytes` would be needed, where at most `most` are ever free.
    pub fn too_much_memory(bytes: usize, most: usize) -> Self {
        let message = format!(
            "This request would take {} MiB of memory; requests have {} MiB here. Make it smaller, or start the server \
             with a larger --memory-limit.",
            bytes.div_ceil(1 << 20),
            most >> 20
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, Some("request_too_large"), message)
    }

    pub fn memory_in_use() -> Self {
        let message = "Other requests hold the memory that this one needs. Try again.";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("memory_in_use"), message);
        Self { retry_after: Some(1), ..error }
    }

    /// Every place for a connection is taken by a request in progress.
    pub fn no_place() -> Self {
        let message = "All connections are busy. Try again.";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("connections_busy"), message);
        Self { retry_after: Some(2), ..error }
    }

    /// A `Host` that is no name of this machine: a web page whose own name was made to point here sends that.
    pub fn wrong_host(host: &str) -> Self {
        let message = format!(
            "This server listens on a loopback address and answers to local names only, not to `{host}`. Start it with \
             --allowed-host {host} if that is meant to be it."
        );
        Self::new(StatusCode::FORBIDDEN, INVALID, Some("host_not_allowed"), message)
    }

    /// A web page of another origin.
    pub fn wrong_origin(origin: &str) -> Self {
        let message =
            format!("Web pages of {origin} may not use this server. Start it with --cors {origin} if they may.");
        Self::new(StatusCode::FORBIDDEN, INVALID, Some("origin_not_allowed"), message)
    }

    /// A body that does not say that it is JSON.
    pub fn not_json() -> Self {
        let message = "The body must be JSON and say so: send the header `Content-Type: application/json` (curl does with \
                       -H 'content-type: application/json').";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, Some("unsupported_media_type"), message)
    }

    pub fn unknown_encoding() -> Self {
        let message = "The body may come as it is or with `Content-Encoding: gzip`, and in no other encoding.";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, Some("unsupported_encoding"), message)
    }

    pub fn slow_body() -> Self {
        let message = "The rest of the body did not come in time.";
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, Some("body_timeout"), message)
    }

    /// A fault of the server's.
    pub fn failed(message: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, None, message)
    }

    pub fn loading() -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("loading"), "The model is still loading.");
        Self { retry_after: Some(5), ..error }
    }

    pub fn not_in_memory(id: &str, loaded: Option<&str>) -> Self {
        let there = loaded.map_or("No model is".into(), |loaded| format!("`{loaded}` is"));
        let message = format!("The model `{id}` is not loaded. {there} in memory.");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, Some("model_not_loaded"), message);
        Self { param: Some("model".into()), ..error }
    }

    /// A model that is on this machine and cannot be served.
    pub fn not_loaded(id: &str, why: &str) -> Self {
        let message = format!("The model `{id}` could not be loaded: {why}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("model_not_loaded"), message)
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The JSON that is sent, in a body or in an event of a stream.
    pub fn body(&self) -> ErrorBody<'_> {
        let Self { kind, code, param, message, .. } = self;
        ErrorBody { error: ErrorObject { message, kind, param: param.as_deref(), code: *code } }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        let failed = |code| Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, code, &*message);
        match error {
            EngineError::QueueFull => {
                let full = "Too many requests are waiting. Try again, or start the server with a larger --max-queue.";
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), full);
                Self { retry_after: Some(2), ..error }
            }
            EngineError::Draining => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                Some("shutting_down"),
                "The server is shutting down.",
            ),
            EngineError::Unloaded => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("model_unloaded"), &*message)
            }
            EngineError::TimedOut => Self::new(StatusCode::GATEWAY_TIMEOUT, SERVER, Some("timeout"), &*message),
            EngineError::Model(ModelError::ContextFull { .. }) | EngineError::PromptTooLong { .. } => {
                Self::new(StatusCode::BAD_REQUEST, INVALID, Some("context_length_exceeded"), &*message)
            }
            EngineError::Model(ModelError::TokenOutOfRange { .. }) | EngineError::EmptyPrompt => {
                Self::new(StatusCode::BAD_REQUEST, INVALID, Some("invalid_value"), &*message)
            }
            EngineError::Model(ModelError::Store(_)) => failed(Some("storage_error")),
            EngineError::Model(_)
            | EngineError::Stopped
            | EngineError::NoLogits
            | EngineError::Constraint(_)
            | EngineError::Panicked(_) => failed(None),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let message = error.to_string();
        match error {
            ChatError::Refused(_) => {
                let code = Some("conversation_refused");
                let error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, INVALID, code, message);
                Self { param: Some("messages".into()), ..error }
            }
            ChatError::Conversation(_) => Self::invalid("messages", message),
            ChatError::Reserved(name) => Self::invalid(format!("chat_template_kwargs.{name}"), message),
            ChatError::Template(_) | ChatError::Tokenizer(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, None, message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For formats that give errors another shape.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, path::PathBuf};

    #[test]
    fn engine_errors_get_the_status_a_client_acts_on() {
        let status = |error: EngineError| ApiError::from(error).status.as_u16();
        assert_eq!(status(EngineError::QueueFull), 429);
        assert_eq!(status(EngineError::Draining), 503);
        assert_eq!(status(EngineError::TimedOut), 504);
        assert_eq!(status(EngineError::Stopped), 500);
        assert_eq!(status(ModelError::ContextFull { context: 8 }.into()), 400);
    }

    #[test]
    fn what_the_template_refuses_is_a_422() {
        let error = ApiError::from(ChatError::Refused("No user query.".into()));
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (422, Some("messages")));
    }

    #[test]
    fn a_failed_read_names_expert_file_and_offset() {
        let read = crate::error::StoreError::Read {
            layer: 3,
            expert: 17,
            file: PathBuf::from("model-00002.safetensors"),
            offset: 4096,
            len: 512,
            source: io::ErrorKind::UnexpectedEof.into(),
        };
        let error = ApiError::from(EngineError::Model(ModelError::Store(read)));
        let body = serde_json::to_value(error.body()).unwrap();
        let message = body["error"]["message"].as_str().unwrap();
        for part in ["layer 3", "expert 17", "model-00002.safetensors", "offset 4096"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(body["error"]["code"], "storage_error");
    }

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let response = ApiError::from(EngineError::QueueFull).into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
    }
}
