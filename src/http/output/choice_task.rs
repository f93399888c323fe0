//! A choice that a background task generates while an earlier choice is written.

use crate::{
    error::EngineError,
    http::output::{Finished, Generation, Update},
};
use std::time::Duration;
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::timeout,
};

/// A running choice. Dropping a `ChoiceTask` cancels its request.
pub struct ChoiceTask {
    updates: UnboundedReceiver<Update>,
    /// Interval of [`Update::Idle`].
    idle_interval: Duration,
    /// A set with exactly one task. A `JoinSet` aborts its tasks when it is dropped.
    task: JoinSet<Result<Finished, EngineError>>,
}

impl ChoiceTask {
    pub fn spawn(mut generation: Generation) -> Self {
        let (sender, updates) = unbounded_channel();
        let idle_interval = generation.idle_interval();
        let mut task = JoinSet::new();
        let keep = move |update| {
            // `ChoiceTask::run` sends its own `Idle` updates.
            if !matches!(update, Update::Idle) {
                let _ = sender.send(update);
            }
            Ok(())
        };
        task.spawn(async move { generation.run(keep).await });
        Self { updates, idle_interval, task }
    }

    /// Passes every update to `sink`, until the answer ends or `sink` fails.
    pub async fn run<E: From<EngineError>>(
        &mut self,
        mut sink: impl FnMut(Update) -> Result<(), E>,
    ) -> Result<Finished, E> {
        loop {
            match timeout(self.idle_interval, self.updates.recv()).await {
                Ok(Some(update)) => sink(update)?,
                Ok(None) => break,
                Err(_) => sink(Update::Idle)?,
            }
        }
        Ok(self.task.join_next().await.and_then(Result::ok).unwrap_or(Err(EngineError::Stopped))?)
    }
}
