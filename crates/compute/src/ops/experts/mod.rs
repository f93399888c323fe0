//! The routed experts and the shared expert. [`Experts`] computes the experts that are loaded, in one or more calls.
//! [`CombineExperts`] sums their results in the router's order, so that the order in which they were loaded does not
//! matter.
//!
//! An *assignment* is one chosen expert of one token, numbered `token * k + rank`. Between the two operations, a device
//! keeps intermediate values in [`MoeBuffers`]. The CPU stores one result for each assignment. A GPU that computes few
//! rows stores only `silu(gate) * up`, because it then computes `down` and the sum in one launch.

mod cpu;
mod feed_forward;
mod gpu;
mod row_tiles;

pub(in crate::ops) use feed_forward::{ExpertJob, ExpertScratch, ExpertView, JobRows, MAX_ASSIGNMENTS, compute};
pub use gpu::{Jobs, swiglu};

use super::{Weight, WeightFormat};
use crate::device::{BufferAccess, Region};

/// Slot number of an assignment that is not part of a call.
pub const NO_SLOT: u32 = u32::MAX;

/// The weights of one layer's mixture of experts.
#[derive(Debug, Clone)]
pub struct MoeWeights {
    /// Number of experts per token.
    pub k: usize,
    /// True if each token's weights are scaled so that they sum to one.
    pub renormalise: bool,
    /// `[experts, hidden]`.
    pub router: Weight,
    pub shared: Option<SharedExpert>,
    /// Gate, up and down projections of the routed experts.
    pub stacks: [ExpertStack; 3],
}

/// The expert that every token uses.
#[derive(Debug, Clone, Copy)]
pub struct SharedExpert {
    pub gate_up: [Weight; 2],
    pub down: Weight,
    /// `[1, hidden]`. The sigmoid of its product with x is the weight of the shared expert's result.
    pub result: Weight,
}

/// One projection of all experts of a layer.
#[derive(Debug, Clone, Default)]
pub struct ExpertStack {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// The global scale of each expert.
    pub global_scales: Vec<f32>,
    /// For each expert, byte offsets of codes, scales and biases in its slot.
    pub at: Vec<[usize; 3]>,
}

/// The memory of the experts: segments of `per_segment` slots of `stride` bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertSlots {
    /// Regions of the segments, from [`Backend::adopt_segments`](super::Backend::adopt_segments).
    pub segments: Vec<Region>,
    /// Table of the segments' addresses, from [`Backend::adopt_segments`](super::Backend::adopt_segments).
    pub table: Region,
    /// Number of slots in a segment. Must be a power of two for a GPU.
    pub per_segment: usize,
    pub stride: usize,
}

impl ExpertSlots {
    /// Number of slots. The last segment may have fewer slots than the others.
    fn count(&self) -> usize {
        let last = self.segments.last().map_or(0, |last| last.len.checked_div(self.stride).unwrap_or(0));
        self.segments.len().saturating_sub(1) * self.per_segment + last
    }

    /// The region of a slot.
    pub fn region(&self, slot: u32) -> Region {
        let segment = slot as usize / self.per_segment;
        let index = slot as usize % self.per_segment;
        self.segments[segment].part(index * self.stride, self.stride)
    }

    /// `len` bytes at offset `at` of a slot. `None` if the slot does not contain these bytes.
    pub fn part(&self, slot: u32, at: usize, len: usize) -> Option<Region> {
        let segment = slot as usize / self.per_segment.max(1);
        let index = slot as usize % self.per_segment.max(1);
        let segment = self.segments.get(segment)?;
        let start = index * self.stride + at;
        (start + len <= segment.len).then(|| segment.part(start, len))
    }
}

/// Buffers of the mixture of experts that all layers of a pass share.
#[derive(Debug, Clone, Copy, Default)]
pub struct MoeBuffers {
    /// [`Router::scores`](super::router::Router::scores), f32 `[tokens, width]`; see [`MoeWeights::width`].
    pub scores: Region,
    /// Weights from [`Router`](super::router::Router), f32 `[tokens, k + 1]`. The last weight of a row is the shared
    /// expert's.
    pub weights: Region,
    /// Activations, f32 `[tokens * (k + 1), row]`. `row` is the larger of the two intermediate sizes. Unused by a
    /// device with its own buffer.
    pub act: Region,
    /// Results, f32 `[tokens * (k + 1), hidden]`. The shared expert's results come last.
    pub out: Region,
    /// Jobs, u32 `[tokens * k, 3]`, for a GPU that groups rows by expert.
    pub jobs: Region,
    /// Assignments in the order of the jobs, u32 `[tokens * k]`.
    pub order: Region,
}

/// A loaded expert and the assignments of this call that use it: `assignments[first..first + count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroup {
    pub expert: u32,
    pub slot: u32,
    pub first: u32,
    pub count: u32,
}

/// The assignments that a call computes.
#[derive(Debug, Clone, Copy)]
pub enum ExpertSet<'a> {
    /// All assignments and the shared expert, with the slots that [`Router`](super::router::Router) stored.
    Table { ids: Region, slots: Region },
    /// The assignments of the loaded experts in `groups`.
    Loaded {
        groups: &'a [ExpertGroup],
        assignments: &'a [u32],
        /// Compute the shared expert as well.
        shared: bool,
        /// If set, assignments are computed one at a time instead of grouped by expert. The buffer receives the slot of
        /// each assignment, u32 `[tokens * k]`.
        per_assignment: Option<Region>,
    },
}

/// Computes `down(silu(gate x) * up x)` for the assignments in `experts`.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    pub layer: &'a MoeWeights,
    pub slots: &'a ExpertSlots,
    pub tokens: usize,
    /// Normalised rows, `[tokens, hidden]`.
    pub x: Region,
    pub buffers: MoeBuffers,
    pub experts: ExpertSet<'a>,
}

/// `h[t] += sum over ranks of weight * result`, in rank order, the shared expert last.
#[derive(Debug, Clone, Copy)]
pub struct CombineExperts<'a> {
    pub layer: &'a MoeWeights,
    pub slots: &'a ExpertSlots,
    pub tokens: usize,
    pub buffers: MoeBuffers,
    /// Slot of each assignment, u32 `[tokens, k]`, if [`Experts`] computed one assignment at a time.
    pub per_assignment: Option<Region>,
    /// Residual stream, `[tokens, hidden]`.
    pub h: Region,
}

impl MoeWeights {
    pub fn hidden(&self) -> usize {
        self.router.cols
    }

    pub fn inner(&self) -> usize {
        self.stacks[0].rows
    }

    pub fn shared_inner(&self) -> usize {
        self.shared.map_or(0, |shared| shared.down.cols)
    }

    /// Number of floats in a row of activations.
    pub fn row(&self) -> usize {
        self.inner().max(self.shared_inner())
    }

    /// The matrices of a row of scores. If the experts are `tiled`, without the shared expert's gate and up.
    pub fn score_matrices(&self, tiled: bool) -> Vec<Weight> {
        let shared = self.shared.into_iter();
        let shared = shared.flat_map(|shared| [shared.gate_up[0], shared.gate_up[1], shared.result]);
        [self.router].into_iter().chain(shared.skip(if tiled { 2 } else { 0 })).collect()
    }

    /// Number of floats in a row of scores: `router | shared gate | shared up | weight of the shared result`.
    pub fn width(&self) -> usize {
        self.router.rows + self.shared.map_or(0, |_| 2 * self.shared_inner() + 1)
    }

    /// Number of assignments, including the shared expert's.
    fn assignments(&self, tokens: usize) -> usize {
        tokens * (self.k + 1)
    }
}

impl MoeBuffers {
    fn touches(&self, layer: &MoeWeights, tokens: usize, see: &mut dyn FnMut(Region, BufferAccess)) {
        let assignments = layer.assignments(tokens);
        see(self.scores.floats(tokens * layer.width()), BufferAccess::Read);
        see(self.act.floats((assignments * layer.row()).min(self.act.len / 4)), BufferAccess::ReadWrite);
        see(self.out.floats(assignments * layer.hidden()), BufferAccess::ReadWrite);
    }
}

impl Experts<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let layer = self.layer;
        let tokens = self.tokens;
        see(self.x.floats(tokens * layer.hidden()), BufferAccess::Read);
        self.buffers.touches(layer, tokens, see);
        match self.experts {
            ExpertSet::Table { ids, slots } => {
                see(ids.floats(tokens * layer.k), BufferAccess::Read);
                see(slots.floats(tokens * layer.k), BufferAccess::Read);
            }
            ExpertSet::Loaded { per_assignment: Some(slots), .. } => {
                see(slots.floats(tokens * layer.k), BufferAccess::Write)
            }
            ExpertSet::Loaded { per_assignment: None, .. } => {
                see(self.buffers.jobs, BufferAccess::Write);
                see(self.buffers.order, BufferAccess::Write);
            }
        }
    }
}

impl CombineExperts<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let layer = self.layer;
        let tokens = self.tokens;
        self.buffers.touches(layer, tokens, see);
        see(self.buffers.weights.floats(layer.assignments(tokens)), BufferAccess::Read);
        if let Some(slots) = self.per_assignment {
            see(slots.floats(tokens * layer.k), BufferAccess::Read);
        }
        see(self.h.floats(tokens * layer.hidden()), BufferAccess::ReadWrite);
    }
}
