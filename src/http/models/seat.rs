//! A request's model: here, or on its way.

use crate::{
    error::EngineError,
    http::{
        App,
        api_error::ApiError,
        stream::{self, Frames},
    },
};
use axum::response::Response;
use std::{
    future::Future,
    sync::{Arc, Weak},
    time::Instant,
};
use tokio::{sync::oneshot, time::timeout_at};

/// A model for a request.
pub enum Seat {
    Here(Arc<App>),
    Later(oneshot::Receiver<Result<Arc<App>, ApiError>>),
}

impl Seat {
    /// The response of `answer`, which is called when the model is here. A stream begins at once, so that comments keep its
    /// client; an error from then on, `deadline` among them, is written by `error`.
    pub async fn then<F>(
        self,
        deadline: Option<Instant>,
        streams: bool,
        error: fn(&Frames, &ApiError),
        answer: impl FnOnce(Arc<App>) -> F + Send + 'static,
    ) -> Result<Response, ApiError>
    where
        F: Future<Output = Result<Response, ApiError>> + Send + 'static,
    {
        match self {
            Seat::Later(_) if streams => {
                let answer = async { answer(self.taken().await?).await };
                Ok(stream::later(async move { in_time(deadline, answer).await? }, error))
            }
            _ => answer(self.taken().await?).await,
        }
    }

    pub async fn taken(self) -> Result<Arc<App>, ApiError> {
        match self {
            Seat::Here(app) => Ok(app),
            Seat::Later(reply) => reply.await.unwrap_or_else(|_| Err(ApiError::loading())),
        }
    }
}

/// The model of a request that has several answers, one after another. It may be let go of before the next one is asked for,
/// if the client takes too long to read the last.
pub struct Again(Option<Weak<App>>);

impl Again {
    pub fn new(app: &Arc<App>) -> Self {
        Self(Some(Arc::downgrade(app)))
    }

    pub fn app(&self) -> Result<Arc<App>, EngineError> {
        self.0.as_ref().and_then(Weak::upgrade).ok_or(EngineError::Unloaded)
    }

    /// The last answer has been asked for.
    pub fn leave(&mut self) {
        self.0 = None;
    }
}

/// What `work` comes to, if it does by `deadline`.
pub async fn in_time<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Result<T, ApiError> {
    match deadline {
        Some(deadline) => timeout_at(deadline.into(), work).await.map_err(|_| EngineError::TimedOut.into()),
        None => Ok(work.await),
    }
}
