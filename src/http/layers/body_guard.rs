//! Response bodies that hold a resource (a connection slot or a memory permit) until the response is sent.

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// Maximum number of bytes per frame. A connection drops the body as soon as it has taken the last frame, even if that
/// frame is not sent yet. The last frame must therefore be small.
const FRAME_BYTES: usize = 16 << 10;

/// Keeps `guard` until only the last frame of the response is unsent, or the response is dropped.
pub fn hold<T: Send + Unpin + 'static>(response: Response, guard: T) -> Response {
    response.map(|body| Body::new(GuardedBody { body, rest: Bytes::new(), _guard: guard }))
}

struct GuardedBody<T> {
    body: Body,
    /// Unsent part of the current frame of `body`.
    rest: Bytes,
    _guard: T,
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let bytes = self.rest.len().min(FRAME_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.body.size_hint();
        let rest = self.rest.len() as u64;
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + rest);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + rest);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future::poll_fn, sync::Arc};

    #[tokio::test]
    async fn guard_drops_after_last_frame() {
        let guard = Arc::new(());
        let text = "x".repeat(2 * FRAME_BYTES + 1);
        let mut body = hold(Response::new(Body::from(text.clone())), guard.clone()).into_body();
        let mut sent = Vec::new();
        for left in [FRAME_BYTES + 1, 1, 0] {
            assert_eq!((body.is_end_stream(), Arc::strong_count(&guard)), (false, 2));
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
            sent.extend(frame.into_data().unwrap());
            assert_eq!(body.size_hint().exact(), Some(left as u64));
        }
        assert!(body.is_end_stream());
        drop(body);
        assert_eq!((sent, Arc::strong_count(&guard)), (text.into_bytes(), 1));
    }
}
