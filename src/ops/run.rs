//! Devices run operations: [`Cpu`](super::Cpu) computes at once, [`OnGpu`](super::OnGpu) turns each value into
//! launches.

use super::{
    Weight,
    attend::{Attend, CacheWrite, Heads, row_bytes},
    conv::Conv,
    delta::{Delta, DeltaNet, DeltaRule},
    embed::Embed,
    experts::{Combine, Experts, Mixture},
    mlp::Mlp,
    project::{Halves, Project},
    route::Route,
};
use crate::device::{DeviceError, Effect, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc};

/// One operation of the forward pass: a value that says what to do with which memory, and not how.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    Embed(Embed<'a>),
    Project(Project<'a>),
    Conv(Conv<'a>),
    DeltaRule(DeltaRule<'a>),
    /// By reference: it is four operations in one.
    DeltaNet(&'a DeltaNet<'a>),
    CacheWrite(CacheWrite<'a>),
    Attend(Attend<'a>),
    Mlp(Mlp<'a>),
    Route(Route<'a>),
    Experts(Experts<'a>),
    Combine(Combine<'a>),
}

macro_rules! each {
    ($self:ident, $op:ident => $body:expr) => {
        match $self {
            Op::Embed($op) => $body,
            Op::Project($op) => $body,
            Op::Conv($op) => $body,
            Op::DeltaRule($op) => $body,
            Op::DeltaNet($op) => $body,
            Op::CacheWrite($op) => $body,
            Op::Attend($op) => $body,
            Op::Mlp($op) => $body,
            Op::Route($op) => $body,
            Op::Experts($op) => $body,
            Op::Combine($op) => $body,
        }
    };
}
pub(super) use each;

impl Op<'_> {
    /// Shows every activation and state that the operation touches, and how. Weights are not listed: nothing writes them.
    pub fn touches(&self, see: &mut dyn FnMut(Region, Effect)) {
        each!(self, op => op.touches(see));
    }
}

macro_rules! from {
    ($($name:ident),*) => {
        $(impl<'a> From<$name<'a>> for Op<'a> {
            fn from(op: $name<'a>) -> Self {
                Op::$name(op)
            }
        })*
    };
}
from!(Embed, Project, Conv, DeltaRule, CacheWrite, Attend, Mlp, Route, Experts, Combine);

impl<'a> From<&'a DeltaNet<'a>> for Op<'a> {
    fn from(op: &'a DeltaNet<'a>) -> Self {
        Op::DeltaNet(op)
    }
}

/// The number format of a cache's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFormat {
    F32,
    /// The upper half of an f32.
    Bf16,
    /// 16-bit integers and one f32 a row, times which an integer is the value (see `attend/cache.rs`).
    I16,
    /// Integers of 8 or 4 bits and a bf16 for each 32 (see `attend/rounded.rs`), of rows that have been turned.
    Eight,
    Four,
}

impl CacheFormat {
    /// Bytes of one row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            CacheFormat::F32 => 4 * dim,
            CacheFormat::Bf16 => 2 * dim,
            CacheFormat::I16 => 2 * (dim + 2),
            CacheFormat::Eight => row_bytes(8, dim),
            CacheFormat::Four => row_bytes(4, dim),
        }
    }
}

/// Bits for each value of a cache: the device's 16 or more, or fewer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvBits {
    #[default]
    Sixteen,
    Eight,
    Four,
}

impl KvBits {
    /// The same on every device; `None` where the device chooses.
    pub fn format(self) -> Option<CacheFormat> {
        match self {
            KvBits::Sixteen => None,
            KvBits::Eight => Some(CacheFormat::Eight),
            KvBits::Four => Some(CacheFormat::Four),
        }
    }
}

/// A device's limits, which the pass keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Up to so many rows, experts that are all in memory are found without asking the CPU which were chosen.
    pub by_table: usize,
    /// Up to so many rows, experts that are read are computed place by place, and not grouped by expert.
    pub by_place: usize,
    /// A prompt's products are computed in half precision, for which rows need room.
    pub half: bool,
    /// A delta net's rule has read all that it reads when its results are written: they may lie where the convolution's do.
    pub in_place: bool,
    /// Rows that a mixer computes at a time: a longer pass goes through it in blocks.
    pub mixer: usize,
    /// Room for experts' activations is the pass's affair, and not the device's own.
    pub acts: bool,
    /// Reading back costs a wait: what is read together is computed together.
    pub waits: bool,
    /// Layers in front of the first flush when nothing waits; each further flush comes after twice as many as the one before.
    pub flush: usize,
    pub cache: CacheFormat,
    /// Rows whose attention one launch computes at most, and the bytes its partial results may take; `None` where they are
    /// the device's own affair.
    pub partials: Option<(usize, usize)>,
    /// The memory plan is made for so many bytes at most, if the device says.
    pub working_set: Option<u64>,
}

/// A part of a model that a device may be unable to compute.
#[derive(Clone, Copy)]
pub enum Part<'a> {
    Weight(&'a Weight),
    Heads(&'a Heads),
    /// With the taps of its convolution.
    Delta(&'a Delta, usize),
    /// Laid out in slots.
    Mixture(&'a Mixture),
}

/// Runs operations in the order given. After an error every call fails until a wait has reported it.
pub trait Run: Timeline + Send {
    fn name(&self) -> String;

    fn limits(&self) -> Limits;

    /// Refuses a part of a model that the device cannot compute, and says why.
    fn accept(&self, part: Part<'_>) -> Result<(), DeviceError>;

    fn run(&mut self, op: &Op<'_>) -> Result<(), DeviceError>;

    /// True if the device has been given up: nothing will succeed any more.
    fn lost(&self) -> bool {
        false
    }

    /// Operations that follow are those of a prompt of more than one row, if there is room: then a GPU computes their products
    /// in half precision. For a device whose [`Limits::half`] asks for it. A row's result depends on no other row either way.
    fn prompt(&mut self, room: Option<Halves>) {
        let _ = room;
    }

    /// Waits for what writes `from` and copies it out; `into` is as long.
    fn read(&mut self, from: Region, into: &mut [u8]) -> Result<(), DeviceError>;

    /// In order with operations: those that were run before still see the old bytes.
    fn write(&mut self, to: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    /// In order with operations; both are equally long and do not overlap.
    fn copy(&mut self, from: Region, to: Region) -> Result<(), DeviceError>;

    /// Hands over what has been encoded; never waits.
    fn flush(&mut self) -> Result<(), DeviceError>;

    /// Zeroed memory. Its `buffer` is a number: buffers are counted from 0 as they are allocated and adopted.
    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError>;

    /// Makes a range of a slab visible. The range starts at a page. Its bytes are there for operations once [`Run::landed`] has
    /// named them.
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;

    /// Adopted bytes are complete, and stay so until the device has passed a mark behind this. `content` stands for what they
    /// are: a device with memory of its own fetches them unless it has fetched the same there before.
    fn landed(&mut self, region: Region, content: u64) -> Result<(), DeviceError> {
        let _ = (region, content);
        Ok(())
    }

    /// The longest range that can be adopted (bytes).
    fn longest(&self) -> usize;

    /// [`Run::write`] to the region's beginning.
    fn write_words(&mut self, to: Region, words: &[u32]) -> Result<(), DeviceError> {
        self.write(to.first(words.len() * 4), bytemuck::cast_slice(words))
    }

    /// [`Run::read`] of as many words as fit.
    fn read_words(&mut self, from: Region, into: &mut [u32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }

    /// [`Run::read`] of as many floats as fit.
    fn read_floats(&mut self, from: Region, into: &mut [f32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }
}
