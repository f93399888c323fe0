//! The interface to a device that executes operations.

use super::{
    MoeWeights, Weight,
    attention::KvFormat,
    decoded_product::DecodedProduct,
    linear::HalfBuffers,
    op::{ModelPart, Op},
};
use crate::device::{DeviceError, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc};

/// Buffers with numbers that are the same on every backend. The regions of weights have these numbers before there is a
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ReservedBuffer {
    /// The trunk's matrices.
    Matrices,
    /// The trunk's small vectors.
    Vectors,
    /// The addresses of the segments of experts.
    ExpertTable,
    MtpMatrices,
    MtpVectors,
    MtpExpertTable,
    /// Decoded rows, split into halves for matrix units.
    SplitRows,
}

impl ReservedBuffer {
    /// Number of reserved buffers.
    pub const COUNT: usize = Self::SplitRows as usize + 1;

    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Limits and preferences of a device. The forward pass follows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendLimits {
    /// Maximum number of rows for which resident experts are found through a slot table, so that the router's choice
    /// stays on the device.
    pub max_slot_table_rows: usize,
    /// Maximum number of rows for which loaded experts are computed one assignment at a time instead of grouped by
    /// expert.
    pub max_per_assignment_rows: usize,
    /// Prompts use half-precision matrix products, which need [`HalfBuffers`].
    pub uses_half_precision: bool,
    /// The delta rule may write its output over the convolution's output.
    pub delta_in_place: bool,
    /// Maximum number of rows in one attention or delta-net call. A longer pass is split into blocks.
    pub max_mixer_rows: usize,
    /// True if the pass must allocate the buffers for expert activations. False if the device has its own buffers.
    pub needs_expert_buffers: bool,
    /// Maximum number of layers of a span in one submission.
    pub layers_per_submission: usize,
    /// Operations run asynchronously. Reading a result waits for the device, so the pass batches its reads.
    pub is_async: bool,
    pub kv_format: KvFormat,
    /// The format of the ring of recent positions, which a cache of 8 or 4 bits has in addition to its pages.
    pub recent_format: KvFormat,
    /// `(rows, bytes)`: maximum number of rows in one attention launch, and maximum number of bytes of partial results.
    /// `None` if the device manages both itself.
    pub partials: Option<(usize, usize)>,
    /// Maximum number of bytes that the memory plan may give to this device, if the device reports a limit.
    pub working_set: Option<u64>,
}

/// Executes operations in order. After an error every call fails until a wait has returned the error.
pub trait Backend: Timeline + Send {
    fn limits(&self) -> BackendLimits;

    /// Returns an error if the device cannot compute this part of a model. The error says why.
    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError>;

    /// Returns an error if the device's compiler gives a kernel of this part fewer threads than its launches need. The
    /// check of all kernels at startup covers only launches whose number of threads is fixed.
    fn check_threads(&mut self, _part: ModelPart<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The matrices that this device multiplies together for a decoded row's scores.
    fn score_matrices(&self, layer: &MoeWeights) -> Vec<Weight> {
        layer.score_matrices(false)
    }

    /// Measures which variant of a kernel is fastest for each product of decoded rows, if there are several variants.
    /// All variants give the same bytes.
    fn choose_variants(&mut self, _products: &[DecodedProduct<'_>]) {}

    fn execute(&mut self, op: &Op<'_>) -> Result<(), DeviceError>;

    /// True after the device has failed permanently. No later call succeeds.
    fn is_lost(&self) -> bool {
        false
    }

    /// With `Some`, later products use half precision, for the rows of a prompt. With `None`, they use full precision
    /// again. Only called if [`BackendLimits::uses_half_precision`] is set. A row's result never depends on other rows.
    fn set_half_buffers(&mut self, _buffers: Option<HalfBuffers>) {}

    /// Called before the layers of a pass. If `streams` is true, layers wait for experts that are being read. Each wait
    /// submits the queued work, so the backend need not decide when to submit.
    fn begin_layers(&mut self, _streams: bool) {}

    /// Called after each layer. A backend that queues work may submit it here.
    fn end_layer(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// With `Some`, later launches have a skip flag: a word that a router sets if it selects an expert without a slot in
    /// its table. The launches after the router then change nothing that a later pass or another layer needs.
    fn set_skip_flag(&mut self, _flag: Option<Region>) {}

    /// Number of launches so far.
    fn launches(&mut self) -> u64 {
        0
    }

    /// Waits for pending writes to `from`, then copies the bytes of `from` to `into`. Both must have the same length.
    fn read(&mut self, from: Region, into: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes bytes in order with the operations: earlier operations still see the old bytes.
    fn write(&mut self, to: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes in order with the operations. Both regions must have the same length and must not overlap.
    fn copy(&mut self, from: Region, to: Region) -> Result<(), DeviceError>;

    /// Submits all encoded work without waiting.
    fn flush(&mut self) -> Result<(), DeviceError>;

    /// Allocates zeroed memory. Buffers are numbered after the [reserved numbers](ReservedBuffer), in the order in which
    /// they are allocated and adopted.
    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError>;

    /// Gives operations access to a page-aligned range of a slab. Operations may use the bytes after
    /// [`Backend::mark_loaded`] was called for them.
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;

    /// [Adopts](Backend::adopt) a whole slab under a reserved number. Refuses a number that has a buffer.
    fn adopt_as(&mut self, buffer: ReservedBuffer, slab: &Arc<Slab>) -> Result<Region, DeviceError>;

    /// Makes segments of a slab available to kernels. Returns a region for each segment, and the table of addresses
    /// through which kernels find the segments. The table gets a reserved number, because the CPU has none. A device that shares the CPU's memory adopts a segment when the first
    /// expert in it is [marked as loaded](Backend::mark_loaded). So loading does not wait until all segments are wired.
    fn adopt_segments(
        &mut self,
        table: ReservedBuffer,
        slab: &Arc<Slab>,
        segments: &[Range<usize>],
    ) -> Result<(Vec<Region>, Region), DeviceError>;

    /// Waits until the device has finished with the segment, then unmaps it. [`Backend::mark_loaded`] maps it again.
    fn release_segment(&mut self, _segment: Region) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Allocates the device's memory for a released segment, if the device has its own memory.
    fn restore_segment(&mut self, _segment: Region) -> Result<(), DeviceError> {
        Ok(())
    }

    /// From now on, an idle GPU executes small launches while the caller waits for a disk, so that the GPU's clock
    /// stays high.
    fn keep_gpu_awake(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Marks adopted bytes as complete. The bytes must not change until the device has passed a later sync point.
    /// `content` identifies the bytes: a device with its own memory skips the copy if it already holds the same
    /// content.
    fn mark_loaded(&mut self, _region: Region, _content: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The longest range that can be adopted, in bytes.
    fn max_buffer_len(&self) -> usize;

    /// Writes words to the start of the region; see [`Backend::write`].
    fn write_words(&mut self, to: Region, words: &[u32]) -> Result<(), DeviceError> {
        self.write(to.first(words.len() * 4), bytemuck::cast_slice(words))
    }

    /// Fills `into` from the start of the region; see [`Backend::read`].
    fn read_words(&mut self, from: Region, into: &mut [u32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }

    /// Fills `into` from the start of the region; see [`Backend::read`].
    fn read_floats(&mut self, from: Region, into: &mut [f32]) -> Result<(), DeviceError> {
        self.read(from.first(into.len() * 4), bytemuck::cast_slice_mut(into))
    }
}
