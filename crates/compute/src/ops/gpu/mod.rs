//! The GPU backend: turns operations into launches, in order. `accept` says which weights its kernels support.

mod accept;
mod compare;
mod experts;
mod variants;

pub use compare::{Comparison, DecodedAttention, compare_kernels, time_attention};

use super::{
    Backend, BackendLimits, DecodedProduct, HalfBuffers, IndexerShape, KvFormat, ModelPart, MoeWeights, Op,
    ReservedBuffer, Weight, attention::prompt_work, cpu::refuse, linear::RowTiles, norm::rms_norm,
};
use crate::device::{BufferAccess, CommandQueue, DeviceError, Driver, Launch, Region, Slab, SyncPoint, Timeline};
use accept::accept_part;
use std::{collections::HashMap, ops::Range, sync::Arc, time::Duration};
use variants::VariantChoice;

/// Maximum number of rows that are computed as in decoding, with experts found through the slot table.
const DECODE_ROWS: usize = 16;
/// Maximum number of rows of attention per launch: enough to fill a large GPU.
const ATTENTION_ROWS: usize = 128;
/// Maximum size of partial results of attention in bytes. As many rows are computed at once as fit into this size.
const MAX_PARTIAL_BYTES: usize = 64 << 20;
/// Interval of the small launches that keep an idle GPU's clock high while the disk is read.
const AWAKE_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of layers of a span in one submission on a GPU that shares the CPU's memory. A Metal queue has at
/// most 64 command buffers, and each costs some 30 us.
const LAYERS_PER_SUBMISSION: usize = 8;
/// Number of layers of a pass that are encoded before the first submission.
const FIRST_SUBMIT: usize = 2;

/// The limits of a GPU with this recommended working set, in bytes.
pub const fn limits(working_set: Option<u64>) -> BackendLimits {
    BackendLimits {
        max_slot_table_rows: DECODE_ROWS,
        max_per_assignment_rows: 1,
        uses_half_precision: true,
        delta_in_place: false,
        max_mixer_rows: usize::MAX,
        needs_expert_buffers: true,
        layers_per_submission: LAYERS_PER_SUBMISSION,
        is_async: true,
        // The same format as on the CPU, so that the CPU continues from snapshots of a lost GPU.
        kv_format: KvFormat::I16,
        // The kernels for 8 and 4 bits read the newest positions as f32.
        recent_format: KvFormat::F32,
        partials: Some((ATTENTION_ROWS, MAX_PARTIAL_BYTES)),
        working_set,
    }
}

/// Executes operations as launches.
pub struct GpuBackend<D: Driver> {
    gpu: CommandQueue<D>,
    /// Device regions by buffer number. `None` for a reserved number without a buffer.
    buffers: Vec<Option<Region>>,
    segments: HashMap<u32, Segment>,
    /// Regions that unfinished launches access, each with the sync point at which the launch is done.
    in_flight: Vec<(Region, BufferAccess, SyncPoint)>,
    failed: Option<String>,
    /// Buffers for half-precision rows. Present while a prompt is computed.
    half: Option<HalfBuffers>,
    /// Number of layers of the current pass that are encoded.
    layers: usize,
    /// Number of encoded layers at which the next submission is made.
    next_submit: usize,
    /// Number of layers in the next submission: first [`FIRST_SUBMIT`], then twice as many each time.
    submit_step: usize,
    /// The skip flag of later launches.
    skip_flag: Option<Region>,
    /// Minimum number of weights of a product of decoded rows on matrix units, if there is one.
    min_tiled_weights: Option<usize>,
    /// The variants of the kernels of decoded rows.
    variants: VariantChoice,
    /// Number of launches so far.
    launches: u64,
    slots: Vec<u32>,
    /// The content that was last uploaded to each region, for a device with its own memory.
    uploaded: HashMap<Region, u64>,
    /// Device buffers to release.
    owned: Vec<u32>,
    /// The small launch of [`Backend::keep_gpu_awake`].
    awake: Option<Launch>,
    /// True to wait after every launch and record its kernel in `launched`. This shows which kernel fails.
    waits_each: bool,
    launched: Vec<&'static str>,
}

/// A segment of the experts' slab.
struct Segment {
    slab: Arc<Slab>,
    range: Range<usize>,
    /// The 8 bytes of the address table that hold this segment's address.
    entry: Region,
    /// The device's buffer while the device uses the segment.
    device: Option<u32>,
}

impl<D: Driver> GpuBackend<D> {
    pub fn new(gpu: CommandQueue<D>) -> Self {
        let (segments, in_flight, slots, uploaded, owned, launched) = Default::default();
        let min_tiled_weights = gpu.driver.min_tiled_weights();
        Self {
            gpu,
            buffers: vec![None; ReservedBuffer::COUNT],
            segments,
            in_flight,
            failed: None,
            half: None,
            layers: 0,
            next_submit: 0,
            submit_step: 0,
            skip_flag: None,
            min_tiled_weights,
            variants: VariantChoice::default(),
            launches: 0,
            slots,
            uploaded,
            owned,
            awake: None,
            waits_each: false,
            launched,
        }
    }

    /// Frees this backend's buffers. The queue can then serve another backend.
    pub(super) fn into_queue(mut self) -> CommandQueue<D> {
        for buffer in self.owned {
            self.gpu.release(buffer);
        }
        self.gpu
    }

    /// Waits after every launch and records its kernel until [`GpuBackend::take_launched`].
    pub(super) fn waiting_each(gpu: CommandQueue<D>) -> Self {
        let mut new = Self::new(gpu);
        new.waits_each = true;
        new.tile_all_rows(false);
        new
    }

    /// For checks: multiplies decoded rows on matrix units regardless of the number of weights, or never. Returns false
    /// if the device never does.
    pub(super) fn tile_all_rows(&mut self, tiled: bool) -> bool {
        self.min_tiled_weights = self.gpu.driver.min_tiled_weights().filter(|_| tiled).map(|_| 0);
        self.min_tiled_weights.is_some()
    }

    /// For checks: always launches the direct variant of a kernel, or always the staged one.
    pub(super) fn set_direct(&mut self, is_direct: bool) {
        self.variants = if is_direct { VariantChoice::Direct } else { VariantChoice::Staged };
    }

    pub(super) fn set_waits_each(&mut self, waits_each: bool) {
        self.waits_each = waits_each;
    }

    pub(super) fn take_launched(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.launched)
    }

    /// Adopts a segment and enters its address in the table. Does nothing for other buffers.
    fn adopt_segment(&mut self, number: u32) -> Result<(), DeviceError> {
        let Some(segment) = self.segments.get(&number).filter(|segment| segment.device.is_none()) else {
            return Ok(());
        };
        let entry = segment.entry;
        let region = self.gpu.adopt(&segment.slab, segment.range.clone())?;
        let address = self.gpu.driver.address(region.buffer);
        let entered = address.and_then(|address| self.write(entry, &address.to_le_bytes()));
        if entered.is_err() {
            // Otherwise the buffer would keep the segment's memory in use.
            self.gpu.release(region.buffer);
            return entered;
        }
        self.owned.push(region.buffer);
        self.buffers[number as usize] = Some(region);
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.device = Some(region.buffer);
        }
        Ok(())
    }

    /// Gives a device's buffer the next number. Returns its region on this backend.
    fn add(&mut self, region: Region) -> Region {
        self.buffers.push(None);
        self.place(self.buffers.len() as u32 - 1, region)
    }

    fn place(&mut self, number: u32, region: Region) -> Region {
        self.owned.push(region.buffer);
        self.buffers[number as usize] = Some(region);
        Region { buffer: number, ..region }
    }

    /// The device region of a region of this backend.
    fn resolve(&self, region: Region) -> Region {
        match self.buffers.get(region.buffer as usize) {
            Some(Some(buffer)) => buffer.part(region.offset, region.len),
            // An unused binding may be an empty part of a buffer that does not exist.
            Some(None) if region.len == 0 => region,
            // The queue refuses buffers that it does not know.
            _ => Region { buffer: u32::MAX, ..region },
        }
    }

    /// Returns the error of an earlier launch, if no wait has reported it yet.
    fn check_failed(&self) -> Result<(), DeviceError> {
        self.failed.clone().map_or(Ok(()), |why| Err(DeviceError::Failed(why)))
    }

    fn record<T>(&mut self, done: Result<T, DeviceError>) -> Result<T, DeviceError> {
        if let Err(error) = &done {
            self.failed.get_or_insert_with(|| error.to_string());
            // The failed work may include uploads.
            self.uploaded.clear();
        }
        done
    }

    /// Encodes a launch over this backend's buffers.
    pub fn launch(&mut self, mut launch: Launch) -> Result<(), DeviceError> {
        self.check_failed()?;
        self.launches += 1;
        if let Some(flag) = self.skip_flag {
            launch.set_skip_flag(flag);
        }
        if let Some(kernel) = self.variants.replacement(&launch) {
            launch.kernel = kernel;
        }
        let first = self.in_flight.len();
        for binding in &mut launch.bindings {
            self.in_flight.push((binding.region, binding.access, SyncPoint::START));
            binding.region = self.resolve(binding.region);
        }
        let done = self.gpu.launch(&launch);
        let point = self.gpu.sync_point();
        self.in_flight[first..].iter_mut().for_each(|(.., until)| *until = point);
        if self.waits_each {
            self.launched.push(launch.kernel);
            let waited = self.gpu.wait();
            return self.record(done.and(waited));
        }
        self.record(done)
    }

    fn all(&mut self, launches: impl IntoIterator<Item = Launch>) -> Result<(), DeviceError> {
        launches.into_iter().try_for_each(|launch| self.launch(launch))
    }

    /// The buffer for the split rows of a product, if the device multiplies decoded rows on matrix units. `words` is
    /// the size of the buffer for a minimum number of weights, or 0 if no product uses matrix units.
    fn row_tiles(&mut self, words: impl FnOnce(usize) -> usize) -> Result<Option<RowTiles>, DeviceError> {
        let Some(min_weights) = self.min_tiled_weights else { return Ok(None) };
        let bytes = words(min_weights) * 4;
        if bytes == 0 {
            return Ok(None);
        }
        let number = ReservedBuffer::SplitRows.number();
        let present = self.buffers[number as usize].map_or(0, |buffer| buffer.len);
        if present < bytes {
            let region = self.gpu.allocate(bytes.next_power_of_two())?;
            self.place(number, region);
        }
        let buffer = Region { buffer: number, offset: 0, len: present.max(bytes) };
        Ok(Some(RowTiles { min_weights, buffer }))
    }

    /// True if decoding attends on matrix units, which takes four products for each integer in the cache. By reasoning,
    /// not measurement, that costs more than it saves on Apple's GPUs up to the M4, which multiply tiles as fast as they
    /// compute anything else. GPUs with their own memory have faster units.
    pub(in crate::ops) fn attends_on_tiles(&self) -> bool {
        self.gpu.driver.has_matrix_units() && self.gpu.driver.has_own_memory()
    }

    /// Waits for the unfinished launches that conflict with accessing `region`, and for no others.
    fn wait_for_conflicts(&mut self, region: Region, access: BufferAccess) -> Result<(), DeviceError> {
        let conflicts = |other: BufferAccess| access != BufferAccess::Read || other != BufferAccess::Read;
        let touched = self.in_flight.iter().filter(|(other, with, _)| conflicts(*with) && other.overlaps(region));
        if let Some(last) = touched.map(|(.., point)| *point).max() {
            let done = self.gpu.wait_for(last);
            self.in_flight.retain(|(.., until)| *until > last);
            self.record(done)?;
        }
        self.check_failed()
    }
}

impl<D: Driver> Backend for GpuBackend<D> {
    fn limits(&self) -> BackendLimits {
        let shared = limits(self.gpu.driver.working_set());
        BackendLimits {
            uses_half_precision: self.gpu.driver.has_matrix_units(),
            // CUDA recognises a command buffer with one layer, so that it need not encode the launches again.
            layers_per_submission: if self.gpu.driver.has_own_memory() { 1 } else { shared.layers_per_submission },
            ..shared
        }
    }

    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        accept_part(part)
    }

    fn check_threads(&mut self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        let kernels = match part {
            ModelPart::Attention(shape) => {
                shape.wide_kernels(self.gpu.driver.has_matrix_units(), self.attends_on_tiles())
            }
            ModelPart::Indexer(_) => IndexerShape::wide_kernels(self.gpu.driver.has_matrix_units()),
            ModelPart::Moe(layer) => vec![layer.threads()],
            ModelPart::Weight(_) | ModelPart::Delta(_) => Vec::new(),
        };
        for (kernel, threads) in kernels {
            let max = self.gpu.driver.max_threads(kernel)?;
            if threads > max {
                return refuse(format!("{kernel} needs threadgroups of {threads}, but this GPU runs at most {max}"));
            }
        }
        Ok(())
    }

    fn score_matrices(&self, layer: &MoeWeights) -> Vec<Weight> {
        layer.score_matrices(self.tiles_experts(layer))
    }

    fn choose_variants(&mut self, products: &[DecodedProduct<'_>]) {
        if self.gpu.driver.has_variants() {
            self.variants.measure(&mut self.gpu, products);
        }
    }

    fn execute(&mut self, op: &Op<'_>) -> Result<(), DeviceError> {
        match op {
            Op::Embedding(op) => self.launch(op.launch()),
            Op::Linear(op) => match self.half {
                Some(half) => self.all(op.half_launches(half)),
                None => {
                    let tiles = self.row_tiles(|min| op.split_words(min))?;
                    self.all(op.launches(tiles))
                }
            },
            Op::Conv(op) => self.launch(op.launch()),
            Op::DeltaRule(op) => self.all(op.launches()),
            Op::DeltaNet(op) => match self.half {
                Some(half) => self.all(op.half_launches(half)),
                None => {
                    let tiles = self.row_tiles(|min| op.split_words(min))?;
                    self.all(op.launches(tiles))
                }
            },
            Op::BlockAttention(op) => self.all(op.launches(ATTENTION_ROWS, self.half.is_some())?),
            Op::BlockAttentionRows(op) => self.all(op.launches(ATTENTION_ROWS)?),
            Op::ReadStreams(op) => self.all(op.launches(self.half)),
            Op::WriteStreams(op) => self.launch(op.launch()),
            Op::NgramInject(op) => self.all(op.launches()?),
            Op::NgramInjectRows(op) => self.all(op.launches()?),
            Op::DeltaNetRows(op) => {
                let tiles = self.row_tiles(|min| op.net.split_words(min))?;
                self.all(op.launches(tiles))
            }
            Op::KvWrite(op) => self.launch(op.launch()),
            Op::Attention(op) if self.half.is_some() && op.shape.recent.is_none() => {
                let has_own_memory = self.gpu.driver.has_own_memory();
                self.all(op.half_launches(prompt_work(has_own_memory, self.gpu.has_delayed_screen())))
            }
            Op::Attention(op) => self.all(op.launches(ATTENTION_ROWS, self.attends_on_tiles()).flatten()),
            Op::AttentionRows(op) => self.all(op.launches(ATTENTION_ROWS, self.attends_on_tiles())),
            Op::Mlp(op) => match self.half {
                Some(half) => self.all(op.half_launches(half)),
                None => {
                    let tiles = self.row_tiles(|min| op.split_words(min))?;
                    self.all(op.launches(tiles))
                }
            },
            Op::Router(op) => match self.half.and_then(|half| op.half_launches(half)) {
                Some(launches) => self.all(launches),
                None => self.all(op.launches(self.tiles_experts(op.layer))),
            },
            Op::Experts(op) => self.experts(op),
            Op::CombineExperts(op) => self.combine_experts(op),
            Op::Sample(op) => self.all(op.launches()),
        }
    }

    fn is_lost(&self) -> bool {
        self.gpu.is_lost()
    }

    fn set_half_buffers(&mut self, buffers: Option<HalfBuffers>) {
        // These kernels use the same instructions as those for decoded rows.
        let has_short = self.gpu.driver.min_tiled_weights().is_some();
        self.half = buffers.map(|buffers| HalfBuffers { has_short, ..buffers });
    }

    /// Submits the first layers early, so that the GPU starts while the CPU encodes the rest. Later submissions are
    /// larger, so that there are fewer pauses. If experts are read during the pass, the wait for each layer's router
    /// submits the work anyway.
    fn begin_layers(&mut self, streams: bool) {
        self.layers = 0;
        self.next_submit = if streams { usize::MAX } else { FIRST_SUBMIT };
        self.submit_step = FIRST_SUBMIT;
    }

    fn end_layer(&mut self) -> Result<(), DeviceError> {
        self.layers += 1;
        if self.layers == self.next_submit {
            self.flush()?;
            self.submit_step *= 2;
            self.next_submit += self.submit_step;
        }
        Ok(())
    }

    fn set_skip_flag(&mut self, flag: Option<Region>) {
        self.skip_flag = flag;
    }

    fn launches(&mut self) -> u64 {
        self.launches
    }

    fn read(&mut self, from: Region, into: &mut [u8]) -> Result<(), DeviceError> {
        let from = from.first(into.len());
        self.wait_for_conflicts(from, BufferAccess::Read)?;
        let from = self.resolve(from);
        let done = self.gpu.read(from, into);
        self.record(done)
    }

    fn write(&mut self, to: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = to.first(bytes.len());
        self.wait_for_conflicts(to, BufferAccess::Write)?;
        let to = self.resolve(to);
        let done = self.gpu.write(to, bytes);
        self.record(done)
    }

    fn copy(&mut self, from: Region, to: Region) -> Result<(), DeviceError> {
        // The bytes are copied by the CPU, so this waits until the GPU has written them.
        let mut bytes = vec![0; from.len];
        self.read(from, &mut bytes)?;
        self.write(to, &bytes)
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.check_failed()?;
        let done = self.gpu.commit();
        self.record(done)
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        let region = self.gpu.allocate(bytes)?;
        Ok(self.add(region))
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        let region = self.gpu.adopt(slab, range)?;
        Ok(self.add(region))
    }

    fn adopt_as(&mut self, buffer: ReservedBuffer, slab: &Arc<Slab>) -> Result<Region, DeviceError> {
        if self.buffers[buffer.number() as usize].is_some() {
            return refuse(format!("{buffer:?} is already adopted"));
        }
        let region = self.gpu.adopt(slab, 0..slab.len())?;
        Ok(self.place(buffer.number(), region))
    }

    fn adopt_segments(
        &mut self,
        table: ReservedBuffer,
        slab: &Arc<Slab>,
        segments: &[Range<usize>],
    ) -> Result<(Vec<Region>, Region), DeviceError> {
        let addresses = self.gpu.allocate(segments.len().max(1) * 8)?;
        let table = self.place(table.number(), addresses);
        let mut regions = Vec::with_capacity(segments.len());
        for (index, range) in segments.iter().enumerate() {
            let region = Region { buffer: self.buffers.len() as u32, offset: 0, len: range.len() };
            let slab = slab.clone();
            let range = range.clone();
            let entry = table.part(index * 8, 8);
            self.buffers.push(Some(region));
            self.segments.insert(region.buffer, Segment { slab, range, entry, device: None });
            if self.gpu.driver.has_own_memory() {
                // The segment is adopted now, so that loading fails if the device has too little memory.
                self.adopt_segment(region.buffer)?;
            }
            regions.push(region);
        }
        Ok((regions, table))
    }

    fn release_segment(&mut self, segment: Region) -> Result<(), DeviceError> {
        let Some((entry, device)) = self.segments.get(&segment.buffer).map(|held| (held.entry, held.device)) else {
            return Ok(());
        };
        let Some(buffer) = device else { return Ok(()) };
        self.write(entry, &[0; 8])?;
        self.gpu.release(buffer);
        self.owned.retain(|other| *other != buffer);
        // Forgets what was uploaded, so that the next expert in this segment is uploaded in any case.
        self.uploaded.retain(|region, _| region.buffer != segment.buffer);
        if let Some(segment) = self.segments.get_mut(&segment.buffer) {
            segment.device = None;
        }
        Ok(())
    }

    fn restore_segment(&mut self, segment: Region) -> Result<(), DeviceError> {
        if self.gpu.driver.has_own_memory() { self.adopt_segment(segment.buffer) } else { Ok(()) }
    }

    fn mark_loaded(&mut self, region: Region, content: u64) -> Result<(), DeviceError> {
        self.adopt_segment(region.buffer)?;
        if !self.gpu.driver.has_own_memory() || self.uploaded.get(&region) == Some(&content) {
            return Ok(());
        }
        self.check_failed()?;
        let on_device = self.resolve(region);
        let done = self.gpu.upload(on_device);
        self.in_flight.push((region, BufferAccess::Write, self.gpu.sync_point()));
        self.uploaded.insert(region, content);
        self.record(done)
    }

    fn keep_gpu_awake(&mut self) -> Result<(), DeviceError> {
        const WIDTH: usize = 64;
        let memory = self.gpu.allocate(3 * WIDTH * 4)?;
        self.owned.push(memory.buffer);
        let [x, w, y] = [0, 1, 2].map(|index| memory.rows(index, 1, WIDTH));
        self.awake = Some(rms_norm(1, WIDTH, 1e-6, x, w, y));
        Ok(())
    }

    fn max_buffer_len(&self) -> usize {
        self.gpu.driver.max_buffer_len()
    }
}

impl<D: Driver> Timeline for GpuBackend<D> {
    fn sync_point(&mut self) -> SyncPoint {
        self.gpu.sync_point()
    }

    fn completed(&mut self) -> SyncPoint {
        self.gpu.completed()
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        let done = self.gpu.wait_for(point);
        self.in_flight.retain(|(.., until)| *until > point);
        if done.is_err() {
            self.uploaded.clear();
        }
        // An earlier launch's error is reported first.
        self.failed.take().map_or(done, |why| Err(DeviceError::Failed(why)))
    }

    fn begin_disk_wait(&mut self) -> Option<Duration> {
        self.awake.as_ref().map(|_| AWAKE_INTERVAL)
    }

    fn stay_awake(&mut self) {
        let is_idle = self.failed.is_none() && self.gpu.completed() >= self.gpu.sync_point();
        if let Some(launch) = self.awake.as_ref().filter(|_| is_idle) {
            let done = self.gpu.launch(launch).and_then(|()| self.gpu.commit());
            // The next operation returns the error.
            let _ = self.record(done);
        }
    }
}
