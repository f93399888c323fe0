//! Undoing speculative rows of a delta net.
//!
//! Attention can forget rejected draft tokens by shortening its KV cache. A delta net cannot: its recurrent state is a
//! sum over all tokens and has no inverse. Copying the state before each verify would read and write 63 MB each for the
//! 35B.
//!
//! Instead, a verify reads the state but does not write it. The verify keeps the projected inputs of its rows in a
//! *replay buffer*. Rejecting rows shortens the buffer. The next pass first replays the rows that were accepted, in
//! registers, and then continues with its own rows. No state is copied and no weight is read twice.
//!
//! ```text
//! verify 4 rows      replay buffer: [a b c d]   state: before a
//! reject d           replay buffer: [a b c]     state: before a
//! next verify (e f)  replays a b c, computes e f; state: after c; replay buffer: [e f]
//! ```

use crate::model::config::Config;
use moestro_compute::{
    device::{DeviceError, Region},
    ops::{Backend, DeltaShape, Replay},
};

/// Maximum number of rows in one verify. The decode kernels take up to this many rows per launch.
pub const MAX_VERIFY_ROWS: usize = 16;

/// State of one delta-net layer of one sequence, in f32.
#[derive(Debug, Clone, Copy)]
pub struct DeltaState {
    /// Last `conv_width - 1` inputs of the convolution, `[conv_width - 1, channels]`.
    pub conv: Region,
    /// Recurrent matrices, `[value_heads, value_dim, key_dim]`.
    pub recurrent: Region,
    /// Allocated by the first verify.
    pub replay: Option<ReplayBuffer>,
}

/// Projected inputs of rows that the state does not include yet.
///
/// Double-buffered: a verify reads the rows of the previous verify from one half and writes its own rows to the other
/// half.
#[derive(Debug, Clone, Copy)]
pub struct ReplayBuffer {
    /// Projections, `[2, MAX_VERIFY_ROWS, width]`.
    proj: Region,
    /// Convolution outputs, `[2, MAX_VERIFY_ROWS, channels]`.
    mixed: Region,
    /// Half that holds the current rows: 0 or 1.
    half: usize,
    /// Number of rows in that half.
    rows: usize,
}

/// Selects which rows a pass adds to the state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Commit {
    /// Rows are final: replayed rows and new rows go into the state.
    Now,
    /// First call of a verify: replayed rows go into the state, new rows go to the replay buffer.
    VerifyFirst,
    /// Later call of the same verify. Earlier calls have computed `before` rows.
    VerifyNext { before: usize },
}

/// Number of bytes of the replay buffers of all layers. Part of the memory plan.
pub fn replay_bytes(config: &Config) -> u64 {
    let layers = config.layers - config.full_layers();
    let shape = &config.delta;
    if layers == 0 {
        return 0;
    }
    (layers * 2 * MAX_VERIFY_ROWS * (shape.width() + shape.channels()) * size_of::<f32>()) as u64
}

/// Appends the bytes of `region` to `out`.
pub fn append_region(backend: &mut dyn Backend, region: Region, out: &mut Vec<u8>) -> Result<(), DeviceError> {
    let start = out.len();
    out.resize(start + region.len, 0);
    backend.read(region, &mut out[start..])
}

impl Commit {
    /// The commit of a verify call, after `before` rows of the same verify.
    pub fn verify_after(before: usize) -> Self {
        if before == 0 { Commit::VerifyFirst } else { Commit::VerifyNext { before } }
    }
}

impl DeltaState {
    /// The regions that a snapshot copies.
    pub fn regions(&self) -> [Region; 2] {
        [self.conv, self.recurrent]
    }

    /// Appends the state's bytes to `out`.
    pub fn append_bytes(&self, backend: &mut dyn Backend, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.regions().into_iter().try_for_each(|region| append_region(backend, region, out))
    }

    /// Allocates the replay buffer if this is the sequence's first verify.
    pub fn ensure_replay_buffer(&mut self, shape: &DeltaShape, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        if self.replay.is_none() {
            let bytes = |width: usize| 2 * MAX_VERIFY_ROWS * width * size_of::<f32>();
            let proj = backend.allocate(bytes(shape.width()))?;
            let mixed = backend.allocate(bytes(shape.channels()))?;
            self.replay = Some(ReplayBuffer { proj, mixed, half: 0, rows: 0 });
        }
        Ok(())
    }

    /// Rows that the next pass must replay before its own rows.
    pub fn pending(&self, shape: &DeltaShape) -> Replay {
        let Some(ReplayBuffer { proj, mixed, half, rows }) = self.replay else { return Replay::default() };
        let rows_of = |region: Region, width: usize| region.rows(half * MAX_VERIFY_ROWS, rows, width);
        Replay { rows, proj: rows_of(proj, shape.width()), mixed: rows_of(mixed, shape.channels()) }
    }

    /// The regions to which a verify writes the projections and convolution outputs of `rows` new rows. `None` if the
    /// rows are final.
    pub fn replay_rows(&self, shape: &DeltaShape, commit: Commit, rows: usize) -> Option<[Region; 2]> {
        let ReplayBuffer { proj, mixed, half, .. } = self.replay?;
        let first = match commit {
            Commit::Now => return None,
            Commit::VerifyFirst => (1 - half) * MAX_VERIFY_ROWS,
            Commit::VerifyNext { before } => half * MAX_VERIFY_ROWS + before,
        };
        Some([proj.rows(first, rows, shape.width()), mixed.rows(first, rows, shape.channels())])
    }

    /// Number of rows that the pass must add to the state: replayed rows first, then new rows.
    pub fn rows_to_commit(&self, commit: Commit, new_rows: usize) -> usize {
        let pending = self.replay.map_or(0, |buffer| buffer.rows);
        match commit {
            Commit::Now => pending + new_rows,
            Commit::VerifyFirst => pending,
            Commit::VerifyNext { .. } => 0,
        }
    }

    /// Records that a pass has computed `new_rows` rows.
    pub fn advance(&mut self, commit: Commit, new_rows: usize) {
        let Some(buffer) = &mut self.replay else { return };
        match commit {
            Commit::Now => buffer.rows = 0,
            Commit::VerifyFirst => (buffer.half, buffer.rows) = (1 - buffer.half, new_rows),
            Commit::VerifyNext { .. } => buffer.rows += new_rows,
        }
    }

    /// Discards the last `rows` rows of the replay buffer: the draft tokens that the sampler rejected.
    pub fn reject(&mut self, rows: usize) {
        if let Some(buffer) = &mut self.replay {
            buffer.rows = buffer.rows.saturating_sub(rows);
        }
    }

    /// Empties the replay buffer when the state is reused for another sequence.
    pub fn reset(&mut self) {
        if let Some(buffer) = &mut self.replay {
            buffer.rows = 0;
        }
    }
}
