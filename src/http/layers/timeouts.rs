//! Timeouts of connections, and the deadline of a request.

use crate::http::ApiError;
use moestro_engine::error::EngineError;
use std::{
    future::Future,
    time::{Duration, Instant},
};
use tokio::time::timeout_at;

/// Time that a client may be silent, and time that the server may be silent.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Limit for the whole head of a request, and for the pause between two requests.
    pub head: Duration,
    /// Like `head`, but for a connection in a reserved slot.
    pub reserved: Duration,
    /// Longest pause within a body. The whole body may take twice this limit, plus one second per 32 KiB.
    pub body: Duration,
    /// Time after which a client that reads nothing of its response is disconnected.
    pub write: Duration,
    /// Time without an event after which a stream gets an event that only shows that the server is working.
    pub event: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { head: seconds(30), reserved: seconds(2), body: seconds(10), write: seconds(30), event: seconds(5) }
    }
}

/// Runs `work`. Returns `TimedOut` if the deadline passes first.
pub async fn with_deadline<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Result<T, ApiError> {
    match deadline {
        Some(deadline) => timeout_at(deadline.into(), work).await.map_err(|_| EngineError::TimedOut.into()),
        None => Ok(work.await),
    }
}
