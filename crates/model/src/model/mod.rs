//! Qwen3.5, 3.6 and 3.8 models, dense and mixture of experts, and the [`Model`] trait through which the engine uses
//! them.
//!
//! Read [`mod@reference`] first. That module is the architecture in plain tensors, one function per formula.
//! [`forward`] computes the same on the buffers of any device.
//!
//! | file | what it holds |
//! |---|---|
//! | `config`, `json_table`, `weights`, `dequantize` | `config.json` as shapes; its values; the trunk's tensors by name |
//! | `options`, `inspect`, `load` | how to load a checkpoint, what it needs, and loading it |
//! | `qwen` | a loaded model, [`Qwen`]: forward, verify, snapshots |
//! | `run_pass` | one pass of a model on a device |
//! | `decode_ahead` | submitting the next token's pass before this token's logits are read |
//! | `logits`, `speed` | a pass's logits, and sums over a row of them; measured speed of the feed-forward |
//! | `ngram_hash`, `ngram_table` | which rows of an n-gram table a token has; reading them from the disk |
//! | `positions` | positions of rows for RoPE, with images |
//! | `hidden_taps` | the hidden rows that a pass records for drafts |
//! | `candle_gpu` | Candle's device on this machine's GPU, for the reference and the vision tower |
//! | `model_parts` | what a model keeps on every device |
//! | `device_state`, `placement` | what a model keeps on one device; moving it there |
//! | `forward/` | one pass: attention, delta net, experts, head, activation buffers |
//! | `state/` | one sequence: KV pages, delta-net state, snapshots, rollback |
//! | `vision/` | images in prompts |
//! | `drafts/` | drafts that read hidden rows: MTP and DFlash |

mod candle_gpu;
pub mod config;
mod decode_ahead;
mod dequantize;
mod device_state;
mod drafts;
mod forward;
mod hidden_taps;
#[cfg(test)]
mod image_tests;
mod inspect;
mod json_table;
mod load;
pub mod logits;
mod model_parts;
mod ngram_hash;
mod ngram_table;
mod options;
mod placement;
mod positions;
mod qwen;
pub mod reference;
mod run_pass;
pub mod speed;
mod state;
mod vision;
mod weights;

pub use candle_gpu::open_candle_gpu;
pub use config::Config;
pub use drafts::{
    dflash::{self, DflashModel},
    mtp::{HiddenRows, MTP_ROWS, MtpPrediction},
};
pub use hidden_taps::HiddenTaps;
pub use inspect::{CheckpointInfo, cpu_scratch};
pub use logits::Logits;
pub use ngram_hash::ngram_rows;
pub use options::{LoadOptions, MtpSource, StoreOptions, VisionOptions};
pub use qwen::Qwen;
pub use reference::Reference;
pub use state::{
    kv_pages::{KvPage, PAGE, PagePool, PageSize},
    rollback::MAX_VERIFY_ROWS,
    sequence::QwenState,
    snapshot::{Snapshot, SnapshotSize},
};
pub use vision::{Image, ImageLimits, ImageProcessor, PlacedImage, VisionTower, place_images, prefix_keys};

pub use moestro_compute::ops::TokenChoice;

use crate::error::ModelError;
use moestro_base::platform::Threads;
use moestro_compute::device::DeviceError;
use state::kv_pages::foreign_snapshot;
use std::sync::Arc;

/// The rows of logits that a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    None,
    Last,
    All,
    /// The logits after each token, with the same bytes as those of one token at a time. Until the next call with the
    /// same state, [`SequenceState::reject`] can undo all tokens except the first. Only for a few tokens, without
    /// images and snapshots.
    Verify,
}

/// Images, snapshots and the cancellation of a forward pass. The default has none.
#[derive(Default)]
pub struct PassHooks<'a> {
    /// True if the tokens belong to a prompt. A GPU computes these with other kernels than the tokens of answers, also
    /// a single one.
    pub is_prompt: bool,
    /// Tokens with which the caller will probably continue the sequence: the rest of a prompt. The model may prepare
    /// for them.
    pub following: &'a [u32],
    /// The images of the sequence, in order. Images outside the tokens of the pass have no effect.
    pub images: &'a [PlacedImage],
    /// Positions at which to take a snapshot, in ascending order. Each position is after the first token of the pass
    /// and at most after the last token. Snapshots cost no extra read of the weights.
    pub snapshot_at: &'a [usize],
    /// The snapshots taken, one per position of `snapshot_at`.
    pub snapshots: Vec<Snapshot>,
    /// Called before each layer. If it returns `false`, the pass fails with [`ModelError::GivenUp`], and the sequence
    /// is unusable.
    pub keep_going: Option<&'a dyn Fn() -> bool>,
    /// Set if a verify needs only the likeliest token after each row, of the ids below this number.
    pub likeliest_below: Option<usize>,
    /// The likeliest tokens, if a verify returns them instead of logits. [`u32::MAX`] if there is none, because every
    /// logit is NaN or negative infinity.
    pub likeliest: Vec<u32>,
    /// Set if the caller will probably extend the sequence by a token that is chosen in this way. A GPU may then choose
    /// and evaluate this token already: see [`SequenceState::ahead`].
    pub next: Option<NextToken>,
}

/// How the next token of a sequence will be chosen.
#[derive(Debug, Clone, Copy)]
pub struct NextToken {
    /// Ids from this number on are never chosen.
    pub usable: usize,
    pub choice: TokenChoice,
}

/// Properties of a model that do not depend on a sequence.
#[derive(Clone)]
pub struct ModelInfo {
    pub vocab: usize,
    /// Maximum number of tokens in a sequence.
    pub context: usize,
    /// Number of tokens above which a longer forward call is not faster.
    pub chunk: usize,
    /// Maximum number of sequences that [`Model::forward_each`] computes in one pass. 1 if a pass has rows of one
    /// sequence only.
    pub batch: usize,
    /// True if the bytes of a row do not depend on the number of rows in its call.
    pub exact_chunks: bool,
    pub snapshot_size: SnapshotSize,
    /// The KV pages that sequences and snapshots share. `None` if snapshots are copies.
    pub pages: Option<Arc<PagePool>>,
    /// Prepares images. `None` if the model reads text only.
    pub images: Option<Arc<ImageProcessor>>,
    /// The compute threads, which are idle between passes. `None` if there is only the calling thread.
    pub threads: Option<Arc<Threads>>,
}

/// State of one sequence, as the engine sees it.
pub trait SequenceState: Send {
    /// Undoes the last `rows` rows of the last verify: the draft tokens that the sampler rejected. The first row of the
    /// verify cannot be undone.
    fn reject(&mut self, rows: usize) -> Result<(), ModelError>;

    /// The token that the model has evaluated ahead, because of [`PassHooks::next`]. The next call for this sequence
    /// must be a forward pass of this token alone, or [`SequenceState::take_ahead`].
    fn ahead(&self) -> Option<u32> {
        None
    }

    /// Returns the token that the model has evaluated ahead, which is now a part of the sequence.
    fn take_ahead(&mut self) -> Option<u32> {
        None
    }

    /// Number of KV pages that `tokens` more tokens need, in addition to the pages that the sequence holds.
    fn missing_pages(&self, _tokens: usize) -> usize {
        0
    }

    /// Number of positions from the start whose keys and values a snapshot taken now would share instead of copy.
    fn shared_positions(&self) -> usize;
}

/// Hidden rows that passes record for a draft model. The default methods are for a model that records none.
pub trait HiddenStates {
    /// Chooses the hidden rows that each pass records from now on. Replaces the earlier choice.
    fn set_taps(&mut self, _taps: &HiddenTaps) -> Result<(), ModelError> {
        Err(ModelError::Config("this model records no hidden rows for drafts".into()))
    }

    /// Switches the recording of hidden rows on or off. Passes are faster without it.
    fn enable_taps(&mut self, _on: bool) {}

    /// Replaces `out` with the hidden rows that the last pass recorded for its first `rows` rows: `[recorded rows,
    /// layers, hidden]`.
    fn tapped_rows(&mut self, _rows: usize, out: &mut Vec<f32>) -> Result<(), ModelError> {
        out.clear();
        Ok(())
    }
}

/// The interface of a model for the engine. Tests implement it with a mock.
pub trait Model: HiddenStates + Send + 'static {
    /// KV cache, delta-net and convolution state of one sequence.
    type State: SequenceState;

    fn info(&self) -> ModelInfo;

    /// Starts an empty sequence.
    fn start(&mut self) -> Result<Self::State, ModelError>;

    /// Appends `ids` to the sequence. The logits do not depend on how `ids` are split into calls, with one exception. A
    /// GPU computes prompts in half precision, so a row's bytes depend on [`PassHooks::is_prompt`]. A call of several
    /// rows is a prompt, too.
    ///
    /// # Errors
    /// After any error, [`ModelError::GivenUp`] included, `state` is unusable.
    fn forward_with(
        &mut self,
        state: &mut Self::State,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError>;

    /// Appends one token to each of several sequences. Returns the logits after each token. The logits have the same
    /// bytes as if each sequence ran alone. `next` is empty or has an entry for each sequence, as in
    /// [`PassHooks::next`]. All of the sequences are [ahead](SequenceState::ahead), or none.
    ///
    /// # Errors
    /// After any error, all states are unusable.
    fn forward_each(&mut self, rows: &mut [(&mut Self::State, u32)], next: &[NextToken]) -> Result<Logits, ModelError>;

    /// Takes a snapshot of the whole sequence.
    fn snapshot(&mut self, state: &mut Self::State) -> Result<Snapshot, ModelError>;

    /// Restores a snapshot taken by this model, or one with copied pages that another model with the same weights has
    /// taken. Reuses the memory of `reuse`.
    fn restore(&mut self, snapshot: &Snapshot, reuse: Option<Self::State>) -> Result<Self::State, ModelError>;

    /// Reads the bytes of a snapshot's page. Called between passes.
    ///
    /// # Errors
    /// The page is on the device of another model, or on a lost device.
    fn read_page(&mut self, page: &KvPage) -> Result<Vec<u8>, ModelError> {
        page.copied().map(<[u8]>::to_vec).ok_or_else(foreign_snapshot)
    }

    /// Makes a page of a snapshot from bytes that [`Model::read_page`] returned.
    fn make_page(&mut self, bytes: Vec<u8>) -> Result<Arc<KvPage>, ModelError> {
        Ok(Arc::new(bytes.into()))
    }

    /// Frees memory when the system is short of memory. A later call allocates the freed memory again. Called between
    /// passes and while idle. Never changes results.
    fn fit_memory(&mut self) {}

    /// Called after a failed request. Returns true if the device was lost and the model now runs on another device.
    /// Existing sequences and the pages of their snapshots are then invalid.
    ///
    /// # Errors
    /// The device is lost and no other device can take over.
    fn recover(&mut self) -> Result<bool, ModelError> {
        Ok(false)
    }
}

impl From<DeviceError> for ModelError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Memory(why) => ModelError::Memory(why),
            DeviceError::Failed(why) => ModelError::Device(why),
        }
    }
}
