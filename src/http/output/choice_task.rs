//! A choice that a background task generates while an earlier choice is written.

use crate::{
    error::EngineError,
    http::output::{Finished, Generation, IDLE_INTERVAL, Update},
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::timeout,
};

/// A running choice. Dropping a `ChoiceTask` cancels its request.
pub struct ChoiceTask {
    updates: UnboundedReceiver<Update>,
    /// A set with exactly one task. A `JoinSet` aborts its tasks when it is dropped.
    task: JoinSet<Result<Finished, EngineError>>,
}

impl ChoiceTask {
    pub fn spawn(mut generation: Generation) -> Self {
        let (sender, updates) = unbounded_channel();
        let mut task = JoinSet::new();
        let keep = move |update| {
            // `ChoiceTask::run` sends its own `Idle` updates.
            if !matches!(update, Update::Idle) {
                let _ = sender.send(update);
            }
        };
        task.spawn(async move { generation.run(keep).await });
        Self { updates, task }
    }

    /// Passes every update to `sink`, until the answer ends.
    pub async fn run(&mut self, mut sink: impl FnMut(Update)) -> Result<Finished, EngineError> {
        loop {
            match timeout(IDLE_INTERVAL, self.updates.recv()).await {
                Ok(Some(update)) => sink(update),
                Ok(None) => break,
                Err(_) => sink(Update::Idle),
            }
        }
        self.task.join_next().await.and_then(Result::ok).unwrap_or(Err(EngineError::Stopped))
    }
}
