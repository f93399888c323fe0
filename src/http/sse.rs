//! Server-sent events, written by a future that runs inside the response body.
//!
//! There is no separate task and no channel. The future runs when the connection can send more, and it is dropped with the
//! connection, so a client that disconnects cancels its generation. Text that is generated while the connection is busy is
//! sent as one piece. Otherwise each token is sent when it arrives.

use crate::http::errors::ApiError;
use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    convert::Infallible,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use tokio_stream::{Stream, StreamExt};

/// Clients and proxies close silent connections, so a comment is sent after this much silence. Reasons for silence are a
/// full queue, a long prompt, or text that may become a tool call.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Bytes that have been written but not sent. The lock is never contended, because the same task writes and reads.
#[derive(Clone, Default)]
pub struct Frames(Arc<Mutex<Vec<u8>>>);

impl Frames {
    /// `data: {...}`
    pub fn data(&self, value: &impl Serialize) {
        self.frame("", value);
    }

    /// `event: name`, then `data: {...}`
    pub fn event(&self, name: &str, value: &impl Serialize) {
        self.frame(name, value);
    }

    fn frame(&self, event: &str, value: &impl Serialize) {
        let mut buffer = self.0.lock();
        let start = buffer.len();
        if !event.is_empty() {
            buffer.extend_from_slice(b"event: ");
            buffer.extend_from_slice(event.as_bytes());
            buffer.push(b'\n');
        }
        buffer.extend_from_slice(b"data: ");
        match serde_json::to_writer(&mut *buffer, value) {
            Ok(()) => buffer.extend_from_slice(b"\n\n"),
            Err(error) => {
                // Happens only for maps with keys that are not strings, and no frame has such a map.
                tracing::error!(%error, "cannot serialize a stream event; the event is skipped");
                buffer.truncate(start);
            }
        }
    }

    /// Ends a complete answer: `data: [DONE]`.
    pub fn done(&self) {
        self.0.lock().extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Ends an incomplete answer with OpenAI's error object.
    pub fn error(&self, error: &ApiError) {
        self.data(&error.body());
    }
}

/// A response that streams the frames that `write` writes.
pub fn respond<F: Future<Output = ()> + Send + 'static>(write: impl FnOnce(Frames) -> F) -> Response {
    let body = SseBody::new(write, KEEP_ALIVE);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Without it nginx buffers the frames.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(body)).into_response()
}

/// A stream that starts before the response of `answer` is known. It sends comments while it waits and then the body of that
/// response. `error` writes a refusal.
pub fn later(
    answer: impl Future<Output = Result<Response, ApiError>> + Send + 'static,
    error: fn(&Frames, &ApiError),
) -> Response {
    respond(move |out| async move {
        let mut body = match answer.await {
            Ok(answer) => answer.into_body().into_data_stream(),
            Err(refusal) => return error(&out, &refusal),
        };
        while let Some(Ok(bytes)) = body.next().await {
            out.0.lock().extend_from_slice(&bytes);
            // Sends these bytes before it takes more: the rest stays in the body, where its memory is counted.
            tokio::task::yield_now().await;
        }
    })
}

/// Streams what a future writes, and a comment after `keep_alive` of silence.
struct SseBody<F> {
    writer: Option<Pin<Box<F>>>,
    frames: Frames,
    keep_alive: Duration,
    sent: Instant,
    timer: Pin<Box<Sleep>>,
}

impl<F: Future<Output = ()>> SseBody<F> {
    fn new(write: impl FnOnce(Frames) -> F, keep_alive: Duration) -> Self {
        let frames = Frames::default();
        let writer = Some(Box::pin(write(frames.clone())));
        Self { writer, frames, keep_alive, sent: Instant::now(), timer: Box::pin(tokio::time::sleep(keep_alive)) }
    }
}

impl<F: Future<Output = ()>> Stream for SseBody<F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.writer.as_mut().is_some_and(|writer| writer.as_mut().poll(context).is_ready()) {
            this.writer = None;
        }
        let written = mem::take(&mut *this.frames.0.lock());
        if !written.is_empty() {
            this.sent = Instant::now();
            return Poll::Ready(Some(Ok(written.into())));
        }
        if this.writer.is_none() {
            return Poll::Ready(None);
        }
        // The timer is reset only when it fires, not for every token.
        while this.timer.as_mut().poll(context).is_ready() {
            let due = this.sent + this.keep_alive;
            if due > Instant::now() {
                this.timer.as_mut().reset(due);
                continue;
            }
            this.sent = Instant::now();
            this.timer.as_mut().reset(this.sent + this.keep_alive);
            return Poll::Ready(Some(Ok(Bytes::from_static(b": keep-alive\n\n"))));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn silence_is_filled_with_comments() {
        let beat = Duration::from_millis(400);
        let write = |frames: Frames| async move {
            tokio::time::sleep(beat / 2).await;
            frames.data(&1);
            tokio::time::sleep(beat * 5 / 2).await;
            frames.data(&2);
            frames.done();
        };
        let chunks: Vec<_> = SseBody::new(write, beat).map(|chunk| chunk.unwrap()).collect().await;
        let text = String::from_utf8(chunks.concat()).unwrap();
        assert_eq!(text, "data: 1\n\n: keep-alive\n\n: keep-alive\n\ndata: 2\n\ndata: [DONE]\n\n");
    }

    #[tokio::test]
    async fn silence_starts_at_the_last_frame() {
        let write = |frames: Frames| async move {
            frames.data(&1);
            std::future::pending::<()>().await;
        };
        let mut body = SseBody::new(write, Duration::from_secs(3600));
        assert_eq!(body.next().await.unwrap().unwrap(), "data: 1\n\n");
        // The timer fires long before an hour of silence.
        body.timer.as_mut().reset(Instant::now());
        let more = tokio::time::timeout(Duration::from_millis(50), body.next()).await;
        assert!(more.is_err(), "{more:?}");
        assert!(body.timer.deadline() > Instant::now(), "the timer was not reset");
    }

    #[tokio::test]
    async fn dropped_body_drops_the_writer() {
        let alive = Arc::new(());
        let held = alive.clone();
        let response = respond(|frames| async move {
            let _held = held;
            frames.data(&"a");
            tokio::task::yield_now().await;
            frames.data(&"b");
            std::future::pending::<()>().await;
        });
        let mut body = response.into_body().into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), "data: \"a\"\n\n");
        assert_eq!(body.next().await.unwrap().unwrap(), "data: \"b\"\n\n");
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(body);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn later_body_is_read_piece_by_piece() {
        let taken = Arc::new(Mutex::new(0));
        let count = taken.clone();
        let pieces = tokio_stream::iter(0..3).map(move |piece| {
            *count.lock() += 1;
            Ok::<_, Infallible>(Bytes::from(format!("{piece}")))
        });
        let answer = async move { Ok(Body::from_stream(pieces).into_response()) };
        let mut body = later(answer, |_, _| {}).into_body().into_data_stream();
        for piece in 0..3 {
            assert_eq!(body.next().await.unwrap().unwrap(), piece.to_string());
            assert_eq!(*taken.lock(), piece + 1);
        }
        assert!(body.next().await.is_none());
    }
}
