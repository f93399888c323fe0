//! The experts in their slots, and the shared one (spec 2.3), in two operations: [`Experts`] computes those that are in memory,
//! in as many calls as it takes until all are; [`CombineExperts`] sums them up in the router's order, so that it does not matter
//! what landed first.
//!
//! A *place* is a chosen expert of a token: `token * k + rank`. Between the two operations a device keeps what it likes in
//! [`MoeBuffers`]: the CPU each place's result, a GPU for few rows only `silu(gate) * up`, as `down` is one launch with the sum.

mod cases;
mod cpu;
mod gemm;
mod gpu;

pub(super) use cases::cases;
pub(in crate::ops) use cpu::PLACES;
pub(in crate::ops) use gemm::{ExpertJob, ExpertScratch, ExpertView, JobRows, compute};
pub use gpu::{Jobs, swiglu};

use super::{Weight, WeightFormat};
use crate::device::{BufferAccess, Region};

/// As a slot: this place is not part of this call.
pub const NONE: u32 = u32::MAX;

/// A layer's mixture of experts.
#[derive(Debug, Clone)]
pub struct MoeWeights {
    /// Experts a token visits.
    pub k: usize,
    /// A token's weights sum to one.
    pub renormalise: bool,
    /// `[experts, hidden]`.
    pub router: Weight,
    pub shared: Option<SharedExpert>,
    /// Gate, up and down of the routed experts.
    pub stacks: [ExpertStack; 3],
}

/// The expert that every token visits.
#[derive(Debug, Clone, Copy)]
pub struct SharedExpert {
    pub gate_up: [Weight; 2],
    pub down: Weight,
    /// `[1, hidden]`: its sigmoid is the weight of the result.
    pub result: Weight,
}

/// One projection of all experts of a layer.
#[derive(Debug, Clone)]
pub struct ExpertStack {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// One an expert.
    pub global_scales: Vec<f32>,
    /// Byte offsets of each expert's codes, scales and biases from the start of its slot.
    pub at: Vec<[usize; 3]>,
}

impl Default for ExpertStack {
    fn default() -> Self {
        Self {
            codes: WeightFormat::Dense(super::Float::F32),
            rows: 0,
            cols: 0,
            global_scales: Vec::new(),
            at: Vec::new(),
        }
    }
}

/// The memory experts are in: slabs of `per_slab` slots of `stride` bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertSlots {
    pub slabs: Vec<Region>,
    pub per_slab: usize,
    pub stride: usize,
}

impl ExpertSlots {
    /// A slot's bytes.
    pub fn of(&self, slot: u32) -> Region {
        let (slab, place) = (slot as usize / self.per_slab, slot as usize % self.per_slab);
        self.slabs[slab].part(place * self.stride, self.stride)
    }
}

/// MoeBuffers that the layers of a pass share.
#[derive(Debug, Clone, Copy, Default)]
pub struct MoeBuffers {
    /// [`Router`](super::route::Router)'s.
    pub scores: Region,
    pub weights: Region,
    /// `[tokens * (k + 1), row]` f32, `row` being the larger of the two inner widths: activations. A device that has room of its
    /// own for them uses none of it.
    pub act: Region,
    /// `[tokens * (k + 1), hidden]` f32: results, the shared expert's behind all others.
    pub out: Region,
    /// `[tokens * k, 3]` and `[tokens * k]` u32: for a GPU that computes rows by expert.
    pub jobs: Region,
    pub order: Region,
}

/// An expert that is in memory, and which of the call's places it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroup {
    pub expert: u32,
    pub slot: u32,
    pub first: u32,
    pub count: u32,
}

/// The places that a call computes.
#[derive(Debug, Clone, Copy)]
pub enum ExpertSet<'a> {
    /// All, and the shared expert: their slots lie where [`Router`](super::route::Router) left them.
    Table { ids: Region, slots: Region },
    /// Those of some experts. `places` are the groups' places.
    Landed {
        groups: &'a [ExpertGroup],
        places: &'a [u32],
        /// The shared expert, too.
        shared: bool,
        /// Place by place and not by expert: room of this call's own for a slot each place (`[tokens * k]` u32).
        by_place: Option<Region>,
    },
}

/// `down(silu(gate x) * up x)` of some places.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    pub layer: &'a MoeWeights,
    pub slots: &'a ExpertSlots,
    pub tokens: usize,
    /// `[tokens, hidden]`, normed.
    pub x: Region,
    pub room: MoeBuffers,
    pub which: ExpertSet<'a>,
}

/// `h[t] += sum over ranks of weight * result`, in this order, the shared expert's last.
#[derive(Debug, Clone, Copy)]
pub struct CombineExperts<'a> {
    pub layer: &'a MoeWeights,
    pub slots: &'a ExpertSlots,
    pub tokens: usize,
    pub room: MoeBuffers,
    /// `[tokens, k]` u32: the slot of each place, if places were computed one by one.
    pub by_place: Option<Region>,
    /// `[tokens, hidden]`.
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

    /// Floats in a row of activations.
    pub fn row(&self) -> usize {
        self.inner().max(self.shared_inner())
    }

    /// Floats in a row of scores: `router | shared gate | shared up | gate of the shared result`.
    pub fn width(&self) -> usize {
        self.router.rows + self.shared.map_or(0, |_| 2 * self.shared_inner() + 1)
    }

    /// Places, those of the shared expert included.
    fn places(&self, tokens: usize) -> usize {
        tokens * (self.k + 1)
    }
}

impl ExpertSlots {
    /// `len` bytes at `at` in a slot.
    pub fn part(&self, slot: u32, at: usize, len: usize) -> Option<Region> {
        let (slab, index) = (slot as usize / self.per_slab.max(1), slot as usize % self.per_slab.max(1));
        let (slab, start) = (self.slabs.get(slab)?, index * self.stride + at);
        (start + len <= slab.len).then(|| slab.part(start, len))
    }
}

impl MoeBuffers {
    fn touches(&self, layer: &MoeWeights, tokens: usize, see: &mut dyn FnMut(Region, BufferAccess)) {
        let places = layer.places(tokens);
        see(self.scores.floats(tokens * layer.width()), BufferAccess::Read);
        see(self.act.floats((places * layer.row()).min(self.act.len / 4)), BufferAccess::ReadWrite);
        see(self.out.floats(places * layer.hidden()), BufferAccess::ReadWrite);
    }
}

impl Experts<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (layer, tokens) = (self.layer, self.tokens);
        see(self.x.floats(tokens * layer.hidden()), BufferAccess::Read);
        self.room.touches(layer, tokens, see);
        match self.which {
            ExpertSet::Table { ids, slots } => {
                see(ids.floats(tokens * layer.k), BufferAccess::Read);
                see(slots.floats(tokens * layer.k), BufferAccess::Read);
            }
            ExpertSet::Landed { by_place: Some(slots), .. } => see(slots.floats(tokens * layer.k), BufferAccess::Write),
            ExpertSet::Landed { by_place: None, .. } => {
                see(self.room.jobs, BufferAccess::Write);
                see(self.room.order, BufferAccess::Write);
            }
        }
    }
}

impl CombineExperts<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (layer, tokens) = (self.layer, self.tokens);
        self.room.touches(layer, tokens, see);
        see(self.room.weights.floats(layer.places(tokens)), BufferAccess::Read);
        if let Some(slots) = self.by_place {
            see(slots.floats(tokens * layer.k), BufferAccess::Read);
        }
        see(self.h.floats(tokens * layer.hidden()), BufferAccess::ReadWrite);
    }
}
