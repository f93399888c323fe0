//! A request's model, which is in memory or has yet to be loaded.

use super::loaded::LoadedModel;
use crate::{error::EngineError, http::errors::ApiError};
use std::sync::{Arc, Weak};
use tokio::sync::oneshot;

pub enum ModelLease {
    Ready(Arc<LoadedModel>),
    Waiting(oneshot::Receiver<Result<Arc<LoadedModel>, ApiError>>),
}

impl ModelLease {
    /// True if the model has yet to be loaded.
    pub fn must_wait(&self) -> bool {
        matches!(self, Self::Waiting(_))
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
/// A weak reference does not keep the model in memory. If the client reads too slowly, the host may unload the model
/// between two generations.
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
