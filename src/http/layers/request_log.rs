//! Per-request log line, request id and counters.
//!
//! A [`RequestLog`] lives as long as the response body and writes its line when it is dropped, so disconnected clients
//! are logged, too. It never logs text of a message.

use super::timeouts::with_deadline;
use crate::{
    http::{health::StorageHealth, routes, state::ServerState},
    metrics::Metrics,
};
use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{
    fmt::Display,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

pub static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Status (nginx's) of a request whose client disconnected before the response began.
const CLIENT_CLOSED_REQUEST: u16 = 499;

pub struct RequestLog {
    metrics: Arc<Metrics>,
    storage_health: Arc<StorageHealth>,
    method: Method,
    path: String,
    /// Label of the route in the metrics.
    endpoint: &'static str,
    id: String,
    start: Instant,
    pub deadline: Option<Instant>,
    status: OnceLock<StatusCode>,
    /// A stream began and has not finished.
    is_streaming: AtomicBool,
    is_generation: AtomicBool,
    prompt_tokens: AtomicUsize,
    completion_tokens: AtomicUsize,
}

impl RequestLog {
    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Counts this request in `moestro_request_seconds`.
    pub fn mark_generation(&self) {
        self.is_generation.store(true, Relaxed);
    }

    pub fn add_tokens(&self, prompt: usize, completion: usize) {
        self.prompt_tokens.fetch_add(prompt, Relaxed);
        self.completion_tokens.fetch_add(completion, Relaxed);
    }

    /// Counts a finished or cancelled answer. `reason` is one of the labels of `moestro_answers_total`.
    pub fn record_answer(&self, reason: &'static str, prompt_tokens: usize, generated_tokens: usize) {
        self.metrics.answered(reason, prompt_tokens, generated_tokens);
    }

    /// Logs the response as cut short unless [`RequestLog::end_stream`] follows.
    pub fn begin_stream(&self) {
        self.is_streaming.store(true, Relaxed);
    }

    pub fn end_stream(&self) {
        self.is_streaming.store(false, Relaxed);
    }

    /// Records a storage error of a generation, or `None` if it finished.
    pub fn record_storage(&self, error: Option<&dyn Display>) {
        self.storage_health.record(error);
    }

    /// Logs an error that ended a stream early.
    pub fn log_stream_error(&self, error: &dyn Display) {
        tracing::error!(id = self.id, endpoint = self.endpoint, %error, "request failed after its stream began");
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let status = self.status.get().map_or(CLIENT_CLOSED_REQUEST, StatusCode::as_u16);
        let seconds = self.start.elapsed().as_secs_f64();
        self.metrics.request(self.endpoint, status);
        if *self.is_generation.get_mut() {
            self.metrics.request_seconds.observe(seconds);
        }
        tracing::info!(
            method = %self.method,
            path = self.path,
            status,
            ms = (seconds * 1e4).round() / 10.0,
            prompt_tokens = *self.prompt_tokens.get_mut(),
            completion_tokens = *self.completion_tokens.get_mut(),
            cut_short = *self.is_streaming.get_mut(),
            id = self.id,
            "request"
        );
    }
}

/// Outermost layer: gives the request an id and a [`RequestLog`].
pub async fn log_request(State(state): State<Arc<ServerState>>, mut request: Request, next: Next) -> Response {
    let id = client_id(request.headers()).unwrap_or_else(|| format!("req_{}", unique_id()));
    let start = Instant::now();
    let log = Arc::new(RequestLog {
        metrics: state.metrics.clone(),
        storage_health: state.storage_health.clone(),
        method: request.method().clone(),
        endpoint: routes::endpoint(request.uri().path()),
        path: request.uri().path().to_owned(),
        id,
        start,
        deadline: state.models.timeouts().request.and_then(|limit| start.checked_add(limit)),
        status: OnceLock::new(),
        is_streaming: AtomicBool::new(false),
        is_generation: AtomicBool::new(false),
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

/// Ends a request whose deadline passes before its response begins. The engine ends a stream that has begun.
pub async fn enforce_deadline(Extension(log): Extension<Arc<RequestLog>>, request: Request, next: Next) -> Response {
    with_deadline(log.deadline, next.run(request)).await.unwrap_or_else(IntoResponse::into_response)
}

/// The client's own request id, if it is short and printable.
fn client_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(&REQUEST_ID)?.to_str().ok()?;
    let is_printable = !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic());
    is_printable.then(|| id.to_owned())
}

/// 24 hexadecimal digits, unique in this process and very likely unique beyond it.
pub fn unique_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static KEYS: OnceLock<RandomState> = OnceLock::new();
    let count = COUNT.fetch_add(1, Relaxed);
    format!("{:016x}{:08x}", KEYS.get_or_init(RandomState::new).hash_one(count), count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log line of a request during which `events` happens.
    fn log_line(events: impl FnOnce(&RequestLog)) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = file.reopen().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.try_clone().unwrap());
        let log = RequestLog {
            metrics: Metrics::new("0", "cpu"),
            storage_health: Arc::default(),
            method: Method::POST,
            path: "/v1/messages".into(),
            endpoint: "/v1/messages",
            id: "req_1".into(),
            start: Instant::now(),
            deadline: None,
            status: OnceLock::from(StatusCode::OK),
            is_streaming: AtomicBool::new(false),
            is_generation: AtomicBool::new(false),
            prompt_tokens: AtomicUsize::new(0),
            completion_tokens: AtomicUsize::new(0),
        };
        tracing::subscriber::with_default(subscriber.finish(), || {
            events(&log);
            drop(log);
        });
        std::fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn unfinished_stream_is_cut_short() {
        let finished = log_line(|log| {
            log.begin_stream();
            log.end_stream();
        });
        assert!(finished.contains("cut_short=false"), "{finished}");
        let unfinished = log_line(|log| log.begin_stream());
        assert!(unfinished.contains("cut_short=true"), "{unfinished}");
        let body = log_line(|_| ());
        assert!(body.contains("cut_short=false"), "{body}");
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| unique_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 24));
    }
}
