//! Qwen3.5 and 3.6 models, dense and mixture of experts.
//!
//! Read [`mod@reference`] first: it is the architecture in plain tensors. [`forward`] computes the same on buffers of any device.

pub mod config;
mod device_state;
mod drafts;
mod forward;
mod inspect;
mod load;
pub mod reference;
mod runtime;
pub mod speed;
mod state;
mod weights;

pub use config::Config;
pub use drafts::{
    dflash::{self, DflashModel},
    hidden_taps::HiddenTaps,
    mtp::{MtpPrediction, ROWS as MTP_ROWS},
};
pub use forward::RouterChoice;
pub use inspect::CheckpointInfo;
pub use load::{LoadOptions, MtpSource, Qwen, StoreOptions};
pub use reference::Reference;
pub use state::{
    kv_pages::PagePool,
    rollback::ROWS as VERIFY_ROWS,
    sequence::QwenState,
    snapshot::{CopiedPages, KvPage, PAGE, Snapshot, SnapshotSize},
};

use crate::{device::DeviceError, error::ModelError};
use std::sync::Arc;

/// The rows of logits that a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    None,
    Last,
    All,
}

/// Logits, row after row: `[rows, vocab]`.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    pub vocab: usize,
    pub data: Vec<f32>,
}

impl Logits {
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.vocab).unwrap_or(0)
    }

    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.vocab..(index + 1) * self.vocab]
    }
}

/// Asked between the layers of a pass: false gives the pass up, and the sequence with it.
pub type GoOn<'a> = dyn Fn() -> bool + 'a;

/// A model as the engine sees it: so the engine and the server also run against a test double.
pub trait Model: Send + 'static {
    /// Everything one sequence remembers: KV cache, delta and convolution state.
    type State: Send;

    /// An empty state.
    fn start(&self) -> Result<Self::State, ModelError>;

    /// Appends `ids` to the sequence. The bytes of a row of logits do not depend on how `ids` are cut into calls; on a GPU, which
    /// computes a prompt's rows in half precision, they depend on whether a call has one row or several.
    fn forward(&mut self, state: &mut Self::State, ids: &[u32], rows: Rows) -> Result<Logits, ModelError> {
        self.forward_marking(state, ids, rows, &[], &mut Vec::new(), &|| true)
    }

    /// [`Model::forward`], adding to `taken` a snapshot at each of `marks`: positions, ascending, behind the
    /// first of `ids` and at most behind the last. They are taken in passing: the weights are read as often as without.
    ///
    /// # Errors
    /// [`ModelError::GivenUp`] once `go_on` says so; like any error it leaves `state` in the middle of something.
    fn forward_marking(
        &mut self,
        state: &mut Self::State,
        ids: &[u32],
        rows: Rows,
        marks: &[usize],
        taken: &mut Vec<Snapshot>,
        go_on: &GoOn<'_>,
    ) -> Result<Logits, ModelError>;

    /// [`Model::forward`] of a few rows, with the logits behind each: the bytes of one by one. Until the next call on
    /// `state`, [`Model::take_back`] may end the sequence before the last of them.
    fn verify(&mut self, state: &mut Self::State, ids: &[u32]) -> Result<Logits, ModelError>;

    /// Directly behind a [`Model::verify`]: the sequence never had its last `rows` tokens. The first one stays.
    fn take_back(&mut self, state: &mut Self::State, rows: usize) -> Result<(), ModelError>;

    /// From now on each pass leaves these hidden rows, until the next one. Instead of any that were asked for before.
    fn tap(&mut self, taps: &HiddenTaps) -> Result<(), ModelError> {
        let _ = taps;
        Err(ModelError::Config("this model leaves no hidden rows".into()))
    }

    /// From now on passes leave the hidden rows that were asked for, or leave out to do so.
    fn tapping(&mut self, on: bool) {
        let _ = on;
    }

    /// The hidden rows that the last pass kept of its first `rows` rows: `[kept rows, layers, hidden]`.
    fn tapped(&mut self, rows: usize, into: &mut Vec<f32>) -> Result<(), ModelError> {
        let _ = rows;
        into.clear();
        Ok(())
    }

    /// The sequence's present state.
    fn snapshot(&self, state: &mut Self::State) -> Result<Snapshot, ModelError>;

    /// The sequence that `snapshot` was taken of, by this model or one with the same bytes. The part that `into`
    /// already holds of it is not copied.
    fn restore(&self, snapshot: &Snapshot, into: Option<Self::State>) -> Result<Self::State, ModelError>;

    /// Positions from the first on whose keys and values a snapshot of `state` would share with whoever is alive.
    fn held(&self, state: &Self::State) -> usize;

    /// The pages that its sequences and snapshots share; `None` if its snapshots are copies.
    fn pool(&self) -> Option<Arc<PagePool>> {
        None
    }

    /// Pages that `state` lacks for `tokens` more.
    fn lacks(&self, state: &Self::State, tokens: usize) -> usize {
        let _ = (state, tokens);
        0
    }

    /// The bytes that its snapshots take.
    fn snapshot_size(&self) -> SnapshotSize;

    /// Between two passes, and now and then while there are none: gives memory back if the system is short of it, and takes
    /// it again. The answers stay what they are.
    fn fit_memory(&mut self) {}

    /// After a request that failed: true if the model's device had been given up, and another one computes from here on. Sequences
    /// that were started before are of no use any more, nor are the pages of their snapshots.
    ///
    /// # Errors
    /// The device is lost and no other one can take its place.
    fn recover(&mut self) -> Result<bool, ModelError> {
        Ok(false)
    }

    fn vocab(&self) -> usize;

    /// Most tokens a state can hold.
    fn context(&self) -> usize;

    /// Most tokens worth passing to one `forward`.
    fn chunk(&self) -> usize;
}

impl From<DeviceError> for ModelError {
    fn from(error: DeviceError) -> Self {
        ModelError::Memory(error.to_string())
    }
}
