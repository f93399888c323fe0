//! Paths: their spellings, their labels in the metrics, and what is known of each before it is routed.

/// The label of a path: one of a fixed set, since a client can invent any number of paths.
pub fn endpoint(path: &str) -> &'static str {
    const KNOWN: [&str; 15] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/unload",
        "/openapi.json",
        "/tokenizer_info",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
        "/experts",
        "/",
    ];
    let bare = |path: &str| path.trim_end_matches('/').trim_start_matches("/v1").to_owned();
    let path = bare(path);
    let known = KNOWN.into_iter().find(|known| bare(known) == path);
    known.unwrap_or(match () {
        () if path.starts_with("/models/") => "/v1/models/{id}",
        () if path.starts_with("/responses/") => "/v1/responses/{id}",
        () => "other",
    })
}

/// The ways in which clients write a path: with `/v1` or without it, and with a slash at the end.
pub fn spellings(path: &str) -> [String; 4] {
    let bare = path.trim_start_matches("/v1");
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

/// Paths that exist and may be posted to.
pub fn takes_json(path: &str) -> bool {
    const POSTED: [&str; 8] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/models/unload",
    ];
    POSTED.contains(&endpoint(path))
}
