//! A model where it computes: on the CPU, or on the system's GPU.

use super::{
    Logits, Model, Qwen, Rows, State,
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
            _ => Err(ModelError::Config("the state belongs to another device".into())),
        }
    }
}

impl Model for Placed {
    type State = PlacedState;

    fn start(&self) -> Result<PlacedState, ModelError> {
        Ok(match self {
            Placed::Cpu(qwen) => PlacedState::Cpu(qwen.start()?),
            Placed::Gpu(model) => PlacedState::Gpu(model.start()?),
        })
    }

    fn forward(&mut self, state: &mut PlacedState, ids: &[u32], rows: Rows) -> Result<Logits, ModelError> {
        match (self, state) {
            (Placed::Cpu(qwen), PlacedState::Cpu(state)) => qwen.forward(state, ids, rows),
            (Placed::Gpu(model), PlacedState::Gpu(state)) => model.forward(state, ids, rows),
            _ => Err(ModelError::Config("the state belongs to another device".into())),
        }
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
