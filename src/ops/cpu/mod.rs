//! The CPU: computes each operation when it is asked to, on all threads of its pool.

mod memory;

pub(super) use memory::{CpuMemory, refuse};

use super::{
    Backend, BackendLimits, KvFormat, ModelPart, Op, experts,
    op::each,
    quant::{ActivationCache, QuantizedRows},
    simd::Activations,
};
use crate::device::{BufferAccess, CpuArithmetic, CpuDevice, DeviceError, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc};

/// Rows of a pass that go through a mixer together: its weights are small beside what they meet, and what it leaves between its
/// operations need not grow with the chunk.
const MIXER: usize = 256;

/// Runs operations on the CPU.
pub struct Cpu {
    pub(super) compute: CpuDevice,
    pub(super) memory: CpuMemory,
    /// The rows that weights met last, quantized.
    pub(super) quantized: ActivationCache,
    pub(super) scratch: CpuScratch,
}

/// Buffers that keep their room from one operation to the next.
#[derive(Default)]
pub(super) struct CpuScratch {
    pub normed: Vec<f32>,
    pub product: Vec<f32>,
    /// For each token and key head `q . k`, for each value head its gates.
    pub qk: Vec<f32>,
    pub gates: Vec<[f32; 2]>,
    pub experts: experts::ExpertScratch,
}

impl Cpu {
    pub fn new(compute: CpuDevice) -> Self {
        let (memory, quantized, scratch) = Default::default();
        Self { compute, memory, quantized, scratch }
    }

    /// The limits of a CPU that computes with `math`.
    pub fn limits(math: CpuArithmetic) -> BackendLimits {
        BackendLimits {
            by_table: 0,
            by_place: 0,
            half: false,
            in_place: true,
            mixer: MIXER,
            acts: false,
            waits: false,
            flush: usize::MAX,
            cache: if math == CpuArithmetic::F32 { KvFormat::F32 } else { KvFormat::I16 },
            partials: None,
            working_set: None,
        }
    }

    /// Bytes of its own that a CPU takes at most for each row of a pass, and in any case. In a mixer that is the row normed, what
    /// is added to it, and its digits, of no more than `widest` values; in a feed-forward its digits in two formats, and the
    /// `inner` values that are projected back, of the `places` that are computed together. A dense one has the first two as well.
    pub fn scratch(hidden: usize, widest: usize, places: usize, inner: usize) -> [usize; 2] {
        let both = 2 * 4 * hidden + QuantizedRows::row_bytes(widest);
        // Twice: tasks that share a slice leave it in f32 first, or the shared expert's have a format of their own.
        let middle = 2 * QuantizedRows::row_bytes(inner).max(4 * inner);
        // Its places while they are sorted, and a share of the lists of tasks, which end at 128 rows.
        let lists = 2 * size_of::<(u32, u32)>() * places + size_of::<Activations<'_>>();
        if places > 1 {
            [2 * QuantizedRows::row_bytes(hidden) + middle + lists, MIXER * both + experts::PLACES * middle]
        } else {
            [both + QuantizedRows::row_bytes(hidden) + middle + lists, 0]
        }
    }

    fn check_region(&self, region: Region) -> Result<(), DeviceError> {
        match self.memory.buffers.get(region.buffer as usize) {
            Some((_, range)) if region.offset + region.len <= range.len() => Ok(()),
            _ => refuse(format!("{region:?} is not in this memory")),
        }
    }

    /// Refuses an operation that writes what it also touches otherwise, or what there is not.
    fn check(&self, op: &Op<'_>) -> Result<(), DeviceError> {
        let mut seen = [(Region::default(), BufferAccess::Read); 24];
        let (mut count, mut wrong) = (0, Ok(()));
        op.touches(&mut |region, effect| {
            if region.len == 0 || wrong.is_err() {
                return;
            }
            wrong = self.check_region(region);
            let writes = |effect| effect != BufferAccess::Read;
            for (other, before) in &seen[..count] {
                if (writes(effect) || writes(*before)) && region.overlaps(*other) {
                    wrong = refuse(format!("an operation writes {region:?} and touches {other:?}"));
                }
            }
            if let Some(entry) = seen.get_mut(count) {
                (*entry, count) = ((region, effect), count + 1);
            }
        });
        wrong
    }
}

impl Backend for Cpu {
    fn name(&self) -> String {
        "the CPU".into()
    }

    fn limits(&self) -> BackendLimits {
        Self::limits(self.compute.arithmetic)
    }

    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        match part {
            ModelPart::Attention(shape) => shape.divisible(),
            ModelPart::Weight(_) | ModelPart::Delta(_) | ModelPart::Moe(_) => Ok(()),
        }
    }

    fn execute(&mut self, op: &Op<'_>) -> Result<(), DeviceError> {
        self.check(op)?;
        let quantized = &mut self.quantized;
        op.touches(&mut |region, effect| {
            if effect != BufferAccess::Read {
                quantized.forget(region);
            }
        });
        each!(op, op => op.on_cpu(self))
    }

    fn read(&mut self, from: Region, into: &mut [u8]) -> Result<(), DeviceError> {
        self.check_region(from.first(into.len()))?;
        into.copy_from_slice(self.memory.bytes(from.first(into.len())));
        Ok(())
    }

    fn write(&mut self, to: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = to.first(bytes.len());
        self.check_region(to)?;
        self.quantized.forget(to);
        self.memory.bytes_mut(to).copy_from_slice(bytes);
        Ok(())
    }

    fn copy(&mut self, from: Region, to: Region) -> Result<(), DeviceError> {
        self.check_region(from)?;
        self.check_region(to)?;
        if from.len != to.len || from.overlaps(to) {
            return refuse(format!("a copy from {from:?} to {to:?}"));
        }
        self.quantized.forget(to);
        self.memory.bytes_mut(to).copy_from_slice(self.memory.bytes(from));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        let slab = Slab::new(bytes).map_err(|error| DeviceError(format!("no memory for {bytes} bytes: {error}")))?;
        self.adopt(&Arc::new(slab), 0..bytes)
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        if range.end > slab.len() || range.start > range.end {
            return refuse(format!("bytes {range:?} of a slab of {}", slab.len()));
        }
        let (buffer, len) = (self.memory.buffers.len() as u32, range.len());
        self.memory.buffers.push((slab.clone(), range));
        Ok(Region { buffer, offset: 0, len })
    }

    fn longest(&self) -> usize {
        usize::MAX
    }
}

impl Timeline for Cpu {
    fn rest(&mut self) {
        self.compute.threads.rest();
    }
}
