//! The model on the CPU as the engine sees it: sequences that start, grow, are kept, and go on from what was kept.

use super::{Logits, Model, Qwen, Rows, Snapshot, SnapshotSize, State};
use crate::error::ModelError;

impl Model for Qwen {
    type State = State;

    fn start(&self) -> Result<State, ModelError> {
        State::new(&self.config, self.plan.context, &self.compute)
    }

    fn forward_marking(
        &mut self,
        state: &mut State,
        ids: &[u32],
        rows: Rows,
        marks: &[usize],
        taken: &mut Vec<Snapshot>,
    ) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, (marks, taken), &mut |_, _| ())
    }

    fn snapshot(&self, state: &mut State) -> Result<Snapshot, ModelError> {
        state.snapshot(state.len, state.fixed()?)
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<State>) -> Result<State, ModelError> {
        if snapshot.len > self.plan.context {
            return Err(ModelError::ContextFull { context: self.plan.context });
        }
        let mut state = into.map_or_else(|| self.start(), Ok)?;
        state.restore(snapshot)?;
        Ok(state)
    }

    fn held(&self, state: &State) -> usize {
        state.held()
    }

    fn snapshot_size(&self) -> SnapshotSize {
        SnapshotSize { state: self.shape.state, position: self.shape.kv_per_token }
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn context(&self) -> usize {
        self.plan.context
    }

    fn chunk(&self) -> usize {
        self.plan.chunk
    }
}
