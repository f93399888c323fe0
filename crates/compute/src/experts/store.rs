//! [`ExpertStore`]: holds the experts of one model in slots of one slab.

use super::{
    choice::{ExpertChoice, PassSize},
    eviction::{EvictionScores, ExpertKey},
    layer_hits::LayerHits,
    memory_pressure::{MemoryPressure, SlotChange, SlotCounts},
    pending::PendingExperts,
    prefetch::{Prefetch, Prefetcher},
    read_plan::{ExpertMap, PIECES, Piece, ReadPlan},
    reader::{ExpertReader, ReadFailure},
    released_memory::ReleasedMemory,
    slot_layout::{SEGMENT_BYTES, SlotLayout},
    slot_table::{ReadReason, SlotClaim, SlotId, SlotState, SlotTable},
    source::{ExpertSource, PackRecords, ReadMode, ShardFiles},
    warm_start::{SAVE_INTERVAL, WarmStart},
};
use crate::device::{CpuTimeline, DeviceError, Slab, SyncPoint, Timeline};
use moestro_base::{
    error::StoreError,
    metrics::{ExpertHeatmap, Metrics},
    platform::{
        Access,
        os::{self, MemoryLevel},
    },
};
use std::{
    cell::{Cell, RefCell},
    io,
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

/// Options of the expert store.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of experts held in memory. If all experts of the model fit, the model is *resident*.
    pub slots: usize,
    /// Minimum number of slots to keep when the system is short of memory.
    pub min_slots: usize,
    pub io: ReadMode,
    /// Maximum number of concurrent reads.
    pub threads: usize,
    pub prefetch: Prefetch,
    /// File of the list of hot experts, and identity of the model. `None` disables the warm start.
    pub warm_start: Option<WarmStart>,
    /// The records of the pack, if the files are a pack. `None` for the shards of a checkpoint.
    pub pack_records: Option<Arc<PackRecords>>,
    /// Maximum size of a segment of the slab in bytes. See [`SlotLayout`].
    pub segment_bytes: usize,
}

impl Options {
    /// Default options, without a warm start.
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            min_slots: slots,
            io: ReadMode::Auto,
            threads: 16,
            prefetch: Prefetch::Auto,
            warm_start: None,
            pack_records: None,
            segment_bytes: SEGMENT_BYTES,
        }
    }
}

/// Called at the start of every fetch with the layer, the router's choice and the size of the pass.
pub type FetchObserver = Box<dyn FnMut(usize, &ExpertChoice<'_>, PassSize) + Send>;

/// A device that may use segments of the slab as buffers.
pub trait SlotDevice: Timeline {
    /// Waits until no pass reads a slot. A pass may be submitted ahead while all experts are resident.
    fn finish_passes(&mut self) {}

    /// Releases the device's buffer for a segment whose slots are all empty. When an expert is read into the segment,
    /// the device creates the buffer again.
    ///
    /// # Errors
    /// The device failed and may still use the segment's memory.
    fn release_segment(&mut self, _segment: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called before experts are read into the slots of a segment that was released. A device with its own memory
    /// allocates the segment's buffer.
    ///
    /// # Errors
    /// The device has too little memory.
    fn restore_segment(&mut self, _segment: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl SlotDevice for CpuTimeline {}

/// The experts of one model.
pub struct ExpertStore {
    pub(super) map: ExpertMap,
    /// The largest number of experts in a layer. Expert keys are `layer * experts + expert`.
    experts: usize,
    is_resident: Cell<bool>,
    access: Access,
    pub(super) layout: SlotLayout,
    /// True if a device uses segments as buffers, so that only whole segments can be released.
    whole_segments: Cell<bool>,
    pub(super) slab: Arc<Slab>,
    pub(super) reader: ExpertReader,
    pub metrics: Arc<Metrics>,
    pub(super) heatmap: Arc<ExpertHeatmap>,
    warm_start: Option<WarmStart>,
    pub(super) state: RefCell<StoreState>,
}

/// The parts of the store that change while serving.
pub(super) struct StoreState {
    pub slots: SlotTable,
    pub scores: EvictionScores,
    pub prefetcher: Prefetcher,
    pub layer_hits: LayerHits,
    /// Range of each piece of each slot's expert, in bytes from the start of the slot.
    pub spans: Vec<[Range<usize>; PIECES]>,
    pub observer: Option<FetchObserver>,
    pub spare_pending: Vec<PendingExperts>,
    /// Time at which the list of hot experts was last written.
    pub saved: Instant,
    pub pressure: MemoryPressure,
    pub released: ReleasedMemory,
}

impl ExpertStore {
    /// Opens the shards of a checkpoint, or the files of a pack. Fails if a file ends before one of the pieces in
    /// `map`.
    pub fn open(
        files: Vec<PathBuf>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let (files, access) = ShardFiles::open_as(&files, options.io, options.pack_records.is_some())?;
        let files = files.with_records(options.pack_records.clone());
        let mut store = Self::with_source(Box::new(files), map, options, metrics)?;
        store.access = access;
        Ok(store)
    }

    /// Opens a store that reads from `source`. Tests inject read errors through `source`.
    pub fn with_source(
        source: Box<dyn ExpertSource>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        ShardFiles::check_sizes(source.as_ref(), &map)?;
        let experts = map.layers.iter().map(Vec::len).max().unwrap_or(0);
        let total = map.experts();
        let slots = options.slots.min(total);
        if slots == 0 && total > 0 {
            return Err(StoreError::Memory("no memory for even one expert".into()));
        }
        let slot_bytes = map.slot_bytes(source.block());
        let layout = SlotLayout::new(slots, slot_bytes, options.segment_bytes);
        let slab = layout.ok_or_else(|| io::ErrorKind::OutOfMemory.into());
        let slab = slab.and_then(|layout| Ok((Slab::new(layout.len())?, layout)));
        let what = format!("cannot allocate {slots} expert slots of {slot_bytes} bytes");
        let (slab, layout) = slab.map_err(|error: io::Error| StoreError::Memory(format!("{what}: {error}")))?;
        let slab = Arc::new(slab);
        let table = SlotTable::new(slots, map.layers.len() * experts);
        let reader =
            ExpertReader::new(source, slab.clone(), table.states().clone(), layout, options.threads, metrics.clone());
        let reader =
            reader.map_err(|error| StoreError::Other(format!("cannot start the expert reader threads: {error}")))?;
        metrics.expert_slots.set(slots as i64);
        let states = table.states().clone();
        let in_memory = move || states.readable_experts().map(|key| key as usize).collect();
        let heatmap = metrics.new_heatmap(map.layers.len(), experts, in_memory);
        let state = StoreState {
            slots: table,
            scores: EvictionScores::new(map.layers.len(), experts),
            prefetcher: Prefetcher::new(options.prefetch, slots, slot_bytes),
            layer_hits: LayerHits::new(map.layers.len()),
            spans: vec![std::array::from_fn(|_| 0..0); slots],
            saved: Instant::now(),
            pressure: MemoryPressure::new(options.min_slots),
            released: ReleasedMemory::default(),
            observer: None,
            spare_pending: Vec::new(),
        };
        Ok(Self {
            is_resident: Cell::new(slots == total),
            access: Access::Buffered,
            map,
            experts,
            layout,
            whole_segments: Cell::new(false),
            slab,
            reader,
            metrics,
            heatmap,
            warm_start: options.warm_start,
            state: RefCell::new(state),
        })
    }

    /// True if the files are a pack.
    pub fn is_packed(&self) -> bool {
        self.reader.source().pack_records().is_some()
    }

    /// The access mode of the files.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Size of a slot in bytes.
    pub fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// The positions of slots and segments in the slab.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// If `on`, memory is released to the system in whole segments only. Required if a device uses segments as buffers.
    pub fn release_whole_segments(&self, on: bool) {
        self.whole_segments.set(on);
    }

    /// The memory of all slots.
    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Range of each piece of an expert, in bytes from the start of its slot. `None` if the expert does not exist.
    pub fn spans(&self, layer: usize, expert: u32) -> Option<[Range<usize>; PIECES]> {
        let pieces = self.map.layers.get(layer)?.get(expert as usize)?;
        Some(ReadPlan::new(pieces, self.reader.source().block()).spans)
    }

    /// The slot of an expert. While the model is [resident](ExpertStore::is_resident), the slot does not change after
    /// [`ExpertStore::fill`].
    pub fn slot_of(&self, layer: usize, expert: u32) -> Option<SlotId> {
        let key = self.key(layer, expert)?;
        self.state.borrow().slots.find(key)
    }

    /// True if every expert has its own slot.
    pub fn is_resident(&self) -> bool {
        self.is_resident.get()
    }

    /// Current number of slots. Memory pressure reduces the number of slots.
    pub fn slots(&self) -> usize {
        self.state.borrow().slots.len()
    }

    /// Calls `observer` at the start of every fetch from now on.
    pub fn observe(&self, observer: FetchObserver) {
        self.state.borrow_mut().observer = Some(observer);
    }

    /// Reads experts before the first request.
    ///
    /// If the model is resident, reads every expert before it returns, and calls `progress` with the bytes read and the
    /// total bytes. Otherwise commits the memory of the slots, and starts to read the hot experts of the last run in
    /// the background.
    pub fn fill(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), StoreError> {
        if !self.is_resident() {
            self.slab.commit_pages(os::physical_cores());
            self.read_hot_experts();
            return Ok(());
        }
        let all: Vec<ExpertKey> = (0..self.map.layers.len() * self.experts)
            .map(|key| key as ExpertKey)
            .filter(|&key| self.pieces_of(key).is_some())
            .collect();
        let state = &mut *self.state.borrow_mut();
        let mut sent = Vec::with_capacity(all.len());
        for key in all {
            // `claim` pins the expert and no code unpins it, so the expert is never evicted.
            if let Some(claim) = state.slots.claim(key, ReadReason::Demand, &state.scores) {
                self.start_read(state, key, claim.slot, ReadReason::Demand);
                sent.push((key, claim.slot));
            }
        }
        let mut bytes = 0;
        for (key, slot) in sent {
            loop {
                let seen = self.reader.finished();
                match state.slots.state(slot) {
                    SlotState::Ready => break,
                    SlotState::Failed => return Err(self.read_error(state, slot)),
                    SlotState::Damaged => self.start_read(state, key, slot, ReadReason::Demand),
                    _ => self.reader.wait(seen),
                }
            }
            bytes += self.pieces_of(key).map_or(0, |pieces| pieces.iter().map(|piece| piece.len as u64).sum());
            progress(bytes, self.map.bytes());
        }
        Ok(())
    }

    /// If `on`, a batch may contain experts whose checksums are still being verified. See [`ExpertFetch::next`].
    ///
    /// Turn this on only for devices that complete an operation before the call returns. Another device could still
    /// read a slot while the reader corrects the slot's bytes.
    ///
    /// [`ExpertFetch::next`]: super::ExpertFetch::next
    pub fn verify_in_background(&self, on: bool) {
        self.reader.verify_in_background(on);
    }

    /// True if [`ExpertStore::prefetch`] has an effect. If false, the caller can skip the prediction.
    pub fn wants_prefetch(&self, size: PassSize) -> bool {
        !self.is_resident() && self.state.borrow().prefetcher.is_on(size)
    }

    /// Prefetches experts that `layer` will probably need next. `guess` lists the predicted experts of all rows.
    /// Experts that are predicted for more rows come first. Among experts predicted for equally many rows, the order of
    /// `guess` is kept. Stops when the byte budget is used up.
    pub fn prefetch(&self, layer: usize, guess: &[u32], size: PassSize) {
        if !self.wants_prefetch(size) {
            return;
        }
        let state = &mut *self.state.borrow_mut();
        let mut likely: Vec<(u32, usize)> = Vec::with_capacity(guess.len());
        likely.extend(guess.iter().enumerate().map(|(at, &expert)| (expert, at)));
        likely.sort_unstable();
        let ranked = likely.chunk_by(|a, b| a.0 == b.0).filter_map(|same| {
            let &(expert, first) = same.first()?;
            Some((std::cmp::Reverse(same.len()), first, expert))
        });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_unstable();
        for (.., expert) in ranked {
            let Some(key) = self.key(layer, expert) else { continue };
            if state.slots.find(key).is_some() {
                continue;
            }
            if !state.prefetcher.has_budget() {
                break;
            }
            let Some(claim) = state.slots.claim(key, ReadReason::Prefetch, &state.scores) else { break };
            self.count_eviction(&claim);
            state.prefetcher.add(layer, claim.slot);
            self.start_read(state, key, claim.slot, ReadReason::Prefetch);
        }
    }

    pub(super) fn key(&self, layer: usize, expert: u32) -> Option<ExpertKey> {
        self.map.layers.get(layer)?.get(expert as usize)?;
        Some((layer * self.experts) as ExpertKey + expert)
    }

    fn pieces_of(&self, key: ExpertKey) -> Option<&[Piece; PIECES]> {
        let layer = key as usize / self.experts;
        let expert = key as usize % self.experts;
        self.map.layers.get(layer)?.get(expert)
    }

    /// Queues the reads that fill a claimed slot.
    pub(super) fn start_read(&self, state: &mut StoreState, key: ExpertKey, slot: SlotId, reason: ReadReason) {
        let Some(pieces) = self.pieces_of(key) else { return };
        let plan = ReadPlan::new(pieces, self.reader.source().block());
        if let Some(spans) = state.spans.get_mut(slot.index()) {
            spans.clone_from(&plan.spans);
        }
        match reason {
            ReadReason::Demand => self.reader.read_now(slot, plan),
            ReadReason::Prefetch | ReadReason::WarmStart => self.reader.read_later(slot, plan),
        }
        self.metrics.expert_slots_used.set(state.slots.used() as i64);
    }

    pub(super) fn count_eviction(&self, claim: &SlotClaim) {
        if claim.evicted.is_some() {
            self.metrics.expert_evictions.inc();
        }
        if claim.was_wasted {
            self.metrics.prefetches_wasted.inc();
        }
    }

    /// The error of the last read into this slot.
    pub(super) fn read_error(&self, state: &StoreState, slot: SlotId) -> StoreError {
        let key = state.slots.key(slot).unwrap_or_default() as usize;
        let layer = key / self.experts;
        let expert = key % self.experts;
        match self.reader.take_failure(slot) {
            Some(ReadFailure { file, offset, len, source }) => {
                StoreError::Read { layer, expert, file: self.reader.source().path(file), offset, len, source }
            }
            None => StoreError::Other(format!("cannot read layer {layer}, expert {expert}")),
        }
    }

    /// Saves the list of experts in memory, hottest first. A failure is only logged.
    fn save_hot_experts(&self, state: &StoreState) {
        let Some(warm_start) = self.warm_start.as_ref().filter(|_| !self.is_resident() && state.slots.used() > 0)
        else {
            return;
        };
        let ready = state.slots.in_state(SlotState::Ready);
        let mut hot: Vec<(f32, ExpertKey)> = ready.map(|(key, _)| (state.scores.score(key), key)).collect();
        hot.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let stride = self.experts as u32;
        let experts = hot.iter().map(|&(score, key)| ((key / stride) as usize, key % stride, score)).collect();
        if let Err(error) = warm_start.save(experts) {
            tracing::warn!(%error, file = %warm_start.file.display(), "cannot save the list of hot experts");
        }
    }

    /// Saves the list of experts in memory, at most once per [`SAVE_INTERVAL`].
    pub(super) fn save_hot_experts_if_due(&self, state: &mut StoreState) {
        if self.warm_start.is_some() && state.saved.elapsed() >= SAVE_INTERVAL {
            state.saved = Instant::now();
            self.save_hot_experts(state);
        }
    }

    /// Queues background reads of the hot experts of the last run, until no slot is free.
    fn read_hot_experts(&self) {
        let Some(warm_start) = &self.warm_start else { return };
        let state = &mut *self.state.borrow_mut();
        for (layer, expert, score) in warm_start.load() {
            let Some(key) = self.key(layer, expert) else { continue };
            if state.slots.used() == state.slots.len() {
                break;
            }
            state.scores.set_prior(key, score);
            if let Some(claim) = state.slots.claim(key, ReadReason::WarmStart, &state.scores) {
                self.start_read(state, key, claim.slot, ReadReason::WarmStart);
            }
        }
    }

    /// Records that the device is lost and no longer reads any slot. Slots that waited for the device's sync points
    /// become reusable.
    pub fn device_lost(&self) {
        self.state.borrow_mut().slots.advance(SyncPoint(u64::MAX));
    }

    /// Checks the system's memory at most once per 250 ms, and releases or restores slots. Returns true if memory is
    /// short.
    ///
    /// Called between two forward passes. `device` may still compute a pass ahead if all experts are resident.
    pub fn adapt_to_memory(&self, device: &mut dyn SlotDevice) -> bool {
        let now = Instant::now();
        let level = self.state.borrow_mut().pressure.check(now);
        let Some(level) = level else { return false };
        let has_released = self.adapt_to_level(level, now, device);
        self.state.borrow_mut().pressure.schedule(now, has_released);
        matches!(level, MemoryLevel::Short(_))
    }

    /// Releases or restores slots according to `level`. Returns true if slots were released.
    pub fn adapt_to_level(&self, level: MemoryLevel, now: Instant, device: &mut dyn SlotDevice) -> bool {
        let state = &mut *self.state.borrow_mut();
        state.slots.advance(device.completed());
        self.release_again(state);
        let SlotLayout { slots: all, slot_bytes, per_segment, .. } = self.layout;
        let step = if self.whole_segments.get() { per_segment } else { 1 };
        let counts = SlotCounts { present: state.slots.len(), used: state.slots.used(), all, step };
        match state.pressure.decide(level, now, counts, slot_bytes) {
            SlotChange::None => false,
            SlotChange::Shrink { to, is_logged } => {
                let has_released = self.release_slots(state, to, step, device);
                if has_released && is_logged {
                    tracing::warn!(slots = state.slots.len(), of = all, "memory is short: releasing expert slots");
                }
                has_released
            }
            SlotChange::Grow { to } => {
                if let Err(error) = self.restore_slots(state, to, device) {
                    tracing::warn!(%error, "cannot allocate the memory of expert slots again; trying later");
                    state.pressure.delay_restore(now);
                } else if to == all {
                    tracing::info!(slots = all, "memory is no longer short: all expert slots are restored");
                }
                false
            }
        }
    }

    fn release_slots(&self, state: &mut StoreState, to: usize, step: usize, device: &mut dyn SlotDevice) -> bool {
        let before = state.slots.len();
        if self.is_resident.replace(false) {
            device.finish_passes();
            // Remove the permanent pins of a resident model.
            let ready: Vec<SlotId> = state.slots.in_state(SlotState::Ready).map(|(_, slot)| slot).collect();
            ready.into_iter().for_each(|slot| state.slots.unpin(slot, SyncPoint::START, &state.scores));
        }
        let shrunk = state.slots.shrink(to, step, &state.scores);
        for (from, into) in shrunk.moved {
            let spans = state.spans.get(from.index()).cloned();
            if let (Some(spans), Some(at)) = (spans, state.spans.get_mut(into.index())) {
                *at = spans;
            }
            let at = |slot: SlotId| self.layout.range(slot.index()..slot.index() + 1);
            // SAFETY: the table moved an expert from the first slot to the second. The first slot was unpinned, no
            // reader filled it, and the device had completed its sync points. The second slot was free. So there is no
            // other reference to either slot.
            let (from, into) = unsafe { (self.slab.bytes(at(from)), self.slab.bytes_mut(at(into))) };
            into.copy_from_slice(from);
        }
        self.metrics.expert_evictions.inc_by(shrunk.evicted as u64);
        self.metrics.prefetches_wasted.inc_by(shrunk.wasted as u64);
        let left = state.slots.len();
        self.update_slot_metrics(state);
        if left == before {
            return false;
        }
        self.metrics.memory_pressure.inc();
        let released = self.release_memory(state, left..before, device);
        if let Err(error) = released {
            tracing::warn!(%error, "cannot return the memory of expert slots to the system");
        }
        true
    }

    /// Releases the memory of empty slots to the system. The device's buffers are released first, because the pages
    /// stay in use as long as the buffers exist.
    fn release_memory(
        &self,
        state: &mut StoreState,
        slots: Range<usize>,
        device: &mut dyn SlotDevice,
    ) -> io::Result<()> {
        let bytes = self.layout.start(slots.start)..self.layout.start(slots.end);
        if self.whole_segments.get() {
            state.released.add(bytes.clone(), os::wired_memory());
            let mut segments = self.layout.segments_of(slots.clone());
            segments.try_for_each(|segment| device.release_segment(segment)).map_err(io::Error::other)?;
        }
        // SAFETY: the table assigns these slots no expert until they are restored, and no device uses them.
        unsafe { self.slab.release_pages(bytes) }
    }

    /// Releases memory again that a device may have kept in use at the last release.
    fn release_again(&self, state: &mut StoreState) {
        for bytes in state.released.due(os::wired_memory) {
            // SAFETY: as in `release_memory`. The range has no slot that was restored.
            if let Err(error) = unsafe { self.slab.release_pages(bytes) } {
                tracing::debug!(%error, "cannot return the memory of expert slots to the system");
            }
        }
    }

    /// Restores slots until there are `to` slots. After an error, the slots of earlier segments are restored.
    fn restore_slots(&self, state: &mut StoreState, to: usize, device: &mut dyn SlotDevice) -> io::Result<()> {
        let slots = state.slots.len()..to;
        state.released.reuse_until(self.layout.start(to));
        self.slab.reuse_pages(self.layout.range(slots.clone()))?;
        let mut until = to;
        let mut done = Ok(());
        if self.whole_segments.get() {
            for segment in self.layout.segments_of(slots) {
                done = device.restore_segment(segment).map_err(io::Error::other);
                if done.is_err() {
                    until = segment * self.layout.per_segment;
                    break;
                }
            }
        }
        state.slots.grow(until);
        self.update_slot_metrics(state);
        done
    }

    fn update_slot_metrics(&self, state: &StoreState) {
        let slots = state.slots.len();
        let used = state.slots.used();
        self.metrics.expert_slots.set(slots as i64);
        self.metrics.expert_slots_used.set(used as i64);
        self.metrics.memory_experts.set((slots * self.layout.slot_bytes) as i64);
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.save_hot_experts(&self.state.borrow());
    }
}
