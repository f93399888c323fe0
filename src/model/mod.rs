//! Qwen3.5 and 3.6 models, dense and mixture of experts, and the [`Model`] trait through which the engine uses them.
//!
//! Read [`mod@reference`] first: it is the architecture in plain tensors, one function per formula. [`forward`] computes
//! the same on the buffers of any device.
//!
//! | file | what it holds |
//! |---|---|
//! | `config`, `weights`, `dequantise` | `config.json` as shapes; the trunk's tensors by name |
//! | `options`, `inspect`, `load` | how to load a checkpoint, what it needs, and loading it |
//! | `runtime` | a loaded model: forward, verify, snapshots |
//! | `logits` | a pass's logits, and sums over a row of them |
//! | `ngram_hash`, `ngram_table` | which rows of an n-gram table a token has; reading them from the disk |
//! | `positions` | positions of rows for RoPE, with images |
//! | `device_state`, `placement`, `shared_backend` | what a model keeps on one device |
//! | `forward/` | one pass: attention, delta net, experts, head, activation buffers |
//! | `state/` | one sequence: KV pages, delta-net state, snapshots, rollback |
//! | `vision/` | images in prompts |
//! | `drafts/` | drafts that read hidden rows: MTP and DFlash |

pub mod config;
mod dequantise;
mod device_state;
mod drafts;
mod forward;
#[cfg(test)]
mod image_tests;
mod inspect;
mod load;
pub mod logits;
mod model_parts;
mod ngram_hash;
mod ngram_table;
mod options;
mod placement;
mod positions;
pub mod reference;
mod runtime;
mod shared_backend;
pub mod speed;
mod state;
mod vision;
mod weights;

pub use config::Config;
pub use drafts::{
    dflash::{self, DflashModel},
    hidden_taps::HiddenTaps,
    mtp::{MTP_ROWS, MtpPrediction},
};
pub use inspect::{CheckpointInfo, cpu_scratch};
pub use load::Qwen;
pub use logits::Logits;
pub use ngram_hash::ngram_rows;
pub use options::{LoadOptions, MtpSource, StoreOptions, VisionOptions};
pub use reference::Reference;
pub use state::{
    kv_pages::{KvPage, PAGE, PagePool},
    rollback::MAX_VERIFY_ROWS,
    sequence::QwenState,
    snapshot::{CopiedPages, Snapshot, SnapshotSize},
};
pub use vision::{Image, ImageLimits, ImageProcessor, PlacedImage, VisionTower, place_images, prefix_keys};

use crate::{device::DeviceError, error::ModelError};
use std::sync::Arc;

/// The rows of logits that a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    None,
    Last,
    All,
}

/// The experts that each token of a layer visits, likeliest first, and their weights.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RouterChoice {
    /// Experts per token.
    pub k: usize,
    /// `T * k` experts.
    pub ids: Vec<u32>,
    /// `T * k` weights.
    pub weights: Vec<f32>,
}

impl RouterChoice {
    /// The chosen experts without repetition, in ascending order.
    pub fn distinct(&self) -> Vec<u32> {
        let mut ids = self.ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// Sees a layer's number and its router's choice.
pub type RouterObserver<'a> = dyn FnMut(usize, &RouterChoice) + 'a;

/// Images, callbacks and snapshots of a forward pass. The default has none.
#[derive(Default)]
pub struct PassHooks<'a> {
    /// The images of the sequence, in order. Those outside the pass's tokens have no effect.
    pub images: &'a [PlacedImage],
    /// Positions at which to take a snapshot: ascending, after the first of the pass's tokens, at most after the last.
    /// Snapshots cost no extra read of the weights.
    pub snapshot_at: &'a [usize],
    /// The snapshots taken, one per position of `snapshot_at`.
    pub snapshots: Vec<Snapshot>,
    /// Asked before each layer. `false` aborts the pass with [`ModelError::GivenUp`]; the sequence is then unusable.
    pub keep_going: Option<&'a dyn Fn() -> bool>,
    /// Sees each layer's router choice. A GPU with all experts resident does not report it.
    pub on_route: Option<&'a mut RouterObserver<'a>>,
}

/// What does not depend on a sequence.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    pub vocab: usize,
    /// Maximum number of tokens a sequence can hold.
    pub context: usize,
    /// Maximum number of tokens worth passing to one forward call.
    pub chunk: usize,
    /// Maximum number of sequences that [`Model::forward_each`] computes in one pass. 1 if a pass has rows of one sequence
    /// only.
    pub batch: usize,
    /// True if the bytes of a row do not depend on the number of rows in its call.
    pub exact_chunks: bool,
    pub snapshot_size: SnapshotSize,
    /// The KV pages that sequences and snapshots share. `None` if snapshots are copies.
    pub pages: Option<Arc<PagePool>>,
    /// Prepares images. `None` if the model reads text only.
    pub images: Option<Arc<ImageProcessor>>,
}

/// State of one sequence, as the engine sees it.
pub trait SequenceState: Send {
    /// Undoes the last `rows` rows of the verify just run: the draft tokens that the sampler rejected. The verify's
    /// first row always stays.
    fn reject(&mut self, rows: usize) -> Result<(), ModelError>;

    /// KV pages that `tokens` more tokens need beyond those the sequence holds.
    fn missing_pages(&self, _tokens: usize) -> usize {
        0
    }

    /// Positions from the start whose keys and values a snapshot taken now would share instead of copying.
    fn shared_positions(&self) -> usize;
}

/// Hidden rows that passes leave for a draft model. The defaults are for a model that offers none.
pub trait HiddenStates {
    /// Chooses the hidden rows that each pass leaves from now on, replacing any earlier choice.
    fn set_taps(&mut self, _taps: &HiddenTaps) -> Result<(), ModelError> {
        Err(ModelError::Config("this model has no hidden rows for a draft".into()))
    }

    /// Switches the chosen taps on or off. Passes are faster without.
    fn enable_taps(&mut self, _on: bool) {}

    /// Replaces `out` by the rows that the last pass kept of its first `rows` rows: `[kept rows, layers, hidden]`.
    fn tapped_rows(&mut self, _rows: usize, out: &mut Vec<f32>) -> Result<(), ModelError> {
        out.clear();
        Ok(())
    }
}

/// A model as the engine sees it. The engine and the server also run against a test double.
pub trait Model: HiddenStates + Send + 'static {
    /// KV cache, delta-net and convolution state of one sequence.
    type State: SequenceState;

    fn info(&self) -> ModelInfo;

    /// Starts an empty sequence.
    fn start(&self) -> Result<Self::State, ModelError>;

    /// Appends `ids` to the sequence. The logits do not depend on how `ids` are cut into calls, with one exception: a GPU
    /// computes prompts in half precision, so there a row's bytes depend on whether a call has one row or several.
    ///
    /// # Errors
    /// Any error, [`ModelError::GivenUp`] included, leaves `state` unusable.
    fn forward_with(
        &mut self,
        state: &mut Self::State,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError>;

    /// Appends one token to each of several sequences and returns the logits after each, with the same bytes as one sequence at
    /// a time.
    ///
    /// # Errors
    /// Any error leaves all the states unusable.
    fn forward_each(&mut self, rows: &mut [(&mut Self::State, u32)]) -> Result<Logits, ModelError> {
        let mut all = Logits::default();
        for (state, id) in rows {
            let logits = self.forward_with(state, &[*id], Rows::Last, &mut PassHooks::default())?;
            all.vocab = logits.vocab;
            all.data.extend(logits.data);
        }
        Ok(all)
    }

    /// Appends a few rows and returns the logits after each, with the same bytes as one row at a time. Until the next
    /// call on `state`, [`SequenceState::reject`] can undo all but the first.
    fn verify(&mut self, state: &mut Self::State, ids: &[u32]) -> Result<Logits, ModelError>;

    /// Takes a snapshot of the sequence at its end.
    fn snapshot(&self, state: &mut Self::State) -> Result<Snapshot, ModelError>;

    /// Restores a snapshot taken by this model, or by one with the same weights. Reuses the memory of `reuse` and does
    /// not copy pages that it already holds.
    fn restore(&self, snapshot: &Snapshot, reuse: Option<Self::State>) -> Result<Self::State, ModelError>;

    /// Returns memory to the system when it is short, and takes it back later. Called between passes and while idle.
    /// Never changes results.
    fn fit_memory(&mut self) {}

    /// Called after a failed request. Returns true if the device was lost and the model now runs on another one: then
    /// existing sequences and the pages of their snapshots are invalid.
    ///
    /// # Errors
    /// The device is lost and no other one can take over.
    fn recover(&mut self) -> Result<bool, ModelError> {
        Ok(false)
    }
}

impl From<DeviceError> for ModelError {
    fn from(error: DeviceError) -> Self {
        ModelError::Memory(error.to_string())
    }
}
