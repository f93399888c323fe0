//! Reads the rest of a request's body before an answer that does not need it, such as an error.
//!
//! Many clients read no answer while they send a body. If the server closed the connection, they would report a broken
//! connection instead of the error.

use crate::http::{ServerState, routes};
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
/// Time after which a body must have arrived at [`MIN_RATE`].
const START: Duration = Duration::from_secs(2);
/// Slowest average rate at which a body is discarded, in bytes per second. A client without a key holds a connection no
/// longer than this.
const MIN_RATE: usize = 256 << 10;

/// Layer that discards what the inner layers have not read of the body, if the answer is an error.
pub async fn discard(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() || routes::is_status(request.uri().path()) {
        return next.run(request).await;
    }
    let (unread, mut rest) = oneshot::channel();
    let is_awaited = request.headers().contains_key(header::EXPECT);
    let request = request.map(|body| Body::new(ReturnedBody { body, unread: Some(unread), is_awaited }));
    let response = next.run(request).await;
    if response.status().as_u16() >= 400
        && let Ok(body) = rest.try_recv()
    {
        read(body, state.body_limit.saturating_mul(DISCARD_FACTOR), START, PAUSE).await;
    }
    response
}

/// Reads about `limit` bytes, until the client sends nothing for `pause`, or less than [`MIN_RATE`] after `start`.
async fn read(body: Body, limit: usize, start: Duration, pause: Duration) {
    let first_deadline = Instant::now() + start;
    let mut chunks = body.into_data_stream();
    let mut seen = 0;
    loop {
        let deadline = first_deadline + Duration::from_secs((seen / MIN_RATE) as u64);
        let chunk = timeout_at(deadline.min(Instant::now() + pause), chunks.next()).await;
        let Ok(Some(Ok(chunk))) = chunk else { return };
        seen += chunk.len();
        if seen >= limit {
            return;
        }
    }
}

/// A body that is sent to `unread` when it is dropped before its end.
struct ReturnedBody {
    body: Body,
    unread: Option<oneshot::Sender<Body>>,
    /// True until the first read of a request with `Expect`: its client sends the body once it is read.
    is_awaited: bool,
}

impl HttpBody for ReturnedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        self.is_awaited = false;
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
        if let Some(unread) = self.unread.take().filter(|_| !self.is_awaited && !self.body.is_end_stream()) {
            let _ = unread.send(std::mem::take(&mut self.body));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Number of bytes that [`read`] takes from an endless body with the pause `first` before the first byte and the
    /// pause `wait` before each other byte.
    async fn taken([first, wait]: [Duration; 2], limit: usize, start: Duration, pause: Duration) -> usize {
        let sent = Arc::<AtomicUsize>::default();
        let count = sent.clone();
        let bytes = tokio_stream::iter(0..).then(move |index: u64| {
            let count = count.clone();
            async move {
                match if index == 0 { first } else { wait } {
                    // Even the shortest sleep may take a millisecond.
                    Duration::ZERO => {}
                    wait => tokio::time::sleep(wait).await,
                }
                count.fetch_add(1, Relaxed);
                Ok::<_, std::io::Error>(vec![b'1'])
            }
        });
        read(Body::from_stream(bytes), limit, start, pause).await;
        sent.load(Relaxed)
    }

    #[tokio::test]
    async fn discarded_bytes_and_time_are_limited() {
        let [none, brief, soon, long, never] = [0, 1, 50, 600_000, 86_400_000].map(Duration::from_millis);
        assert_eq!(taken([none, none], 32, long, long).await, 32);
        assert_eq!(taken([never, none], 32, soon, long).await, 0);
        assert_eq!(taken([never, none], 32, long, soon).await, 0);
        // Slower than the least rate.
        assert!(taken([none, brief], usize::MAX, soon, long).await > 0);
    }

    #[tokio::test]
    async fn unread_body_is_returned_unless_awaited() {
        for (expects, is_read, is_returned) in
            [(false, false, true), (false, true, true), (true, false, false), (true, true, true)]
        {
            let (unread, mut rest) = oneshot::channel();
            let chunks = tokio_stream::iter(["a", "b"].map(Ok::<_, std::io::Error>));
            let body = ReturnedBody { body: Body::from_stream(chunks), unread: Some(unread), is_awaited: expects };
            let mut chunks = Body::new(body).into_data_stream();
            if is_read {
                chunks.next().await.unwrap().unwrap();
            }
            drop(chunks);
            assert_eq!(rest.try_recv().is_ok(), is_returned, "{expects} {is_read}");
        }
    }
}
