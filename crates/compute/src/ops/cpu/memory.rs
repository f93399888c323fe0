//! The CPU backend's buffers. Each buffer is a range of a slab.

use crate::{
    device::{DeviceError, Region, Slab},
    ops::{ReservedBuffer, SequenceRows, Weight, WeightView},
};
use std::{ops::Range, sync::Arc};

/// All buffers, indexed by number.
pub(in crate::ops) struct CpuMemory {
    /// `None` for a reserved number without a buffer.
    pub(super) buffers: Vec<Option<(Arc<Slab>, Range<usize>)>>,
}

impl Default for CpuMemory {
    fn default() -> Self {
        Self { buffers: vec![None; ReservedBuffer::COUNT] }
    }
}

pub(in crate::ops) fn refuse<T>(why: String) -> Result<T, DeviceError> {
    Err(DeviceError::Failed(why))
}

impl CpuMemory {
    pub(super) fn buffer(&self, number: u32) -> Option<&(Arc<Slab>, Range<usize>)> {
        self.buffers.get(number as usize)?.as_ref()
    }

    pub fn bytes(&self, region: Region) -> &[u8] {
        let Some((slab, range)) = self.buffer(region.buffer).filter(|_| region.len > 0) else {
            return &[];
        };
        let at = range.start + region.offset;
        assert!(at + region.len <= range.end, "{region:?} of a buffer of {} bytes", range.len());
        // SAFETY: `Cpu::execute` refuses operations whose written regions overlap other regions, and runs one
        // operation at a time. The owner of an adopted slab does not write ranges that are in use.
        unsafe { slab.bytes(at..at + region.len) }
    }

    #[allow(clippy::mut_from_ref)] // Regions that an operation writes are disjoint from its others.
    pub fn bytes_mut(&self, region: Region) -> &mut [u8] {
        let Some((slab, range)) = self.buffer(region.buffer).filter(|_| region.len > 0) else {
            return &mut [];
        };
        let at = range.start + region.offset;
        assert!(at + region.len <= range.end, "{region:?} of a buffer of {} bytes", range.len());
        // SAFETY: as in `bytes`.
        unsafe { slab.bytes_mut(at..at + region.len) }
    }

    pub fn floats(&self, region: Region) -> &[f32] {
        // An empty byte slice may be misaligned for f32.
        if region.len == 0 { &[] } else { bytemuck::cast_slice(self.bytes(region)) }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn floats_mut(&self, region: Region) -> &mut [f32] {
        if region.len == 0 { &mut [] } else { bytemuck::cast_slice_mut(self.bytes_mut(region)) }
    }

    pub fn words(&self, region: Region) -> &[u32] {
        if region.len == 0 { &[] } else { bytemuck::cast_slice(self.bytes(region)) }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn words_mut(&self, region: Region) -> &mut [u32] {
        if region.len == 0 { &mut [] } else { bytemuck::cast_slice_mut(self.bytes_mut(region)) }
    }

    /// The number of the sequence of row `row`, and the row's index in that sequence.
    pub fn sequence(&self, rows: &SequenceRows, row: usize) -> [usize; 2] {
        let words = self.words(rows.table.rows(row, 1, 2));
        [words[0] as usize, words[1] as usize]
    }

    pub fn view(&self, weight: &Weight) -> WeightView<'_> {
        let Weight { codes, rows, cols, global_scale, parts } = *weight;
        WeightView { codes, rows, cols, global_scale, skipped: 0, parts: parts.map(|part| self.bytes(part)) }
    }
}
