//! The model as the engine sees it: sequences that start, grow, are kept, and go on from what was kept.

use super::{GoOn, Logits, Model, Pool, Qwen, Rows, Snapshot, SnapshotSize, State, Taps, placed::Placed};
use crate::error::ModelError;
use std::sync::Arc;

impl Model for Qwen {
    type State = State;

    fn start(&self) -> Result<State, ModelError> {
        let Placed { run, arenas, pool, heads, .. } = &mut *self.placed.borrow_mut();
        Ok(State::new(&self.parts.config, *heads, pool, arenas, &mut **run)?)
    }

    fn forward_marking(
        &mut self,
        state: &mut State,
        ids: &[u32],
        rows: Rows,
        marks: &[usize],
        taken: &mut Vec<Snapshot>,
        go_on: &GoOn<'_>,
    ) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, (marks, taken), go_on, None)
    }

    fn verify(&mut self, state: &mut State, ids: &[u32]) -> Result<Logits, ModelError> {
        self.try_rows(state, ids)
    }

    fn take_back(&mut self, state: &mut State, rows: usize) -> Result<(), ModelError> {
        self.forget(state, rows)
    }

    fn tap(&mut self, taps: &Taps) -> Result<(), ModelError> {
        self.set_taps(taps)
    }

    fn tapping(&mut self, on: bool) {
        self.placed.get_mut().tapped.off = !on;
    }

    fn tapped(&mut self, rows: usize, into: &mut Vec<f32>) -> Result<(), ModelError> {
        self.read_taps(rows, into)
    }

    fn snapshot(&self, state: &mut State) -> Result<Snapshot, ModelError> {
        let shared = self.placed.borrow().shared.clone();
        let _whole = shared.whole();
        self.settle(state)?;
        let run = &mut *self.placed.borrow_mut().run;
        let fixed = state.fixed(run)?;
        Ok(state.snapshot(state.len, fixed, run)?)
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<State>) -> Result<State, ModelError> {
        if snapshot.len > self.parts.plan.context {
            return Err(ModelError::ContextFull { context: self.parts.plan.context });
        }
        let Placed { run, arenas, pool, heads, .. } = &mut *self.placed.borrow_mut();
        let mut state = match into {
            Some(state) => state,
            None => State::room(&self.parts.config, *heads, pool, arenas, &mut **run)?,
        };
        state.restore(snapshot, &mut **run)?;
        Ok(state)
    }

    /// All whole pages are the sequence's own.
    fn held(&self, _: &State) -> usize {
        usize::MAX
    }

    fn pool(&self) -> Option<Arc<Pool>> {
        Some(self.placed.borrow().pool.clone())
    }

    fn lacks(&self, state: &State, tokens: usize) -> usize {
        state.lacks(tokens)
    }

    fn snapshot_size(&self) -> SnapshotSize {
        SnapshotSize { state: self.parts.shape.state, position: self.parts.shape.kv_per_token }
    }

    fn fit_memory(&mut self) {
        if let Some(store) = &self.parts.store {
            store.fit(&mut *self.placed.get_mut().run);
        }
    }

    fn recover(&mut self) -> Result<bool, ModelError> {
        self.leave_lost_device()
    }

    fn vocab(&self) -> usize {
        self.parts.config.vocab
    }

    fn context(&self) -> usize {
        self.parts.plan.context
    }

    fn chunk(&self) -> usize {
        self.parts.plan.chunk
    }
}
