//! A choice that a background task generates while an earlier choice is written.

use crate::http::{
    ApiError,
    layers::MemoryPermit,
    output::generation::{Finished, Generation, Update},
};
use moestro_engine::error::EngineError;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::timeout,
};

/// A running choice. Dropping a `ChoiceTask` cancels its request.
pub struct ChoiceTask {
    /// Updates that wait to be written, each with its memory.
    updates: UnboundedReceiver<(Update, MemoryPermit)>,
    /// Interval of [`Update::Idle`].
    idle_interval: Duration,
    /// A set with exactly one task. A `JoinSet` aborts its tasks when it is dropped.
    task: JoinSet<Result<Finished, ApiError>>,
}

impl ChoiceTask {
    /// Runs the generation. Updates that wait to be written take memory for the request of `permit`. If there is no
    /// memory, the generation ends with the permit's error.
    pub fn spawn(mut generation: Generation, permit: Arc<MemoryPermit>) -> Self {
        let (sender, updates) = unbounded_channel();
        let idle_interval = generation.idle_interval();
        let mut task = JoinSet::new();
        let keep = move |update: Update| {
            // `ChoiceTask::run` sends its own `Idle` updates.
            if !matches!(update, Update::Idle) {
                let waiting = permit.reserve(update.waiting_bytes())?;
                let _ = sender.send((update, waiting));
            }
            Ok(())
        };
        task.spawn(async move { generation.run(keep).await });
        Self { updates, idle_interval, task }
    }

    /// Passes every update to `sink`, until the answer ends or `sink` fails.
    pub async fn run(&mut self, mut sink: impl FnMut(Update) -> Result<(), ApiError>) -> Result<Finished, ApiError> {
        loop {
            match timeout(self.idle_interval, self.updates.recv()).await {
                Ok(Some((update, waiting))) => {
                    drop(waiting);
                    sink(update)?;
                }
                Ok(None) => break,
                Err(_) => sink(Update::Idle)?,
            }
        }
        let finished = self.task.join_next().await.and_then(Result::ok);
        finished.unwrap_or_else(|| Err(EngineError::Stopped.into()))
    }
}
