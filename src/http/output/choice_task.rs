//! A choice that a background task generates while an earlier choice is written.

use crate::http::{
    ApiError,
    layers::MemoryPermit,
    output::generation::{Finished, Generation, Update},
};
use moestro_engine::error::EngineError;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::timeout,
};

/// A running choice. Dropping a `ChoiceTask` cancels its request.
pub struct ChoiceTask {
    updates: UnboundedReceiver<Update>,
    /// Memory of `updates`.
    waiting: Arc<Mutex<MemoryPermit>>,
    /// Interval of [`Update::Idle`].
    idle_interval: Duration,
    /// A set with exactly one task. A `JoinSet` aborts its tasks when it is dropped.
    task: JoinSet<Result<Finished, ApiError>>,
}

impl ChoiceTask {
    /// Runs the generation. `permit` grows by the memory of the updates that wait to be written. If there is no memory,
    /// the generation ends with the permit's error.
    pub fn spawn(mut generation: Generation, permit: MemoryPermit) -> Self {
        let (sender, updates) = unbounded_channel();
        let idle_interval = generation.idle_interval();
        let waiting = Arc::new(Mutex::new(permit));
        let permit = waiting.clone();
        let mut task = JoinSet::new();
        let keep = move |update: Update| {
            // `ChoiceTask::run` sends its own `Idle` updates.
            if !matches!(update, Update::Idle) {
                permit.lock().grow(update.waiting_bytes())?;
                let _ = sender.send(update);
            }
            Ok(())
        };
        task.spawn(async move { generation.run(keep).await });
        Self { updates, waiting, idle_interval, task }
    }

    /// Passes every update to `sink`, until the answer ends or `sink` fails.
    pub async fn run(&mut self, mut sink: impl FnMut(Update) -> Result<(), ApiError>) -> Result<Finished, ApiError> {
        loop {
            match timeout(self.idle_interval, self.updates.recv()).await {
                Ok(Some(update)) => {
                    let mut waiting = self.waiting.lock();
                    let rest = waiting.bytes() - update.waiting_bytes();
                    waiting.resize(rest)?;
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
