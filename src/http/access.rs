//! Around every request: its id, its line in the log, its counters; and the API key.
//!
//! A [`RequestLog`] lives as long as the answer, the body of a stream included, and is written when it is dropped, so a
//! client that leaves is logged too. No text of a message is ever logged.

use super::{Door, admin::Health, api_error::ApiError, models::in_time};
use crate::metrics::Metrics;
use axum::{
    Extension,
    extract::{Query, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

pub static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// nginx's status for a client that closed the connection before there was an answer.
const CLIENT_LEFT: u16 = 499;

/// One request's account.
pub struct RequestLog {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    method: Method,
    path: String,
    /// The route, for the metrics' label.
    endpoint: &'static str,
    id: String,
    start: Instant,
    /// When its time is up.
    pub deadline: Option<Instant>,
    status: OnceLock<StatusCode>,
    /// An answer was begun and not ended.
    open: AtomicBool,
    /// This request asked for a generation.
    generates: AtomicBool,
    prompt_tokens: AtomicUsize,
    completion_tokens: AtomicUsize,
}

impl RequestLog {
    /// True if its time is up.
    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The request is one that the model answers, and so counts in `moestro_request_seconds`.
    pub fn generates(&self) {
        self.generates.store(true, Relaxed);
    }

    pub fn add(&self, prompt_tokens: usize, completion_tokens: usize) {
        self.prompt_tokens.fetch_add(prompt_tokens, Relaxed);
        self.completion_tokens.fetch_add(completion_tokens, Relaxed);
    }

    /// An answer ended, or was left: `reason` is one of those that the metrics know.
    pub fn answered(&self, reason: &'static str, prompt_tokens: usize, generated_tokens: usize) {
        self.metrics.answered(reason, prompt_tokens, generated_tokens);
    }

    /// A stream begins: until [`RequestLog::complete`], it counts as cut short.
    pub fn begin(&self) {
        self.open.store(true, Relaxed);
    }

    pub fn complete(&self) {
        self.open.store(false, Relaxed);
    }

    /// Records a failure of the model's storage; `None` ends it.
    pub fn storage(&self, failed: Option<&dyn std::fmt::Display>) {
        self.health.storage(failed);
    }

    /// Says in the log why an answer that had already begun could not be finished.
    pub fn failed(&self, error: &dyn std::fmt::Display) {
        tracing::error!(id = self.id, %error, "the answer broke off");
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let status = self.status.get().map_or(CLIENT_LEFT, StatusCode::as_u16);
        let seconds = self.start.elapsed().as_secs_f64();
        self.metrics.request(self.endpoint, status);
        if *self.generates.get_mut() {
            self.metrics.request_seconds.observe(seconds);
        }
        tracing::info!(
            method = %self.method,
            path = self.path,
            status,
            ms = (seconds * 1e4).round() / 10.0,
            prompt_tokens = *self.prompt_tokens.get_mut(),
            completion_tokens = *self.completion_tokens.get_mut(),
            cut_short = *self.open.get_mut(),
            id = self.id,
            "request"
        );
    }
}

/// The label of a path: one of a fixed set, since a client can invent any number of paths.
fn endpoint(path: &str) -> &'static str {
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

/// The outermost layer: gives the request an id and an account.
pub async fn account(State(door): State<Arc<Door>>, mut request: Request, next: Next) -> Response {
    let id = given_id(request.headers()).unwrap_or_else(|| format!("req_{}", unique()));
    let start = Instant::now();
    let log = Arc::new(RequestLog {
        metrics: door.metrics.clone(),
        health: door.health.clone(),
        method: request.method().clone(),
        endpoint: endpoint(request.uri().path()),
        path: request.uri().path().to_owned(),
        id,
        start,
        deadline: door.models.times().request.and_then(|limit| start.checked_add(limit)),
        status: OnceLock::new(),
        open: AtomicBool::new(false),
        generates: AtomicBool::new(false),
        prompt_tokens: AtomicUsize::new(0),
        completion_tokens: AtomicUsize::new(0),
    });
    request.extensions_mut().insert(log.clone());
    let mut response = next.run(request).await;
    let _ = log.status.set(response.status());
    if let Ok(id) = HeaderValue::from_str(&log.id) {
        response.headers_mut().insert(REQUEST_ID.clone(), id);
    }
    response
}

/// Ends a request whose time is up before its answer has begun, whatever it waits for: a model, memory, its tokens, its place.
/// A stream that has begun is ended by the engine.
pub async fn limit(Extension(log): Extension<Arc<RequestLog>>, request: Request, next: Next) -> Response {
    in_time(log.deadline, next.run(request)).await.unwrap_or_else(IntoResponse::into_response)
}

/// Paths that are answered when every connection is busy.
pub fn free(path: &str) -> bool {
    matches!(endpoint(path), "/health" | "/metrics")
}

/// Paths that need no key.
fn open(path: &str) -> bool {
    free(path) || path == "/"
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

/// Lets through who has the key, and everyone where none is set or asked for.
pub async fn authorize(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    match open(request.uri().path()) || trusts(&door, &request) {
        true => next.run(request).await,
        false => ApiError::unauthorized().into_response(),
    }
}

/// True for who has the key, and for everyone where none is set.
pub fn trusts(door: &Door, request: &Request) -> bool {
    door.key().is_none_or(|key| given(request).iter().any(|given| same(given, key.as_bytes())))
}

/// The keys that a request brings: as OpenAI's clients send theirs, as Anthropic's do, and as Google's.
fn given(request: &Request) -> Vec<Vec<u8>> {
    let header = request.headers().get("x-api-key").map(HeaderValue::as_bytes);
    let query = Query::<Vec<(String, String)>>::try_from_uri(request.uri()).unwrap_or_default().0;
    let query = query.into_iter().filter(|(name, _)| name == "key").map(|(_, key)| key.into_bytes());
    bearer(request.headers()).into_iter().chain(header).map(<[u8]>::to_vec).chain(query).collect()
}

/// The token of `Authorization: Bearer TOKEN`.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Equality in a time that does not tell how much of the key was right.
fn same(given: &[u8], key: &[u8]) -> bool {
    let differs = given
        .iter()
        .zip(key)
        .fold(given.len() ^ key.len(), |differs, (a, b)| std::hint::black_box(differs | usize::from(a ^ b)));
    differs == 0
}

/// A client's own request id, if it is one that may stand in a log line.
fn given_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(&REQUEST_ID)?.to_str().ok()?;
    let sane = !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic());
    sane.then(|| id.to_owned())
}

/// 24 hexadecimal digits that no other answer of this process has, and hardly one of another.
pub fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static KEYS: OnceLock<RandomState> = OnceLock::new();
    let count = COUNT.fetch_add(1, Relaxed);
    format!("{:016x}{:08x}", KEYS.get_or_init(RandomState::new).hash_one(count), count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_compared_whole() {
        assert!(same(b"secret", b"secret"));
        for wrong in [&b"secre"[..], b"secrets", b"Secret", b"", b"\0\0\0\0\0\0"] {
            assert!(!same(wrong, b"secret"));
        }
    }

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(<[u8]>::to_vec)
        };
        assert_eq!(with("Bearer abc"), Some(b"abc".to_vec()));
        assert_eq!(with("bearer  abc "), Some(b"abc".to_vec()));
        assert_eq!(with("Basic abc"), None);
        assert_eq!(with("abc"), None);
    }

    /// The line that a request leaves in the log of which `told` happens.
    fn line(told: impl FnOnce(&RequestLog)) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = file.reopen().unwrap();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.try_clone().unwrap());
        let log = RequestLog {
            metrics: Metrics::new("0", "cpu"),
            health: Arc::default(),
            method: Method::POST,
            path: "/v1/messages".into(),
            endpoint: "/v1/messages",
            id: "req_1".into(),
            start: Instant::now(),
            deadline: None,
            status: OnceLock::from(StatusCode::OK),
            open: AtomicBool::new(false),
            generates: AtomicBool::new(false),
            prompt_tokens: AtomicUsize::new(0),
            completion_tokens: AtomicUsize::new(0),
        };
        tracing::subscriber::with_default(lines.finish(), || {
            told(&log);
            drop(log);
        });
        std::fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn a_stream_is_cut_short_unless_it_was_completed() {
        let whole = line(|log| {
            log.begin();
            log.complete();
        });
        assert!(whole.contains("cut_short=false"), "{whole}");
        let left = line(|log| log.begin());
        assert!(left.contains("cut_short=true"), "{left}");
        let body = line(|_| ());
        assert!(body.contains("cut_short=false"), "{body}");
    }

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| unique()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 24));
    }
}
