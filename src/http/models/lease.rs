//! A request's model: in memory already, or still to be loaded.

use super::loaded::LoadedModel;
use crate::{
    error::EngineError,
    http::{
        errors::ApiError,
        layers::timeouts::with_deadline,
        sse::{self, Frames},
    },
};
use axum::response::Response;
use std::{
    future::Future,
    sync::{Arc, Weak},
    time::Instant,
};
use tokio::sync::oneshot;

pub enum ModelLease {
    Ready(Arc<LoadedModel>),
    Waiting(oneshot::Receiver<Result<Arc<LoadedModel>, ApiError>>),
}

impl ModelLease {
    /// Waits for the model and returns the response of `answer`.
    ///
    /// A stream that waits begins at once, so that keep-alive comments hold the connection open. `write_error` then
    /// reports every later error in the stream, an expired `deadline` included.
    pub async fn respond<F>(
        self,
        deadline: Option<Instant>,
        streams: bool,
        write_error: fn(&Frames, &ApiError),
        answer: impl FnOnce(Arc<LoadedModel>) -> F + Send + 'static,
    ) -> Result<Response, ApiError>
    where
        F: Future<Output = Result<Response, ApiError>> + Send + 'static,
    {
        match self {
            ModelLease::Waiting(_) if streams => {
                let answer = async { answer(self.wait().await?).await };
                Ok(sse::later(async move { with_deadline(deadline, answer).await? }, write_error))
            }
            _ => answer(self.wait().await?).await,
        }
    }

    pub async fn wait(self) -> Result<Arc<LoadedModel>, ApiError> {
        match self {
            ModelLease::Ready(model) => Ok(model),
            ModelLease::Waiting(reply) => reply.await.unwrap_or_else(|_| Err(ApiError::loading())),
        }
    }
}

/// The model of a request with several generations in sequence.
///
/// Does not keep the model in memory: the host may unload it between two generations if the client reads too slowly.
pub struct WeakModel(Option<Weak<LoadedModel>>);

impl WeakModel {
    pub fn new(model: &Arc<LoadedModel>) -> Self {
        Self(Some(Arc::downgrade(model)))
    }

    pub fn model(&self) -> Result<Arc<LoadedModel>, EngineError> {
        self.0.as_ref().and_then(Weak::upgrade).ok_or(EngineError::Unloaded)
    }

    /// Drops the reference after the last generation was queued.
    pub fn release(&mut self) {
        self.0 = None;
    }
}
