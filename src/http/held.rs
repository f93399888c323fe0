//! Bodies that keep something until they are sent: a connection's place, or a share of the requests' memory.

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// The most that a connection is given at a time: it lets go of a body when it has all of it, sent or not.
const PIECE: usize = 16 << 10;

/// The response, whose body keeps `held` until hardly more than a piece of it is left to send, or it is dropped.
pub fn with<T: Send + Unpin + 'static>(response: Response, held: T) -> Response {
    response.map(|body| Body::new(Holding { body, rest: Bytes::new(), _held: held }))
}

struct Holding<T> {
    body: Body,
    /// What is left of the frame that is being given.
    rest: Bytes,
    _held: T,
}

impl<T: Unpin> HttpBody for Holding<T> {
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
        let piece = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
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
    async fn what_is_held_goes_with_the_last_piece() {
        let (held, text) = (Arc::new(()), "x".repeat(2 * PIECE + 1));
        let mut body = with(Response::new(Body::from(text.clone())), held.clone()).into_body();
        let mut told = Vec::new();
        for left in [PIECE + 1, 1, 0] {
            assert_eq!((body.is_end_stream(), Arc::strong_count(&held)), (false, 2));
            let piece = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
            told.extend(piece.into_data().unwrap());
            assert_eq!(body.size_hint().exact(), Some(left as u64));
        }
        assert!(body.is_end_stream());
        drop(body);
        assert_eq!((told, Arc::strong_count(&held)), (text.into_bytes(), 1));
    }
}
