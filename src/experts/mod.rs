//! Experts in memory: bytes on disk to bytes in slots. It knows no mathematics and never sees a tensor.
//!
//! * [`layout`]: where an expert's bytes lie on disk and where each lands in a slot.
//! * [`slots`] is the table: which expert is in which slot, who is pinned, who has to go; [`heat`] says who is wanted.
//! * [`reader`] is the pool of threads that reads a [`source`] straight into slots; [`probe`] picks how.
//! * [`prefetch`] judges whether reading ahead pays; [`warm`] remembers what was hot when the server stopped.
//!
//! A [`Store`] belongs to the thread that owns the model. Its table needs no lock: reader threads never see it, they get
//! a slot to fill and say when they are done.

pub mod heat;
pub mod layout;
pub mod prefetch;
pub mod probe;
pub mod reader;
mod routed;
pub mod slots;
pub mod source;
mod sums;
mod trace;
pub mod warm;

pub use heat::Choice;
pub use layout::{ExpertMap, LayerExperts, PIECES, Piece};
pub use prefetch::Prefetch;
pub use probe::Io;
pub use routed::{Batch, Landed, Routed};
pub use slots::SlotId;
pub use source::{Files, Source};
pub use sums::{Records, Sums};
pub use warm::Warm;

use crate::{
    device::Slab,
    error::StoreError,
    metrics::Metrics,
    platform::{Access, os},
};
use heat::{Heat, Key};
use layout::Layout;
use prefetch::Ahead;
use reader::{Done, Failure, Reader};
use slots::{Claim, Place, Reason, Slots};
use std::{cell::RefCell, ops::Range, path::PathBuf, sync::Arc, time::Instant};

/// What a route is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Many tokens: nearly every expert of the layer is wanted once, possibly more than there are slots.
    Prefill,
    /// One token, or the few of a draft: every expert stays in its slot until the layer is done.
    Decode,
}

/// How a store is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Experts held in memory; as many as the model has (or more) is *resident*.
    pub slots: usize,
    pub io: Io,
    /// Reads in flight at most.
    pub threads: usize,
    pub prefetch: Prefetch,
    /// Where the list of hot experts is kept, if it is.
    pub warm: Option<Warm>,
    /// Writes every route to this file, one line each: the input of `benches/expert_cache.rs`.
    pub trace: Option<PathBuf>,
    /// What each record of a pack has to be; `None` for a checkpoint's own files.
    pub sums: Option<Arc<Sums>>,
}

impl Options {
    /// Everything automatic, nothing kept on disk.
    pub fn new(slots: usize) -> Self {
        Self { slots, io: Io::Auto, threads: 16, prefetch: Prefetch::Auto, warm: None, trace: None, sums: None }
    }
}

/// The experts of one model.
pub struct Store {
    map: ExpertMap,
    /// Most experts in one layer: the stride of keys.
    experts: usize,
    resident: bool,
    access: Access,
    slot_bytes: usize,
    slab: Arc<Slab>,
    reader: Reader,
    metrics: Arc<Metrics>,
    warm: Option<Warm>,
    state: RefCell<State>,
}

/// What changes while serving.
struct State {
    slots: Slots,
    heat: Heat,
    ahead: Ahead,
    /// Where each slot's pieces are, from the start of the slot.
    spans: Vec<[Range<usize>; PIECES]>,
    /// Occupations whose reads failed while somebody had them pinned.
    failed: Vec<(Place, Key, Failure)>,
    /// The layer whose heat the model has noted itself.
    noted: Option<usize>,
    trace: Option<trace::Trace>,
    done: Vec<Done>,
    spare: Vec<routed::Scratch>,
    /// When the hot list was last written.
    saved: Instant,
}

impl Store {
    /// Opens a checkpoint's shards. Fails if one of them is shorter than `map` says.
    pub fn open(
        files: Vec<PathBuf>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let (files, access) = probe::open(&files, &map, options.io, options.threads)?;
        let files = files.with_sums(options.sums.clone());
        let mut store = Self::with_source(Box::new(files), map, options, metrics)?;
        store.access = access;
        Ok(store)
    }

    /// A store that reads from `source`: for tests that make reads fail.
    pub fn with_source(
        source: Box<dyn Source>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        check_sizes(source.as_ref(), &map)?;
        let experts = map.layers.iter().map(Vec::len).max().unwrap_or(0);
        let total = map.experts();
        let slots = options.slots.min(total);
        if slots == 0 && total > 0 {
            return Err(StoreError::Other("no memory for even one expert".into()));
        }
        let slot_bytes = map.slot_bytes(source.block());
        let other = |what: &str, error: std::io::Error| StoreError::Other(format!("{what}: {error}"));
        let slab = slots.checked_mul(slot_bytes).map(Slab::new);
        let slab = slab.unwrap_or_else(|| Err(std::io::ErrorKind::OutOfMemory.into()));
        let slab = Arc::new(slab.map_err(|error| other(&format!("{slots} slots of {slot_bytes} bytes"), error))?);
        let reader = Reader::new(source, slab.clone(), slots, slot_bytes, options.threads, metrics.clone());
        let reader = reader.map_err(|error| other("starting the threads that read experts", error))?;
        let trace = options.trace.as_deref().map(trace::Trace::create).transpose()?;
        metrics.expert_slots.set(slots as i64);
        let state = State {
            slots: Slots::new(slots, map.layers.len() * experts),
            heat: Heat::new(map.layers.len(), experts),
            ahead: Ahead::new(options.prefetch, slots, slot_bytes),
            spans: vec![std::array::from_fn(|_| 0..0); slots],
            failed: Vec::new(),
            noted: None,
            saved: Instant::now(),
            trace,
            done: Vec::new(),
            spare: Vec::new(),
        };
        Ok(Self {
            resident: slots == total,
            access: Access::Buffered,
            map,
            experts,
            slot_bytes,
            slab,
            reader,
            metrics,
            warm: options.warm,
            state: RefCell::new(state),
        })
    }

    /// Every expert has a slot of its own.
    pub fn is_resident(&self) -> bool {
        self.resident
    }

    /// How the files are read.
    pub fn access(&self) -> Access {
        self.access
    }

    pub fn slots(&self) -> usize {
        self.state.borrow().slots.len()
    }

    /// Bytes from one slot to the next.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The memory all slots lie in: slot `n` starts at `n * slot_bytes()`.
    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Where the pieces of an expert lie in whichever slot it is in; `None` if there is no such expert.
    pub fn spans(&self, layer: usize, expert: u32) -> Option<[Range<usize>; PIECES]> {
        let pieces = self.map.layers.get(layer)?.get(expert as usize)?;
        Some(Layout::new(pieces, self.reader.source().block()).spans)
    }

    /// The slot an expert is in now. It stays there if the store [is resident](Store::is_resident) and filled.
    pub fn slot_of(&self, layer: usize, expert: u32) -> Option<SlotId> {
        let key = self.key(layer, expert)?;
        self.state.borrow().slots.find(key).map(|place| place.slot)
    }

    /// Reads in what can be known to be wanted. Resident: every expert, before this returns; `progress` gets bytes read
    /// and bytes in all. Streaming: the hot list of the last run, in the background, after the slots' memory has been
    /// committed. Without this call experts arrive as they are asked for.
    pub fn fill(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), StoreError> {
        if !self.resident {
            self.slab.commit(os::physical_cores());
            self.read_in_hot();
            return Ok(());
        }
        let all: Vec<Key> = (0..self.map.layers.len() * self.experts)
            .map(|key| key as Key)
            .filter(|&key| self.pieces_of(key).is_some())
            .collect();
        let total = self.map.bytes();
        let mut bytes = 0;
        let state = &mut *self.state.borrow_mut();
        for &key in &all {
            if let Some(claim) = state.slots.claim(key, Reason::Demand, &state.heat) {
                // Pinned for good: never evicted, and a failure is kept for us to find.
                state.slots.pin(claim.place);
                self.send(state, key, claim.place, Reason::Demand);
            }
        }
        while state.slots.loading() > 0 {
            self.reader.wait();
            self.reader.collect(&mut state.done);
            let landed = state.done.iter().filter(|done| done.failure.is_none());
            bytes += landed.map(|done| self.bytes_of(state.slots.key(done.place))).sum::<u64>();
            self.settle(state);
            progress(bytes, total);
        }
        match state.failed.pop() {
            Some((_, key, failure)) => Err(self.name(failure, key)),
            None => Ok(()),
        }
    }

    /// Says what the router made of the tokens that [`Store::route`] will be called for next. Without this a decode route
    /// counts each of its experts once, and a prefill route teaches nothing.
    pub fn note(&self, layer: usize, choice: Choice<'_>) {
        if self.resident {
            return;
        }
        let mut state = self.state.borrow_mut();
        if let Some(trace) = &mut state.trace {
            trace.note(layer, &choice);
        }
        state.heat.visit(layer, choice);
        state.noted = Some(layer);
    }

    /// Whether [`Store::read_ahead`] would do anything: predicting costs time, too.
    pub fn wants_prediction(&self) -> bool {
        !self.resident && self.state.borrow().ahead.is_on()
    }

    /// These experts of `layer` will probably be asked for next. They are read when nothing more urgent is left, likely
    /// ones first, until the byte budget is used up.
    pub fn read_ahead(&self, layer: usize, experts: &[u32]) {
        if !self.wants_prediction() {
            return;
        }
        let state = &mut *self.state.borrow_mut();
        self.reader.collect(&mut state.done);
        self.settle(state);
        for &expert in experts {
            let Some(key) = self.key(layer, expert) else { continue };
            if state.slots.find(key).is_some() {
                continue;
            }
            if !state.ahead.has_room() {
                break;
            }
            let Some(claim) = state.slots.claim(key, Reason::Ahead, &state.heat) else { break };
            self.count_eviction(&claim);
            state.ahead.sent(layer, claim.place);
            self.send(state, key, claim.place, Reason::Ahead);
        }
    }

    fn key(&self, layer: usize, expert: u32) -> Option<Key> {
        self.map.layers.get(layer)?.get(expert as usize)?;
        Some((layer * self.experts) as Key + expert)
    }

    fn pieces_of(&self, key: Key) -> Option<&[Piece; PIECES]> {
        let (layer, expert) = (key as usize / self.experts, key as usize % self.experts);
        self.map.layers.get(layer)?.get(expert)
    }

    fn bytes_of(&self, key: Option<Key>) -> u64 {
        let pieces = key.and_then(|key| self.pieces_of(key));
        pieces.map_or(0, |pieces| pieces.iter().map(|piece| piece.len as u64).sum())
    }

    /// Sets the reader to work on a claimed slot.
    fn send(&self, state: &mut State, key: Key, place: Place, reason: Reason) {
        let Some(pieces) = self.pieces_of(key) else { return };
        let layout = Layout::new(pieces, self.reader.source().block());
        if let Some(spans) = state.spans.get_mut(place.slot.index()) {
            spans.clone_from(&layout.spans);
        }
        match reason {
            Reason::Demand => self.reader.demand(place, layout),
            _ => self.reader.later(place, layout),
        }
        self.metrics.expert_slots_used.set(state.slots.used() as i64);
    }

    /// Enters what the reader has finished into the table.
    fn settle(&self, state: &mut State) {
        let mut done = std::mem::take(&mut state.done);
        for Done { place, failure } in done.drain(..) {
            let Some(failure) = failure else {
                state.slots.landed(place);
                continue;
            };
            let Some(key) = state.slots.key(place) else { continue };
            state.ahead.forget(place);
            if state.slots.pins(place) > 0 {
                state.failed.push((place, key, failure));
            } else {
                tracing::warn!(error = %self.name(failure, key), "an expert could not be read ahead");
            }
            state.slots.vacate(place);
        }
        state.done = done;
        self.metrics.expert_slots_used.set(state.slots.used() as i64);
    }

    fn count_eviction(&self, claim: &Claim) {
        if claim.evicted.is_some() {
            self.metrics.expert_evictions.inc();
        }
        if claim.unused {
            self.metrics.prefetches_wasted.inc();
        }
    }

    fn name(&self, failure: Failure, key: Key) -> StoreError {
        let Failure { file, offset, len, source } = failure;
        let file = self.reader.source().path(file);
        let (layer, expert) = (key as usize / self.experts, key as usize % self.experts);
        StoreError::Read { layer, expert, file, offset, len, source }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.save_hot_or_warn();
    }
}

/// No shard may be shorter than what is expected of it.
fn check_sizes(source: &dyn Source, map: &ExpertMap) -> Result<(), StoreError> {
    for (layer, experts) in map.layers.iter().enumerate() {
        for (expert, pieces) in experts.iter().enumerate() {
            for piece in pieces.iter().filter(|piece| piece.len > 0) {
                let end = piece.offset.saturating_add(piece.len as u64);
                let size = source.size(piece.file);
                if size.is_none_or(|size| end > size) {
                    return Err(StoreError::NotACheckpoint {
                        path: source.path(piece.file),
                        why: format!(
                            "layer {layer}, expert {expert} ends at byte {end}, the file at byte {}: truncated?",
                            size.unwrap_or(0)
                        ),
                    });
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
