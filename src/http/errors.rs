//! API errors: each has a status and OpenAI's error object, `{"error": {message, type, param, code}}`.
//!
//! | status | when |
//! |---|---|
//! | 400 | not JSON, a wrong type, a value out of range, an unsupported field, or a format that cannot be followed |
//! | 400 | a prompt longer than the context |
//! | 401 | no API key, or a wrong one |
//! | 403 | `Host` or `Origin` is not allowed |
//! | 404, 405 | no such path, model or stored response; a path that does not have this method |
//! | 408 | the body did not arrive in time |
//! | 413 | the body is over the limit, or the request needs more memory than the plan has for requests |
//! | 415 | the body is not declared as JSON, or has another encoding than gzip |
//! | 422 | the model's chat template refuses the conversation |
//! | 429 | the queue is full, or gave up the request for another client; `Retry-After` says when to try again |
//! | 500 | the model failed; the message says where |
//! | 503 | no model is loaded yet, or the server is shutting down |
//! | 503 | other requests hold the memory, the connections or the compiler of output formats |
//! | 504 | the request took longer than `--request-timeout` |
//!
//! The status of a stream, 200, is sent before the model can fail. If the model then fails, the stream ends with one
//! `data: {"error": ...}` event, which the OpenAI SDKs raise as an `APIError`. `finish_reason` and `[DONE]` are not
//! sent.

use crate::error::bounded;
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use moestro_chat::error::ChatError;
use moestro_engine::error::EngineError;
use moestro_model::error::ModelError;
use serde_json::{Value, json};
use std::{borrow::Cow, fmt::Display};

/// Code of errors about a full context.
const CONTEXT_EXCEEDED: &str = "context_length_exceeded";
/// Maximum number of bytes of an error's message.
const MAX_MESSAGE: usize = 600;
/// Maximum number of bytes of the path of a field.
const MAX_PATH: usize = 256;
/// Maximum number of bytes of a text of the client in a message.
const MAX_QUOTE: usize = 120;
/// Error code of a full queue.
const QUEUE_FULL: &str = "queue_full";

#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    /// Value of the `Retry-After` header in seconds.
    retry_after: Option<u32>,
    /// Tokens of a prompt that is too long, and the limit that it exceeds.
    lengths: Option<[usize; 2]>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let message = shown(&message.into(), MAX_MESSAGE);
        Self { status, kind, code, param: None, message, retry_after: None, lengths: None }
    }

    fn client(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", Some(code), message)
    }

    fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::client(StatusCode::BAD_REQUEST, code, message)
    }

    fn server(code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", code, message)
    }

    fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some(code), message)
    }

    fn at(self, param: impl Into<String>) -> Self {
        Self { param: Some(path(param.into())), ..self }
    }

    fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// A wrong value. `param` is the path of the value in the request, such as `messages[0].role`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request("invalid_value", message).at(param)
    }

    /// A wrong value. The message is `param` followed by `problem`, such as "must be positive."
    pub fn wrong_value(param: impl Into<String>, problem: impl Display) -> Self {
        let param = path(param.into());
        let message = format!("{param} {problem}");
        Self::invalid(param, message)
    }

    /// A word that is not allowed. `allowed` lists the words that are, such as "`a`, `b` or `c`".
    pub fn not_allowed(param: impl Into<String>, word: &str, allowed: &str) -> Self {
        Self::wrong_value(param, format!("is `{}`; it must be {allowed}.", quote(word)))
    }

    /// A value of the wrong type. The message is `param` followed by `problem`, such as "must be a string."
    pub fn wrong_type(param: impl Into<String>, problem: impl Display) -> Self {
        let param = path(param.into());
        let message = format!("{param} {problem}");
        Self::json(Some(param), message)
    }

    /// An unknown field whose name is close to the name of a known field.
    pub fn unknown(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request("unknown_parameter", message).at(param)
    }

    /// A request that is valid in OpenAI's API but not supported by this server.
    pub fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request("unsupported_parameter", message).at(param)
    }

    /// A body that is not JSON (`param` is `None`), or a field of the wrong type.
    pub fn json(param: Option<String>, message: impl Into<String>) -> Self {
        let code = if param.is_some() { "invalid_type" } else { "invalid_json" };
        Self { param: param.map(path), ..Self::bad_request(code, message) }
    }

    /// A prompt above `--max-prompt-tokens`.
    pub fn prompt_limit(prompt: usize, limit: usize, param: &str) -> Self {
        Self::prompt_too_long([prompt, limit], &prompt_scope(limit), "--max-prompt-tokens.").at(param)
    }

    /// A prompt that leaves no room for an answer in the context.
    pub fn over_context(prompt: usize, context: usize, param: &str) -> Self {
        Self::prompt_over_context(prompt, context).at(param)
    }

    /// A prompt whose first `counted` tokens are more than the limit, which is `--max-prompt-tokens` or the context. The
    /// rest was not counted.
    pub fn over_limit_early(counted: usize, limit: usize, is_prompt_limit: bool, param: &str) -> Self {
        let (scope, flag) = if is_prompt_limit {
            (prompt_scope(limit), "--max-prompt-tokens")
        } else {
            (format!("{limit} tokens"), "--ctx-size")
        };
        let advice = format!("{flag}. The prompt has at least {counted} tokens; the rest was not counted.");
        Self::prompt_too_long([counted, limit], &scope, &advice).at(param)
    }

    fn prompt_over_context(prompt: usize, context: usize) -> Self {
        let (limit, scope) = if prompt == context {
            (context.saturating_sub(1), ", and an answer needs at least one of them")
        } else {
            (context, "")
        };
        Self::prompt_too_long([prompt, limit], &format!("{context} tokens{scope}"), "--ctx-size.")
    }

    /// `lengths` has the tokens of the prompt and their limit. Clients search for most of these words, to shorten a
    /// conversation instead of ending it. `tests/api/context_full.rs` has their patterns.
    fn prompt_too_long(lengths: [usize; 2], context: &str, advice: &str) -> Self {
        let [prompt, limit] = lengths;
        let message = format!(
            "prompt is too long: {prompt} tokens > {limit} maximum. This model's maximum context length is {context}. \
             Please reduce the length of the messages, or start the server with a larger {advice}"
        );
        Self { lengths: Some(lengths), ..Self::bad_request(CONTEXT_EXCEEDED, message) }
    }

    /// A summary of a conversation that was cut off after `tokens` tokens.
    pub fn summary_cut(tokens: usize) -> Self {
        let message = format!(
            "The summary is incomplete: the limit of the answer or of the context ended it after {tokens} tokens. \
             Please reduce the length of the messages, or raise max_output_tokens."
        );
        Self::bad_request(CONTEXT_EXCEEDED, message).at("input")
    }

    /// A conversation that cannot be rendered. `param` names the field with its messages.
    pub fn of_conversation(error: ChatError, param: &str) -> Self {
        let message = error.client_message();
        match error {
            ChatError::Refused(_) => {
                Self::client(StatusCode::UNPROCESSABLE_ENTITY, "conversation_refused", message).at(param)
            }
            ChatError::Conversation(_) => Self::invalid(param, message),
            ChatError::Reserved(name) => Self::invalid(format!("chat_template_kwargs.{name}"), message),
            ChatError::Template(_) | ChatError::Tokenizer(_) | ChatError::File { .. } => Self::failed(&message),
        }
    }

    pub fn unauthorized() -> Self {
        let message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.";
        Self::client(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    pub fn no_such_model(requested: &str, served: &str) -> Self {
        let message = format!("The model `{}` does not exist here. This server serves `{served}`.", quote(requested));
        Self::client(StatusCode::NOT_FOUND, "model_not_found", message).at("model")
    }

    pub fn no_such_response(id: &str, param: &str) -> Self {
        let message = format!(
            "The response `{}` is not stored here. It had `store: false`, was evicted, or the server has been restarted \
             since.",
            quote(id)
        );
        Self::client(StatusCode::NOT_FOUND, "response_not_found", message).at(param)
    }

    pub fn no_such_item(id: &str, param: &str) -> Self {
        let id = quote(id);
        let message = format!("{param} refers to the item `{id}`, which no stored response has. Send the whole item.");
        Self::client(StatusCode::NOT_FOUND, "item_not_found", message).at(param)
    }

    /// `hint` is a sentence about the path, or an empty string.
    pub fn no_such_path(method: &str, path: &str, hint: &str) -> Self {
        let separator = if hint.is_empty() { "" } else { ". " };
        let method = quote(method);
        let path = quote(path);
        Self::client(StatusCode::NOT_FOUND, "not_found", format!("Unknown path: {method} {path}{separator}{hint}"))
    }

    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{} does not support {}.", quote(path), quote(method));
        Self::client(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    pub fn too_large(limit: usize) -> Self {
        let message = format!("The body is larger than {limit} bytes.");
        Self::client(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// A request that needs `bytes` of memory. The memory plan has `limit` bytes for all requests.
    pub fn too_much_memory(bytes: usize, limit: usize) -> Self {
        let message = format!(
            "This request needs {} MiB of memory, and the server has {} MiB for requests. Make it smaller, or start the \
             server with a larger --memory-limit.",
            bytes.div_ceil(1 << 20),
            limit >> 20
        );
        Self::client(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    pub fn memory_in_use() -> Self {
        let message = "Other requests hold the memory that this one needs. Try again.";
        Self::unavailable("memory_in_use", message).retry_after(1)
    }

    /// An image whose download waited too long for the downloads of other requests.
    pub fn downloads_busy() -> Self {
        let message = "Images of other requests are being downloaded. Try again.";
        Self::unavailable("downloads_busy", message).retry_after(2)
    }

    /// An output format whose compilation waited too long, because other formats were compiled first.
    pub fn compiler_busy() -> Self {
        let message = "Other output formats are being compiled. Try again.";
        Self::unavailable("compiler_busy", message).retry_after(2)
    }

    /// All connection slots have a request in progress.
    pub fn no_connection_slot() -> Self {
        Self::unavailable("connections_busy", "All connections are busy. Try again.").retry_after(2)
    }

    /// A `Host` that is not a name of this machine. A web page that uses DNS rebinding sends its host's name.
    pub fn wrong_host(host: &str) -> Self {
        let host = quote(host);
        let message = format!(
            "The host `{host}` is not allowed: this server accepts local names only. If it is a name of this server, \
             start it with --allowed-host {host}."
        );
        Self::client(StatusCode::FORBIDDEN, "host_not_allowed", message)
    }

    /// A web page of another origin.
    pub fn wrong_origin(origin: &str) -> Self {
        let origin = quote(origin);
        let message = format!(
            "Web pages of {origin} are not allowed to use this server. To allow them, start it with --cors {origin}."
        );
        Self::client(StatusCode::FORBIDDEN, "origin_not_allowed", message)
    }

    /// A body that is not declared as JSON.
    pub fn not_json() -> Self {
        let message = "The body must be JSON with the header `Content-Type: application/json` (curl: \
                       -H 'content-type: application/json').";
        Self::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    pub fn unknown_encoding() -> Self {
        let message = "The only supported encoding of a body is `Content-Encoding: gzip`.";
        Self::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message)
    }

    pub fn slow_body() -> Self {
        let message = "The rest of the body did not arrive in time.";
        Self::client(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    }

    /// An internal error. `message` has no directories.
    pub fn failed(message: &str) -> Self {
        Self::server(None, message)
    }

    pub fn loading() -> Self {
        Self::unavailable("loading", "The model is still loading.").retry_after(5)
    }

    /// A request to unload a model that is not in memory.
    pub fn not_in_memory(id: &str, loaded: Option<&str>) -> Self {
        let loaded = loaded.map_or("No model is".into(), |loaded| format!("`{loaded}` is"));
        let message = format!("The model `{}` is not loaded. {loaded} in memory.", quote(id));
        Self::client(StatusCode::NOT_FOUND, "model_not_loaded", message).at("model")
    }

    /// A model that is on this machine and cannot be loaded. `why` has no directories.
    pub fn not_loaded(id: &str, why: &str) -> Self {
        Self::server(Some("model_not_loaded"), format!("The model `{}` could not be loaded: {why}", quote(id)))
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The field of the request that is wrong.
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// True if a queue refused the request or gave it up.
    pub fn is_queue_full(&self) -> bool {
        self.code == Some(QUEUE_FULL)
    }

    /// The error as JSON, for a body or for an event of a stream.
    pub fn body(&self) -> Value {
        let Self { kind, code, param, message, lengths, .. } = self;
        let mut error = json!({"message": message, "type": kind, "param": param, "code": code});
        if let Some([prompt, limit]) = lengths {
            // Clients of llama-server read these fields.
            error["n_prompt_tokens"] = (*prompt).into();
            error["n_ctx"] = (*limit).into();
        }
        json!({"error": error})
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.client_message();
        match error {
            EngineError::QueueFull { retry_seconds } => {
                let message = "Too many requests are waiting. Try again, or start the server with a larger --max-queue \
                               or --memory-limit.";
                let status = StatusCode::TOO_MANY_REQUESTS;
                let kind = "rate_limit_error";
                Self::new(status, kind, Some(QUEUE_FULL), message).retry_after(retry_seconds)
            }
            EngineError::Draining => Self::unavailable("shutting_down", "The server is shutting down."),
            EngineError::Unloaded => Self::unavailable("model_unloaded", message),
            EngineError::TimedOut => Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", Some("timeout"), message),
            EngineError::PromptTooLong { prompt, context } => Self::prompt_over_context(prompt, context),
            EngineError::Model(ModelError::ContextFull { context }) => {
                let message = format!(
                    "This model's maximum context length is {context} tokens, and it is full. Please reduce the length \
                     of the messages, or start the server with a larger --ctx-size."
                );
                Self::bad_request(CONTEXT_EXCEEDED, message)
            }
            EngineError::Model(ModelError::TokenOutOfRange { .. }) | EngineError::EmptyPrompt => {
                Self::bad_request("invalid_value", message)
            }
            EngineError::Model(ModelError::Store(_)) => Self::server(Some("storage_error"), message),
            // The client sent the grammar. A step fails only if the grammar is too large or too ambiguous.
            EngineError::Constraint(_) => Self::bad_request("invalid_value", message),
            EngineError::Model(_) | EngineError::Stopped | EngineError::NoLogits | EngineError::Panicked(_) => {
                Self::failed(&message)
            }
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self::of_conversation(error, "messages")
    }
}

fn prompt_scope(limit: usize) -> String {
    format!("{limit} tokens for prompts, as --max-prompt-tokens says")
}

/// A text of the client for a sentence: without its middle if it is long, because it may have megabytes.
pub fn quote(text: &str) -> Cow<'_, str> {
    bounded(text, MAX_QUOTE)
}

/// The path of a field for an error. Names that the client chose, such as those in a schema, are part of it.
fn path(text: String) -> String {
    shown(&text, MAX_PATH)
}

/// A text of about `max` bytes at most, with its control characters escaped. It is cut before it is escaped, because it may
/// have megabytes.
fn shown(text: &str, max: usize) -> String {
    bounded(&escaped(&bounded(text, max)), max).into_owned()
}

/// A text with its control characters escaped, except line feeds. A terminal would obey them.
fn escaped(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && c != '\n';
    if !text.contains(is_control) {
        return text.into();
    }
    let mut escaped = String::new();
    for c in text.chars() {
        if is_control(c) { escaped.extend(c.escape_default()) } else { escaped.push(c) }
    }
    escaped.into()
}

/// Replaces the body of an error response, for an API whose errors have another shape.
pub fn reshape(mut response: Response, shape: impl FnOnce(&ApiError) -> Value) -> Response {
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let mut reshaped = (error.status, Json(shape(&error))).into_response();
    for (name, value) in response.headers() {
        if !reshaped.headers().contains_key(name) && name != header::CONTENT_LENGTH {
            reshaped.headers_mut().append(name, value.clone());
        }
    }
    reshaped
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
        // `reshape` converts the error for APIs whose errors have another shape.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::CommandError, http::models::LoadFailure};
    use moestro_base::error::StoreError;
    use std::{
        io,
        path::{Path, PathBuf},
    };

    #[test]
    fn engine_errors_have_their_status() {
        let status = |error: EngineError| ApiError::from(error).status.as_u16();
        assert_eq!(status(EngineError::QueueFull { retry_seconds: 2 }), 429);
        let response = ApiError::from(EngineError::QueueFull { retry_seconds: 7 }).into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "7");
        assert_eq!(status(EngineError::Draining), 503);
        assert_eq!(status(EngineError::TimedOut), 504);
        assert_eq!(status(EngineError::Stopped), 500);
        assert_eq!(status(ModelError::ContextFull { context: 8 }.into()), 400);
        assert_eq!(status(EngineError::Constraint("it is too complex".into())), 400);
    }

    #[test]
    fn template_refusal_is_422() {
        let error = ApiError::from(ChatError::Refused("No user query.".into()));
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (422, Some("messages")));
    }

    #[test]
    fn read_error_names_expert_and_offset() {
        let file = PathBuf::from("model-00002.safetensors");
        let source = io::ErrorKind::UnexpectedEof.into();
        let read = StoreError::Read { layer: 3, expert: 17, file, offset: 4096, len: 512, source };
        let error = ApiError::from(EngineError::Model(ModelError::Store(read)));
        let body = error.body();
        let message = body["error"]["message"].as_str().unwrap();
        for part in ["layer 3", "expert 17", "model-00002.safetensors", "offset 4096"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(body["error"]["code"], "storage_error");
    }

    #[test]
    fn client_messages_have_no_directories() {
        for dir in [
            "/home/me/org/m",
            "./org/m",
            "../m",
            "org",
            "",
            "/home/Bob, O'Neil/m",
            "/srv/My (old) models: best/m",
            "/home/J\u{fc}rgen \"J\" M\u{fc}ller/`m`",
            "/tmp/two\nlines/m\n",
        ] {
            for name in ["model.safetensors", "O'Neil, 1): \u{fc}.bin"] {
                let path = Path::new(dir).join(name);
                let why = || "why".to_owned();
                let unreadable = || io::Error::from(io::ErrorKind::UnexpectedEof);
                let file = |path: &Path| path.to_owned();
                let (layer, expert, offset, len) = (1, 2, 3, 4);
                let store = [
                    StoreError::Io { path: file(&path), source: unreadable() },
                    StoreError::NotACheckpoint { path: file(&path), why: why() },
                    StoreError::NotAPack { path: file(&path), why: why() },
                    StoreError::Missing { name: "t".into(), dir: file(&path) },
                    StoreError::Mismatch { name: "t".into(), file: file(&path), expected: why(), found: why() },
                    StoreError::Unknown { name: "t".into(), file: file(&path) },
                    StoreError::Read { layer, expert, file: file(&path), offset, len, source: unreadable() },
                    StoreError::DemoUnwritable(vec![StoreError::Io { path: file(&path), source: unreadable() }]),
                ];
                let mut told: Vec<(String, String)> = Vec::new();
                for error in store {
                    let error = EngineError::Model(ModelError::Store(error));
                    told.push((error.to_string(), ApiError::from(error).message));
                }
                let chat = || ChatError::File { path: file(&path), why: why() };
                told.push((chat().to_string(), ApiError::from(chat()).message));
                for load in [CommandError::NoSuchDirectory(file(&path)), chat().into()] {
                    let failure = LoadFailure::from(load);
                    told.push((failure.detail, ApiError::not_loaded("m", &failure.message).message));
                }
                for (logged, message) in told {
                    assert!(logged.contains(&*path.to_string_lossy()), "{logged}");
                    assert!(message.contains(name) && !message.contains(&format!("/{name}")), "{message}");
                    for part in ["home", "org/", "..", "Bob", "srv", "J\u{fc}rgen", "two"] {
                        assert!(!message.contains(part), "{message}");
                    }
                }
            }
        }
        let of_root = StoreError::at(Path::new("/"))(io::ErrorKind::NotFound.into());
        let of_root = ApiError::from(EngineError::Model(ModelError::Store(of_root)));
        assert_eq!(of_root.message, "a directory: entity not found");
    }

    #[test]
    fn long_texts_are_not_repeated() {
        for text in ["x".repeat(5 << 20), "\u{fc}".repeat(5000), "\u{1f600}x".repeat(5000)] {
            for error in [
                ApiError::no_such_model(&text, "m"),
                ApiError::not_allowed("role", &text, "`user`"),
                ApiError::wrong_value(&text, "must be positive."),
            ] {
                assert!(error.message.len() < 2 * MAX_PATH, "{}", error.message);
                assert!(error.message.ends_with('.') && error.message.contains(" ... "), "{}", error.message);
            }
        }
        let short = "x".repeat(MAX_QUOTE);
        assert!(ApiError::no_such_model(&short, "m").message.contains(&short));
    }
}
