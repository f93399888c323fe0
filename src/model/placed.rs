//! A model where it computes: on the CPU, or on the system's GPU.

use super::{
    Logits, Model, Qwen, Rows, Snapshot, SnapshotSize, State,
    gpu::{GpuState, OnGpu},
};
use crate::{device::Gpu, error::ModelError};

/// A loaded model.
pub enum Placed {
    Cpu(Box<Qwen>),
    Gpu(Box<OnGpu<Box<dyn Gpu>>>),
}

/// What one sequence remembers, where its model computes.
pub enum PlacedState {
    Cpu(State),
    Gpu(GpuState),
}

impl Placed {
    /// The model as it was loaded.
    pub fn qwen(&self) -> &Qwen {
        match self {
            Placed::Cpu(qwen) => qwen,
            Placed::Gpu(model) => model.qwen(),
        }
    }

    /// [`Model::forward`], showing `observe` the distinct experts that each layer asks the store for.
    pub fn forward_observed(
        &mut self,
        state: &mut PlacedState,
        ids: &[u32],
        rows: Rows,
        observe: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<Logits, ModelError> {
        match (self, state) {
            (Placed::Cpu(qwen), PlacedState::Cpu(state)) => {
                qwen.forward_observed(state, ids, rows, &mut |layer, routes| {
                    let mut distinct = routes.ids.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    observe(layer, &distinct);
                })
            }
            (Placed::Gpu(model), PlacedState::Gpu(state)) => model.forward_observed(state, ids, rows, observe),
            _ => Err(elsewhere()),
        }
    }
}

fn elsewhere() -> ModelError {
    ModelError::Config("the state belongs to another device".into())
}

impl Model for Placed {
    type State = PlacedState;

    fn start(&self) -> Result<PlacedState, ModelError> {
        Ok(match self {
            Placed::Cpu(qwen) => PlacedState::Cpu(qwen.start()?),
            Placed::Gpu(model) => PlacedState::Gpu(model.start()?),
        })
    }

    fn forward_marking(
        &mut self,
        state: &mut PlacedState,
        ids: &[u32],
        rows: Rows,
        marks: &[usize],
        taken: &mut Vec<Snapshot>,
    ) -> Result<Logits, ModelError> {
        match (self, state) {
            (Placed::Cpu(qwen), PlacedState::Cpu(state)) => qwen.forward_marking(state, ids, rows, marks, taken),
            (Placed::Gpu(model), PlacedState::Gpu(state)) => model.forward_marking(state, ids, rows, marks, taken),
            _ => Err(elsewhere()),
        }
    }

    fn snapshot(&self, state: &mut PlacedState) -> Result<Snapshot, ModelError> {
        match (self, state) {
            (Placed::Cpu(qwen), PlacedState::Cpu(state)) => qwen.snapshot(state),
            (Placed::Gpu(model), PlacedState::Gpu(state)) => model.snapshot(state),
            _ => Err(elsewhere()),
        }
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<PlacedState>) -> Result<PlacedState, ModelError> {
        match (self, into) {
            (Placed::Cpu(qwen), None) => qwen.restore(snapshot, None).map(PlacedState::Cpu),
            (Placed::Cpu(qwen), Some(PlacedState::Cpu(state))) => {
                qwen.restore(snapshot, Some(state)).map(PlacedState::Cpu)
            }
            (Placed::Gpu(model), None) => model.restore(snapshot, None).map(PlacedState::Gpu),
            (Placed::Gpu(model), Some(PlacedState::Gpu(state))) => {
                model.restore(snapshot, Some(state)).map(PlacedState::Gpu)
            }
            _ => Err(elsewhere()),
        }
    }

    fn held(&self, state: &PlacedState) -> usize {
        match (self, state) {
            (Placed::Cpu(qwen), PlacedState::Cpu(state)) => qwen.held(state),
            (Placed::Gpu(model), PlacedState::Gpu(state)) => model.held(state),
            _ => 0,
        }
    }

    fn snapshot_size(&self) -> SnapshotSize {
        self.qwen().snapshot_size()
    }

    fn vocab(&self) -> usize {
        self.qwen().vocab()
    }

    fn context(&self) -> usize {
        self.qwen().context()
    }

    fn chunk(&self) -> usize {
        self.qwen().chunk()
    }
}
