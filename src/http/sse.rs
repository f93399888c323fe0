//! Streams: server-sent events, or lines of JSON for clients of Ollama. A future that runs inside the response body
//! writes the stream.
//!
//! There is no separate task and no channel. The future runs when the connection can send more. The future is dropped
//! with the connection, so a client that disconnects cancels its generation. Text that is generated while the
//! connection is busy is sent in one piece. Otherwise each token is sent as soon as it is generated.

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
use tokio_stream::Stream;

/// Duration of silence after which a comment is sent, because clients and proxies close silent connections. Reasons for
/// silence are a full queue, a long prompt, or text that may become a tool call.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Format of a stream's frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StreamFormat {
    #[default]
    Events,
    /// One JSON value per line. Clients parse every line as JSON, so a stream of lines has no comments.
    Lines,
}

/// Bytes that have been written but not sent. The locks are never contended, because one task both writes and reads the
/// bytes.
#[derive(Clone)]
pub struct Frames {
    buffer: Arc<Mutex<Vec<u8>>>,
    /// Time of the last frame, or of the start of the stream.
    written: Arc<Mutex<Instant>>,
    format: StreamFormat,
}

impl Frames {
    fn new(format: StreamFormat) -> Self {
        Self { buffer: Arc::default(), written: Arc::new(Mutex::new(Instant::now())), format }
    }

    /// Time since the last frame was written.
    pub fn silence(&self) -> Duration {
        self.written.lock().elapsed()
    }

    /// Writes `data: {...}`, or a line of JSON.
    pub fn data(&self, value: &impl Serialize) {
        self.event("", value);
    }

    /// Writes `event: name`, then `data: {...}`. Lines of JSON have no names.
    pub fn event(&self, name: &str, value: &impl Serialize) {
        *self.written.lock() = Instant::now();
        let mut buffer = self.buffer.lock();
        let start = buffer.len();
        let is_event = self.format == StreamFormat::Events;
        if is_event && !name.is_empty() {
            buffer.extend_from_slice(b"event: ");
            buffer.extend_from_slice(name.as_bytes());
            buffer.push(b'\n');
        }
        buffer.extend_from_slice(if is_event { b"data: " } else { b"" });
        match serde_json::to_writer(&mut *buffer, value) {
            Ok(()) => buffer.extend_from_slice(if is_event { b"\n\n" } else { b"\n" }),
            Err(error) => {
                // Happens only for maps with keys that are not strings, and no frame has such a map.
                tracing::error!(%error, "cannot serialize a stream event; the event is skipped");
                buffer.truncate(start);
            }
        }
    }

    /// Ends a complete answer with `data: [DONE]`.
    pub fn done(&self) {
        self.buffer.lock().extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Creates a response that streams the frames that the future of `write` writes.
pub fn respond<F: Future<Output = ()> + Send + 'static>(
    format: StreamFormat,
    write: impl FnOnce(Frames) -> F,
) -> Response {
    let body = SseBody::new(format, write, KEEP_ALIVE);
    let content_type = match format {
        StreamFormat::Events => "text/event-stream",
        StreamFormat::Lines => "application/x-ndjson",
    };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        // `no-transform` asks proxies not to compress the stream, because that delays frames.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform")),
        // Prevents nginx from buffering the frames.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(body)).into_response()
}

/// Streams the output of a future. Sends a comment after `keep_alive` without output.
struct SseBody<F> {
    writer: Option<Pin<Box<F>>>,
    frames: Frames,
    keep_alive: Duration,
    sent: Instant,
    timer: Pin<Box<Sleep>>,
}

impl<F: Future<Output = ()>> SseBody<F> {
    fn new(format: StreamFormat, write: impl FnOnce(Frames) -> F, keep_alive: Duration) -> Self {
        let frames = Frames::new(format);
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
        let written = mem::take(&mut *this.frames.buffer.lock());
        if !written.is_empty() {
            this.sent = Instant::now();
            return Poll::Ready(Some(Ok(written.into())));
        }
        if this.writer.is_none() {
            return Poll::Ready(None);
        }
        // The timer is reset only when it fires, not for every token.
        while this.frames.format == StreamFormat::Events && this.timer.as_mut().poll(context).is_ready() {
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
    use tokio_stream::StreamExt;

    #[tokio::test]
    async fn silence_is_filled_with_comments() {
        const COMMENT: &str = ": keep-alive\n\n";
        let (release, wait) = tokio::sync::oneshot::channel();
        let write = |frames: Frames| async move {
            frames.data(&1);
            wait.await.unwrap();
            frames.data(&2);
            frames.done();
        };
        let mut body = SseBody::new(StreamFormat::Events, write, Duration::from_millis(20));
        let mut text = String::new();
        let mut release = Some(release);
        while let Some(chunk) = body.next().await {
            text += std::str::from_utf8(&chunk.unwrap()).unwrap();
            if text.matches(COMMENT).count() == 2
                && let Some(release) = release.take()
            {
                release.send(()).unwrap();
            }
        }
        assert!(text.starts_with(&format!("data: 1\n\n{COMMENT}{COMMENT}")), "{text}");
        assert_eq!(text.replace(COMMENT, ""), "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
    }

    #[tokio::test]
    async fn lines_have_no_comments() {
        let beat = Duration::from_millis(5);
        let write = |frames: Frames| async move {
            frames.data(&1);
            tokio::time::sleep(10 * beat).await;
            frames.event("name", &2);
        };
        let chunks: Vec<_> = SseBody::new(StreamFormat::Lines, write, beat).map(|chunk| chunk.unwrap()).collect().await;
        assert_eq!(chunks.concat(), b"1\n2\n");
    }

    #[tokio::test]
    async fn silence_starts_at_the_last_frame() {
        let write = |frames: Frames| async move {
            frames.data(&1);
            std::future::pending::<()>().await;
        };
        let mut body = SseBody::new(StreamFormat::Events, write, Duration::from_secs(3600));
        assert_eq!(body.next().await.unwrap().unwrap(), "data: 1\n\n");
        // Makes the timer fire now, long before an hour of silence has passed.
        body.timer.as_mut().reset(Instant::now());
        let more = tokio::time::timeout(Duration::from_millis(50), body.next()).await;
        assert!(more.is_err(), "{more:?}");
        assert!(body.timer.deadline() > Instant::now(), "the timer was not reset");
    }

    #[tokio::test]
    async fn dropped_body_drops_the_writer() {
        let alive = Arc::new(());
        let held = alive.clone();
        let response = respond(StreamFormat::Events, |frames| async move {
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
}
