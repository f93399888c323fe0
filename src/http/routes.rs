//! Route table: every path with its method, body and meaning.
//!
//! This table defines the labels of `moestro_requests_total`, the paths whose content type is checked, and
//! `/openapi.json`.

use crate::http::request::{FieldTable, fields};

pub struct Route {
    /// Lower-case method, as in OpenAPI.
    pub method: &'static str,
    pub path: &'static str,
    pub summary: &'static str,
    pub body: RouteBody,
}

pub enum RouteBody {
    None,
    /// The body of a generation request: all fields, the required fields, and whether the response may be a stream.
    Generation(FieldTable, &'static [&'static str], bool),
    Tokenize,
    Detokenize,
    Object,
}

const fn route(method: &'static str, path: &'static str, summary: &'static str) -> Route {
    Route { method, path, summary, body: RouteBody::None }
}

const fn post(path: &'static str, summary: &'static str, body: RouteBody) -> Route {
    Route { method: "post", path, summary, body }
}

const fn generation(
    path: &'static str,
    summary: &'static str,
    fields: FieldTable,
    required: &'static [&'static str],
) -> Route {
    post(path, summary, RouteBody::Generation(fields, required, true))
}

pub static ROUTES: &[Route] = &[
    generation("/v1/chat/completions", "Next message of a conversation", fields::CHAT, &["messages"]),
    generation("/v1/completions", "Continuation of a prompt", fields::COMPLETIONS, &["prompt"]),
    generation("/v1/responses", "Next items of a conversation", fields::RESPONSES, &["input"]),
    post(
        "/v1/responses/compact",
        "Replace a conversation by its user messages and a summary",
        RouteBody::Generation(fields::RESPONSES, &["input"], false),
    ),
    post(
        "/v1/responses/input_tokens",
        "Number of tokens in a prompt",
        RouteBody::Generation(fields::RESPONSES, &["input"], false),
    ),
    generation("/v1/messages", "Next message of a conversation", fields::MESSAGES, &["messages", "max_tokens"]),
    post(
        "/v1/messages/count_tokens",
        "Number of tokens in a prompt",
        RouteBody::Generation(fields::MESSAGES, &["messages"], false),
    ),
    route("get", "/v1/responses/{id}", "Stored response"),
    route("delete", "/v1/responses/{id}", "Delete a stored response"),
    route("get", "/v1/responses/{id}/input_items", "Items that a stored response answers"),
    route("get", "/", "Chat and gauges in a browser"),
    route("get", "/v1/models", "Models on this machine, the loaded one first"),
    route("get", "/v1/models/{id}", "One model"),
    route("get", "/api/v0/models", "The same list for clients of LM Studio"),
    post("/v1/models/unload", "Unload a model; the next request for it loads it again", RouteBody::Object),
    post("/tokenize", "Tokens of a prompt or of messages", RouteBody::Tokenize),
    post("/detokenize", "Text of tokens", RouteBody::Detokenize),
    route("get", "/health", "State of the server, its queue and its memory plan"),
    route("get", "/metrics", "Metrics in the Prometheus or OpenMetrics format"),
    route("get", "/experts", "Experts in memory"),
    route("get", "/openapi.json", "This document"),
    route("delete", "/prompt_cache", "Clear the prompt cache"),
    route("get", "/tokenizer_info", "Special tokens and chat template"),
];

/// The path of a route without `/v1` and without a slash at the end, because clients write paths in several ways.
fn bare(path: &str) -> &str {
    path.trim_end_matches('/').trim_start_matches("/v1")
}

/// Paths of Ollama's API, which are served only on the port of `--ollama-port`.
const OLLAMA_PATHS: [&str; 6] = ["/api/version", "/api/tags", "/api/ps", "/api/show", "/api/chat", "/api/generate"];

/// Paths, and all paths below them, that other servers have, with a sentence for each.
const MISSING_APIS: [(&str, &str); 8] = [
    ("/files", "This server stores no files: send text and images inside the request."),
    ("/uploads", "This server stores no files: send text and images inside the request."),
    ("/batches", "This server has no batches: send each request by itself, several at a time."),
    ("/messages/batches", "This server has no batches: send each request by itself, several at a time."),
    ("/conversations", "Conversations are not stored here: use previous_response_id, or send all items."),
    ("/images", "This server writes text only."),
    ("/audio", "This server reads text and images, and writes text."),
    ("/moderations", "This server has no moderation."),
];

/// A sentence about a path that other servers have or that clients often get wrong. Empty for all other paths.
pub fn hint(path: &str) -> &'static str {
    if path.starts_with("/v1/v1/") {
        return "The client adds /v1 to its base URL: remove /v1 there.";
    }
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let is_below =
        |parent: &str| path.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if let Some((_, sentence)) = MISSING_APIS.iter().find(|(parent, _)| is_below(parent)) {
        return sentence;
    }
    match path {
        "/embeddings" | "/embedding" | "/rerank" | "/api/embed" | "/api/embeddings" => "This server has no embeddings.",
        "/complete" => "Use /v1/messages.",
        "/api/pull" | "/api/push" | "/api/create" | "/api/copy" | "/api/delete" => {
            "Models are changed on the command line, with `moestro pull` and `moestro rm`."
        }
        "/completion" => "Use /v1/completions.",
        "/props" | "/slots" => "Use /health.",
        path if OLLAMA_PATHS.contains(&path) => "Ollama's API is served on the port of --ollama-port only.",
        _ => "",
    }
}

/// Label of a path in the metrics. Clients can invent paths, so the label of every unknown path is `other`.
pub fn endpoint(path: &str) -> &'static str {
    let ollama = || OLLAMA_PATHS.into_iter().find(|known| *known == path);
    find(path).map(|route| route.path).or_else(ollama).unwrap_or("other")
}

fn find(path: &str) -> Option<&'static Route> {
    let path = bare(path);
    let exact = ROUTES.iter().find(|route| bare(route.path) == path);
    let has_prefix = |route: &&Route| {
        let prefix = bare(route.path).strip_suffix("{id}");
        prefix.is_some_and(|prefix| path.starts_with(prefix))
    };
    exact.or_else(|| ROUTES.iter().find(has_prefix))
}

/// All spellings of a path that are served: with and without `/v1`, with and without a slash at the end.
pub fn spellings(path: &str) -> [String; 4] {
    let bare = bare(path);
    [bare.to_owned(), format!("{bare}/"), format!("/v1{bare}"), format!("/v1{bare}/")]
}

/// True for the paths that are answered even if all connection slots are taken.
pub fn is_status(path: &str) -> bool {
    matches!(endpoint(path), "/health" | "/metrics")
}

/// True for the paths that need no API key.
pub fn is_public(path: &str) -> bool {
    is_status(path) || path == "/"
}

/// True for paths whose `POST` needs a JSON content type. Ollama's paths do not need one, because Ollama's documentation
/// shows requests of curl without a content type.
pub fn takes_json(path: &str) -> bool {
    find(path).is_some_and(|route| route.method == "post")
}
