//! One pass through the layers: its rows, the backend and buffers that compute them, and the hooks between layers.

use super::buffers::{Buffers, Scratch};
use crate::{
    error::ModelError,
    model::{
        config::Config,
        hidden_taps::TapBuffers,
        ngram_table::NgramInput,
        positions::{RowPositions, axis},
        state::{
            rollback::{Commit, DeltaState},
            row_ring::RowRing,
            sequence::QwenState,
        },
        weights::Residual,
    },
};
use moestro_compute::{
    device::Region,
    experts::{ExpertStore, PassSize},
    ops::{
        AttentionShape, Backend, BackendLimits, ExpertSlots, Linear, Norm, Op, ReadStreams, SequenceRows, StreamMix,
        Weight, WriteStreams,
    },
};
use std::{ops::Range, sync::Arc};

/// The rows of one pass: consecutive tokens of one sequence, or a token of each of several sequences.
pub struct Chunk<'a> {
    pub ids: &'a [u32],
    /// Tokens that the next pass of the sequence is expected to have. Their rows of n-gram tables are read while a GPU
    /// computes this pass.
    pub following: &'a [u32],
    /// If the rows belong to several sequences: the sequence of each row. Their states are in the same buffers. `start`
    /// is 0, and `positions` is ignored.
    pub sequences: &'a [SequenceRow],
    /// Index of the first row in the sequence.
    pub start: usize,
    /// Positions of the rows.
    pub positions: RowPositions<'a>,
    /// Rows of images, which replace embeddings.
    pub image_rows: &'a [ImageRows],
    /// Set for a pass that is submitted without a wait: the first row of its tables, see [`Buffers::at_rows`].
    pub table_row: Option<usize>,
    /// True if the GPU has chosen the tokens, so that their ids are already in the device's memory.
    pub id_on_device: bool,
    /// The rows whose logits the caller wants.
    pub logits: Range<usize>,
    /// The expert cache treats passes differently: a large one uses nearly every expert once, and a small one uses the
    /// experts of earlier tokens again.
    pub size: PassSize,
    /// True if the matrix products may use half precision. Only set for a pass with several rows of a prompt.
    pub half: bool,
    pub commit: Commit,
}

impl<'a> Chunk<'a> {
    /// Rows of one sequence without images, of which no logits are wanted.
    pub fn new(ids: &'a [u32], start: usize, positions: RowPositions<'a>) -> Self {
        Self {
            ids,
            following: &[],
            sequences: &[],
            start,
            positions,
            image_rows: &[],
            table_row: None,
            id_on_device: false,
            logits: 0..0,
            size: if ids.len() == 1 { PassSize::Small } else { PassSize::Large },
            half: false,
            commit: Commit::Now,
        }
    }

    /// For each sequence, the index of its first row and its tokens.
    pub fn by_sequence(&self) -> impl Iterator<Item = (usize, &'a [u32])> + use<'a> {
        let Self { ids, sequences, start, .. } = *self;
        let each = if sequences.is_empty() { ids.len() } else { 1 };
        let first = move |index: usize| sequences.get(index).map_or(start, |row| row.start);
        ids.chunks(each.max(1)).enumerate().map(move |(index, ids)| (first(index), ids))
    }
}

/// A row of one of several sequences.
pub struct SequenceRow {
    /// Number of the sequence's arena among the arenas that share buffers.
    pub number: usize,
    /// Index of the row in its sequence.
    pub start: usize,
    /// Position of the row, on all axes.
    pub position: usize,
}

impl SequenceRow {
    /// The row of the next token of a sequence.
    pub fn next_of(state: &QwenState) -> Self {
        Self { number: state.number, start: state.len, position: state.next }
    }
}

/// Rows of an image, from the vision tower.
pub struct ImageRows {
    /// The first row of the chunk that is replaced.
    pub row: usize,
    /// Rows of the whole image, `[tokens, hidden]`.
    pub values: Arc<Vec<f32>>,
    /// The range of the image's tokens that are in the chunk.
    pub tokens: Range<usize>,
}

/// A chunk, with the backend, buffers and weights that compute it.
pub struct Pass<'a> {
    pub chunk: Chunk<'a>,
    pub config: &'a Config,
    pub backend: &'a mut dyn Backend,
    pub limits: BackendLimits,
    pub buffers: &'a Buffers,
    /// Sizes of the attention layers, and the format of their KV cache.
    pub attention: &'a AttentionShape,
    pub experts: Option<&'a ExpertStore>,
    pub slots: &'a ExpertSlots,
    /// The n-gram tables, in order of layers.
    pub ngrams: Vec<NgramInput<'a>>,
    pub scratch: &'a mut Scratch,
}

/// The input of a layer part: rows `[rows, hidden]`, and the norm that the part must still apply.
#[derive(Clone, Copy)]
pub struct PartInput {
    x: Region,
    hidden: usize,
    pub norm: Option<Norm>,
}

impl PartInput {
    /// The region of rows `rows`.
    pub fn rows(&self, rows: &Range<usize>) -> Region {
        self.x.rows(rows.start, rows.len(), self.hidden)
    }
}

/// Callbacks between layers.
pub struct LayerHooks<'a> {
    pub keep_going: Option<&'a dyn Fn() -> bool>,
    pub marks: SnapshotMarks,
    pub taps: &'a mut TapBuffers,
}

/// Rows after which to take a snapshot, and the delta nets' states after these rows. The KV cache need not be recorded,
/// because it only grows.
#[derive(Default)]
pub struct SnapshotMarks {
    /// The rows, in ascending order.
    pub rows: Vec<usize>,
    /// For each of `rows`: the convolution and recurrent states of all delta nets, layer by layer.
    pub states: Vec<Vec<u8>>,
    /// For each of `rows`: the rows of each ring that a snapshot keeps, layer by layer.
    pub rings: Vec<Vec<u8>>,
}

impl Pass<'_> {
    pub fn rows(&self) -> usize {
        self.chunk.ids.len()
    }

    /// The table of rows, if the rows belong to different sequences.
    pub fn sequence_rows(&self) -> Option<SequenceRows> {
        let starts = || self.chunk.sequences.iter().map(|row| row.start);
        let first = starts().min()?;
        let last = starts().max()?;
        let table = self.buffers.sequences.rows(0, self.rows(), 2);
        Some(SequenceRows { starts: [first, last], table })
    }

    pub fn execute<'o>(&mut self, op: impl Into<Op<'o>>) -> Result<(), ModelError> {
        Ok(self.backend.execute(&op.into())?)
    }

    /// The rows of the pass in blocks. The buffers of a mixer hold one block.
    pub fn mixer_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.rows();
        let block = self.buffers.block;
        (0..rows).step_by(block).map(move |first| first..rows.min(first + block))
    }

    /// The norm with this weight, `[hidden]`.
    pub fn norm(&self, weight: Region) -> Norm {
        Norm { weight, eps: self.config.eps, keep: None }
    }

    /// The region of rows `rows` of the residual, with all streams.
    pub fn residual(&self, rows: &Range<usize>) -> Region {
        self.buffers.residual().rows(rows.start, rows.len(), self.config.residual_width())
    }

    /// Prepares the input of a layer part. With several streams, also sets `h` to zero, so that the part can add its
    /// result to `h`.
    pub fn read(&mut self, residual: &Residual) -> Result<PartInput, ModelError> {
        let b = self.buffers;
        let hidden = self.config.hidden;
        let mix = match residual {
            Residual::Norm(weight) => return Ok(PartInput { x: b.h, hidden, norm: Some(self.norm(*weight)) }),
            Residual::Streams(mix) => mix,
        };
        for rows in self.mixer_blocks() {
            let of = |region: Region, width: usize| region.rows(rows.start, rows.len(), width);
            let inject = of(b.inject, self.config.residual_width() / hidden);
            self.mix_streams(mix, &rows, of(b.normed, hidden), [inject, of(b.h, hidden)])?;
        }
        Ok(PartInput { x: b.normed, hidden, norm: None })
    }

    /// Computes the mixture of the streams for some rows, at most one block of a mixer.
    pub fn mix_streams(
        &mut self,
        weights: &StreamMix,
        rows: &Range<usize>,
        out: Region,
        [inject, zeroed]: [Region; 2],
    ) -> Result<(), ModelError> {
        let Some(shape) = &self.config.streams else { return Ok(()) };
        let tokens = rows.len();
        let streams = self.residual(rows);
        let buffers = self.buffers.stream.of(shape, rows.len());
        self.execute(&ReadStreams { shape, tokens, weights, streams, buffers, out, inject, zeroed })
    }

    /// Adds the result of a layer part to the residual.
    pub fn write(&mut self, residual: &Residual) -> Result<(), ModelError> {
        match residual {
            Residual::Norm(_) => Ok(()),
            Residual::Streams(_) => self.write_streams(Some(self.buffers.inject)),
        }
    }

    /// Adds `h` times a factor for each stream to the streams. Without `inject`, sets all streams to `h`. Does nothing
    /// if there is one stream, which is `h` itself.
    pub fn write_streams(&mut self, inject: Option<Region>) -> Result<(), ModelError> {
        let Some(shape) = &self.config.streams else { return Ok(()) };
        let tokens = self.rows();
        let y = self.buffers.h;
        let streams = self.buffers.streams;
        self.execute(WriteStreams { shape, tokens, y, inject, streams })
    }

    /// `h += y W^T`, the output projection at the end of a mixer.
    pub fn out_proj<'w>(&self, out: &'w Weight, rows: &Range<usize>) -> Linear<'w> {
        let x = self.buffers.y(rows.len());
        let tokens = rows.len();
        let y = self.buffers.h.rows(rows.start, tokens, self.config.hidden);
        Linear { x, tokens, norm: None, matrices: std::slice::from_ref(out), y, add: true }
    }

    /// Writes the token ids, the table of sequences, and the table of rotations: `(cos, sin)` of `position * theta^(-2j
    /// / rope_dim)`. The three axes of a position alternate over the frequencies `j`.
    pub fn write_inputs(&mut self) -> Result<(), ModelError> {
        if !self.chunk.id_on_device {
            self.backend.write_words(self.buffers.ids, self.chunk.ids)?;
        }
        if !self.chunk.sequences.is_empty() {
            let words = self.chunk.sequences.iter().flat_map(|row| [row.number as u32, row.start as u32]);
            self.backend.write_words(self.buffers.sequences, &words.collect::<Vec<_>>())?;
        }
        let Config { rope_theta: theta, rope_sections, .. } = self.config;
        let rope_dim = self.config.attention.rope_dim;
        let frequency = |j: usize| (axis(j, rope_sections), theta.powf(-2.0 * j as f64 / rope_dim as f64));
        let frequencies: Vec<(usize, f64)> = (0..rope_dim / 2).map(frequency).collect();
        let table = &mut self.scratch.rope;
        table.clear();
        let rows_of_one = if self.chunk.sequences.is_empty() { self.chunk.ids.len() } else { 0 };
        let rows_of_several = self.chunk.sequences.iter().map(|row| [row.position; 3]);
        for position in self.chunk.positions.take(rows_of_one).chain(rows_of_several) {
            table.extend(frequencies.iter().flat_map(|(axis, frequency)| {
                let angle = position[*axis] as f64 * frequency;
                [angle.cos() as f32, angle.sin() as f32]
            }));
        }
        Ok(self.backend.write(self.buffers.rope.floats(table.len()), bytemuck::cast_slice(table))?)
    }

    /// Replaces the embeddings of image tokens by the rows of their images.
    pub fn write_image_rows(&mut self) -> Result<(), ModelError> {
        let hidden = self.config.hidden;
        for ImageRows { row, values, tokens } in self.chunk.image_rows {
            let part = values.get(tokens.start * hidden..tokens.end * hidden);
            let part = part.ok_or_else(|| ModelError::Config("an image has too few rows".into()))?;
            self.backend.write(self.buffers.h.rows(*row, tokens.len(), hidden), bytemuck::cast_slice(part))?;
        }
        Ok(())
    }

    /// Submits the work so far, and meanwhile reads rows of n-gram tables for the next pass.
    pub fn read_ahead(&mut self) -> Result<(), ModelError> {
        if self.chunk.following.is_empty() || self.ngrams.is_empty() {
            return Ok(());
        }
        self.backend.flush()?;
        self.ngrams.iter().for_each(|input| input.table.read_ahead(&input.before_following, self.chunk.following));
        Ok(())
    }

    /// Waits for the device, even after an error, because the expert slots that it reads are released next.
    pub fn finish(&mut self, done: Result<(), ModelError>) -> Result<(), ModelError> {
        let end = self.backend.sync_point();
        let waited = self.backend.wait_for(end);
        let has_failed = waited.is_err() || !matches!(done, Ok(()) | Err(ModelError::GivenUp));
        if let Some(experts) = self.experts.filter(|_| has_failed) {
            // Copies of experts to the device may have failed, also in a pass that was cancelled.
            experts.clear_device();
        }
        done.and(waited.map_err(ModelError::from))
    }
}

impl<'a> LayerHooks<'a> {
    /// Hooks that only record hidden rows.
    pub fn taps_only(taps: &'a mut TapBuffers) -> Self {
        Self { keep_going: None, marks: SnapshotMarks::default(), taps }
    }

    pub fn before_layer(&self) -> Result<(), ModelError> {
        match self.keep_going {
            Some(keep_going) if !keep_going() => Err(ModelError::GivenUp),
            _ => Ok(()),
        }
    }

    pub fn after_layer(&mut self, layer: usize, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let h = pass.buffers.residual();
        let rows = pass.rows();
        let width = pass.config.residual_width();
        Ok(self.taps.copy_rows(&mut *pass.backend, layer, h, rows, width)?)
    }
}

impl SnapshotMarks {
    pub fn new(rows: Vec<usize>) -> Self {
        Self { states: vec![Vec::new(); rows.len()], rings: vec![Vec::new(); rows.len()], rows }
    }

    /// Indices of the marks inside a block of rows. A mark on a block boundary belongs to the earlier block.
    pub fn within(&self, block: &Range<usize>) -> Range<usize> {
        let first = if block.start > 0 { self.rows.partition_point(|row| *row <= block.start) } else { 0 };
        first..self.rows.partition_point(|row| *row <= block.end)
    }

    /// Appends the state of one delta net at mark `index`.
    pub fn record(&mut self, index: usize, state: &DeltaState, backend: &mut dyn Backend) -> Result<(), ModelError> {
        Ok(state.append_bytes(backend, &mut self.states[index])?)
    }

    /// Appends the kept rows of one ring at mark `index`, `len` positions from the start of the sequence.
    pub fn record_rows(
        &mut self,
        index: usize,
        ring: &RowRing,
        len: usize,
        backend: &mut dyn Backend,
    ) -> Result<(), ModelError> {
        Ok(ring.append_bytes(len, backend, &mut self.rings[index])?)
    }
}
