//! The interface to a device that runs operations.

use super::{
    attention::KvFormat,
    linear::HalfBuffers,
    op::{ModelPart, Op},
};
use crate::device::{DeviceError, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc};

/// A device's limits, which the pass keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendLimits {
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
    /// MoeBuffers for experts' activations is the pass's affair, and not the device's own.
    pub acts: bool,
    /// Reading back costs a wait: what is read together is computed together.
    pub waits: bool,
    /// Layers in front of the first flush when nothing waits; each further flush comes after twice as many as the one before.
    pub flush: usize,
    pub cache: KvFormat,
    /// Rows whose attention one launch computes at most, and the bytes its partial results may take; `None` where they are
    /// the device's own affair.
    pub partials: Option<(usize, usize)>,
    /// The memory plan is made for so many bytes at most, if the device says.
    pub working_set: Option<u64>,
}

/// Runs operations in the order given. After an error every call fails until a wait has reported it.
pub trait Backend: Timeline + Send {
    fn name(&self) -> String;

    fn limits(&self) -> BackendLimits;

    /// Refuses a part of a model that the device cannot compute, and says why.
    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError>;

    fn execute(&mut self, op: &Op<'_>) -> Result<(), DeviceError>;

    /// True if the device has been given up: nothing will succeed any more.
    fn lost(&self) -> bool {
        false
    }

    /// Operations that follow are those of a prompt of more than one row, if there is room: then a GPU computes their products
    /// in half precision. For a device whose [`BackendLimits::half`] asks for it. A row's result depends on no other row either way.
    fn prompt(&mut self, room: Option<HalfBuffers>) {
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

    /// Makes a range of a slab visible. The range starts at a page. Its bytes are there for operations once [`Backend::landed`] has
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

    /// [`Backend::write`] to the region's beginning.
    fn write_words(&mut self, to: Region, words: &[u32]) -> Result<(), DeviceError> {
        self.write(to.first(words.len() * 4), bytemuck::cast_slice(words))
    }

    /// [`Backend::read`] of as many words as fit.
    fn read_words(&mut self, from: Region, into: &mut [u32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }

    /// [`Backend::read`] of as many floats as fit.
    fn read_floats(&mut self, from: Region, into: &mut [f32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }
}
