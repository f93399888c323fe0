//! The CPU backend: computes each operation immediately on all threads of its pool.

mod memory;

pub(super) use memory::{CpuMemory, refuse};

use super::{
    Backend, BackendLimits, KvFormat, ModelPart, Op, ReservedBuffer, block_attention, experts,
    linear::products::Activations,
    quant::{ActivationCache, QuantizedRows},
};
use crate::device::{BufferAccess, CpuArithmetic, CpuDevice, DeviceError, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc, time::Duration};

/// Maximum number of rows in one attention or delta-net call. The weights of these layers are small, so larger blocks
/// would need larger buffers without being faster.
const MAX_MIXER_ROWS: usize = 256;

/// Executes operations on the CPU.
pub struct Cpu {
    pub(super) compute: CpuDevice,
    pub(super) memory: CpuMemory,
    /// The input rows of the last product, quantized.
    pub(super) quantized: ActivationCache,
    pub(super) scratch: CpuScratch,
}

/// Buffers that are reused by all operations.
#[derive(Default)]
pub(super) struct CpuScratch {
    pub normed: Vec<f32>,
    pub product: Vec<f32>,
    /// Delta net: `q . k` of each token and key head.
    pub qk: Vec<f32>,
    /// Delta net: `[beta, g]` of each token and value head.
    pub gates: Vec<[f32; 2]>,
    pub experts: experts::ExpertScratch,
    pub selection: block_attention::SelectionScratch,
}

impl Cpu {
    pub fn new(compute: CpuDevice) -> Self {
        let (memory, quantized, scratch) = Default::default();
        Self { compute, memory, quantized, scratch }
    }

    /// The limits of a CPU with this arithmetic.
    pub fn limits(math: CpuArithmetic) -> BackendLimits {
        let kv_format = if math == CpuArithmetic::F32 { KvFormat::F32 } else { KvFormat::I16 };
        BackendLimits {
            max_slot_table_rows: 0,
            max_per_assignment_rows: 0,
            uses_half_precision: false,
            delta_in_place: true,
            max_mixer_rows: MAX_MIXER_ROWS,
            needs_expert_buffers: false,
            layers_per_submission: 1,
            is_async: false,
            kv_format,
            recent_format: kv_format,
            partials: None,
            working_set: None,
        }
    }

    /// Maximum number of bytes that the backend allocates: for each row of a pass, and a part that does not depend on
    /// the rows. Attention and delta nets need the normalised row, the product before the residual sum and a quantized
    /// row of up to `widest` values. An expert layer needs its input quantized in two formats, and the `inner`
    /// intermediate values of the `assignments` that are computed together. A dense feed-forward layer needs the
    /// buffers of both kinds.
    pub fn scratch(hidden: usize, widest: usize, assignments: usize, inner: usize) -> [usize; 2] {
        let both = 2 * 4 * hidden + QuantizedRows::row_bytes(widest);
        // The values are counted twice, because tasks that share a slice store it as f32 first, or because the shared
        // expert uses another format.
        let middle = 2 * QuantizedRows::row_bytes(inner).max(4 * inner);
        // The sorted assignments, and a part of the task lists, which hold at most 128 rows.
        let lists = 2 * size_of::<(u32, u32)>() * assignments + size_of::<Activations<'_>>();
        if assignments > 1 {
            [
                2 * QuantizedRows::row_bytes(hidden) + middle + lists,
                MAX_MIXER_ROWS * both + experts::MAX_ASSIGNMENTS * middle,
            ]
        } else {
            [both + QuantizedRows::row_bytes(hidden) + middle + lists, 0]
        }
    }

    fn check_region(&self, region: Region) -> Result<(), DeviceError> {
        match self.memory.buffer(region.buffer) {
            Some((_, range)) if region.offset + region.len <= range.len() => Ok(()),
            _ => refuse(format!("region {region:?} is outside the allocated buffers")),
        }
    }

    /// Returns an error if a region that the operation writes overlaps another region, or if a region does not exist.
    fn check(&self, op: &Op<'_>) -> Result<(), DeviceError> {
        let mut seen = [(Region::default(), BufferAccess::Read); 24];
        let mut count = 0;
        let mut wrong = Ok(());
        op.touches(&mut |region, effect| {
            if region.len == 0 || wrong.is_err() {
                return;
            }
            wrong = self.check_region(region);
            let writes = |effect| effect != BufferAccess::Read;
            for (other, before) in &seen[..count] {
                if (writes(effect) || writes(*before)) && region.overlaps(*other) {
                    wrong = refuse(format!("an operation writes {region:?}, which overlaps its {other:?}"));
                }
            }
            if let Some(entry) = seen.get_mut(count) {
                *entry = (region, effect);
                count += 1;
            }
        });
        wrong
    }
}

impl Backend for Cpu {
    fn limits(&self) -> BackendLimits {
        Self::limits(self.compute.arithmetic)
    }

    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        match part {
            ModelPart::Attention(shape) => shape.divisible(),
            _ => Ok(()),
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
        match op {
            Op::Embedding(op) => op.on_cpu(self),
            Op::Linear(op) => op.on_cpu(self),
            Op::Conv(op) => op.on_cpu(self),
            Op::DeltaRule(op) => op.on_cpu(self),
            Op::DeltaNet(op) => op.on_cpu(self),
            Op::DeltaNetRows(op) => op.on_cpu(self),
            Op::KvWrite(op) => op.on_cpu(self),
            Op::Attention(op) => op.on_cpu(self),
            Op::AttentionRows(op) => op.on_cpu(self),
            Op::BlockAttention(op) => op.on_cpu(self),
            Op::BlockAttentionRows(op) => op.on_cpu(self),
            Op::ReadStreams(op) => op.on_cpu(self),
            Op::WriteStreams(op) => op.on_cpu(self),
            Op::NgramInject(op) => op.on_cpu(self),
            Op::NgramInjectRows(op) => op.on_cpu(self),
            Op::Mlp(op) => op.on_cpu(self),
            Op::Router(op) => op.on_cpu(self),
            Op::Experts(op) => op.on_cpu(self),
            Op::CombineExperts(op) => op.on_cpu(self),
            Op::Sample(op) => op.on_cpu(self),
        }
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
            return refuse(format!("cannot copy {from:?} to {to:?}: the lengths differ or the regions overlap"));
        }
        self.quantized.forget(to);
        self.memory.bytes_mut(to).copy_from_slice(self.memory.bytes(from));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        let slab =
            Slab::new(bytes).map_err(|error| DeviceError::Memory(format!("cannot allocate {bytes} bytes: {error}")))?;
        self.adopt(&Arc::new(slab), 0..bytes)
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        if range.end > slab.len() || range.start > range.end {
            return refuse(format!("cannot adopt bytes {range:?} of a slab of {} bytes", slab.len()));
        }
        let buffer = self.memory.buffers.len() as u32;
        let len = range.len();
        self.memory.buffers.push(Some((slab.clone(), range)));
        Ok(Region { buffer, offset: 0, len })
    }

    fn adopt_as(&mut self, buffer: ReservedBuffer, slab: &Arc<Slab>) -> Result<Region, DeviceError> {
        let place = &mut self.memory.buffers[buffer.number() as usize];
        if place.is_some() {
            return refuse(format!("{buffer:?} is already adopted"));
        }
        *place = Some((slab.clone(), 0..slab.len()));
        Ok(Region { buffer: buffer.number(), offset: 0, len: slab.len() })
    }

    fn adopt_segments(
        &mut self,
        table: ReservedBuffer,
        slab: &Arc<Slab>,
        segments: &[Range<usize>],
    ) -> Result<(Vec<Region>, Region), DeviceError> {
        // The CPU needs no table.
        let table = Region { buffer: table.number(), offset: 0, len: 0 };
        let regions = segments.iter().map(|range| self.adopt(slab, range.clone())).collect::<Result<_, _>>()?;
        Ok((regions, table))
    }

    fn max_buffer_len(&self) -> usize {
        usize::MAX
    }
}

impl Timeline for Cpu {
    fn begin_disk_wait(&mut self) -> Option<Duration> {
        self.compute.threads.expect_pause();
        None
    }
}
