//! Reads the rest of a request's body before an answer that does not need it, such as an error.
//!
//! Many clients read no answer while they send a body. If the server closed the connection, they would report a broken
//! connection instead of the error.

use crate::http::ServerState;
use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::header,
    middleware::Next,
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tokio_stream::StreamExt;

/// Multiple of the limit of bodies up to which a body is discarded.
const DISCARD_FACTOR: usize = 4;
/// Pause within a body after which the answer is sent. The client may wait for it.
const PAUSE: Duration = Duration::from_secs(1);

/// Layer that discards what the inner layers have not read of the body.
pub async fn discard(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    // Such a client sends nothing before it is asked to.
    if request.headers().contains_key(header::EXPECT) || request.body().is_end_stream() {
        return next.run(request).await;
    }
    let (unread, mut rest) = oneshot::channel();
    let response = next.run(request.map(|body| Body::new(ReturnedBody { body, unread: Some(unread) }))).await;
    if let Ok(body) = rest.try_recv() {
        read(body, state.body_limit.saturating_mul(DISCARD_FACTOR), state.timeouts.body, PAUSE).await;
    }
    response
}

/// Reads about `limit` bytes within `time`, until the client sends nothing for `pause`.
async fn read(body: Body, limit: usize, time: Duration, pause: Duration) {
    let deadline = Instant::now() + time;
    let mut chunks = body.into_data_stream();
    let mut seen = 0;
    while seen < limit
        && let Ok(Some(Ok(chunk))) = timeout_at(deadline.min(Instant::now() + pause), chunks.next()).await
    {
        seen += chunk.len();
    }
}

/// A body that is sent to `unread` when it is dropped before its end.
struct ReturnedBody {
    body: Body,
    unread: Option<oneshot::Sender<Body>>,
}

impl HttpBody for ReturnedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.unread = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ReturnedBody {
    fn drop(&mut self) {
        if let Some(unread) = self.unread.take().filter(|_| !self.body.is_end_stream()) {
            let _ = unread.send(std::mem::take(&mut self.body));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Number of bytes that [`read`] takes from an endless body with this pause before each byte.
    async fn taken(wait: Duration, limit: usize, time: Duration, pause: Duration) -> usize {
        let sent = Arc::<AtomicUsize>::default();
        let count = sent.clone();
        let bytes = tokio_stream::iter(0..).then(move |_: u64| {
            let count = count.clone();
            async move {
                tokio::time::sleep(wait).await;
                count.fetch_add(1, Relaxed);
                Ok::<_, std::io::Error>(vec![b'1'])
            }
        });
        read(Body::from_stream(bytes), limit, time, pause).await;
        sent.load(Relaxed)
    }

    #[tokio::test]
    async fn discarded_bytes_and_time_are_limited() {
        let [never, soon, long] = [86_400_000, 50, 600_000].map(Duration::from_millis);
        assert_eq!(taken(Duration::ZERO, 32, long, long).await, 32);
        assert_eq!(taken(never, 32, soon, long).await, 0);
        assert_eq!(taken(never, 32, long, soon).await, 0);
        assert!(taken(Duration::ZERO, usize::MAX, soon, long).await > 0);
    }
}
