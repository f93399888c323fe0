//! Experts in memory: bytes on disk to bytes in slots. It knows no mathematics and never sees a tensor.
//!
//! One call a layer is the only way to an expert's weights, the same on every device:
//!
//! ```text
//! let mut asked = experts.ask(layer, &Choice { ids, k, logits }, phase, device)?;   hits are pinned, misses on their way
//! experts.read_ahead(layer + 1, &guess, phase);                                     after what is asked for
//! while let Some(batch) = asked.next(device)? {                                     hits at once, then what has landed
//!     for landed in batch.iter() { .. expert, slot, places, pieces .. }             encode, or compute
//!     batch.reads_until(device.sync_point());                                             behind the last reader of these slots
//! }
//! ```
//! There is one rule about slots: a slot may be filled again once the device has passed a mark that was set behind its last
//! reader. `device` is a [`Timeline`](crate::device::Timeline): the CPU ([`CpuTimeline`](crate::device::CpuTimeline)) has passed every mark; a GPU is asked.
//! A device that reads the slots of all batches together at a layer's end marks them there:
//! `asked.reads_until(device.sync_point())`. All experts of the layer then need a slot at once; with a mark a batch, any
//! number of slots will do. A place is `row * k + rank`: results belong to places, and places summed in rank order do
//! not tell what landed first.
//!
//! * [`slots`] draws the life of an expert, and is the table of who is in which slot; [`eviction`] scores who is wanted.
//! * [`layout`]: where an expert's bytes lie on disk and where each lands in a slot.
//! * [`reader`] is the pool of threads that reads a [`source`] straight into slots; [`probe`] picks how.
//! * [`prefetch`] judges whether reading ahead pays; [`warm`] remembers what was wanted when the server stopped.
//! * [`relief`] gives slots back while the system is short of memory.
//!
//! [`Experts`] belong to the thread that owns the model. The table needs no lock: reader threads see the states of slots and
//! nothing else of it.

mod asked;
pub mod eviction;
pub mod layout;
mod packed;
pub mod prefetch;
pub mod probe;
pub mod reader;
mod relief;
pub mod slots;
pub mod source;
mod trace;
pub mod warm;

pub use asked::{Asked, Batch, Landed};
pub use eviction::Choice;
pub use layout::{ExpertMap, LayerExperts, PIECES, Piece};
pub use packed::{Packed, Records};
pub use prefetch::Prefetch;
pub use probe::Io;
pub use slots::SlotId;
pub use source::{Files, Source};
pub use warm::Warm;

use crate::{
    device::Slab,
    error::StoreError,
    metrics::{Board, Metrics},
    platform::{Access, os},
};
use eviction::{Key, Scores};
use layout::Layout;
use prefetch::Ahead;
use reader::{Failure, Reader};
use slots::{Claim, Purpose, Slots, State};
use std::{
    cell::{Cell, RefCell},
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// The kind of pass that asks for experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A chunk of a prompt: nearly every expert of a layer is wanted, so reads are lined up a few at a time.
    Prefill,
    /// One token, or the few of a draft: whatever is missing is read at once.
    Decode,
}

/// Options of the store of experts.
#[derive(Debug, Clone)]
pub struct Options {
    /// Experts held in memory; as many as the model has (or more) is *resident*.
    pub slots: usize,
    /// So many are kept when the system runs short of memory.
    pub least: usize,
    pub io: Io,
    /// Reads in flight at most.
    pub threads: usize,
    pub prefetch: Prefetch,
    /// The list of hot experts, if one is kept.
    pub warm: Option<Warm>,
    /// Writes what every layer asks for to this file: the input of `benches/expert_cache.rs`.
    pub trace: Option<PathBuf>,
    /// The pack that the files are; `None` for a checkpoint's own files.
    pub packed: Option<Arc<Packed>>,
}

impl Options {
    /// Everything automatic, nothing kept on disk.
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            least: slots,
            io: Io::Auto,
            threads: 16,
            prefetch: Prefetch::Auto,
            warm: None,
            trace: None,
            packed: None,
        }
    }
}

/// The time between two pictures of the slots.
const DRAW: Duration = Duration::from_millis(500);

/// The experts of one model.
pub struct Experts {
    map: ExpertMap,
    /// Most experts in one layer: the stride of keys.
    experts: usize,
    resident: Cell<bool>,
    access: Access,
    slot_bytes: usize,
    slab: Arc<Slab>,
    reader: Reader,
    metrics: Arc<Metrics>,
    board: Arc<Board>,
    warm: Option<Warm>,
    live: RefCell<Live>,
}

/// State that changes while serving.
struct Live {
    slots: Slots,
    scores: Scores,
    ahead: Ahead,
    /// The bytes of each slot's pieces, from the start of the slot.
    spans: Vec<[Range<usize>; PIECES]>,
    trace: Option<trace::Trace>,
    spare: Vec<asked::Lists>,
    /// When the hot list was last written.
    saved: Instant,
    /// When the board was last brought up to date.
    drawn: Option<Instant>,
    relief: relief::Relief,
}

impl Experts {
    /// Opens a checkpoint's shards. Fails if one of them is shorter than `map` says.
    pub fn open(
        files: Vec<PathBuf>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let (files, access) = probe::open(&files, &map, options.io, options.threads)?;
        let files = files.with_packed(options.packed.clone());
        let mut experts = Self::with_source(Box::new(files), map, options, metrics)?;
        experts.access = access;
        Ok(experts)
    }

    /// Reads from `source`: for tests that make reads fail.
    pub fn with_source(
        source: Box<dyn Source>,
        map: ExpertMap,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        source::check_sizes(source.as_ref(), &map)?;
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
        let table = Slots::new(slots, map.layers.len() * experts);
        let reader =
            Reader::new(source, slab.clone(), table.states().clone(), slot_bytes, options.threads, metrics.clone());
        let reader = reader.map_err(|error| other("starting the threads that read experts", error))?;
        let trace = options.trace.as_deref().map(trace::Trace::create).transpose()?;
        metrics.expert_slots.set(slots as i64);
        let board = metrics.experts(map.layers.len(), experts);
        let live = Live {
            slots: table,
            scores: Scores::new(map.layers.len(), experts),
            ahead: Ahead::new(options.prefetch, slots, slot_bytes),
            spans: vec![std::array::from_fn(|_| 0..0); slots],
            saved: Instant::now(),
            drawn: None,
            relief: relief::Relief::new(options.least),
            trace,
            spare: Vec::new(),
        };
        Ok(Self {
            resident: Cell::new(slots == total),
            access: Access::Buffered,
            map,
            experts,
            slot_bytes,
            slab,
            reader,
            metrics,
            board,
            warm: options.warm,
            live: RefCell::new(live),
        })
    }

    /// The way in which the files are read.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Bytes from one slot to the next.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The memory all slots lie in: slot `n` starts at `n * slot_bytes()`.
    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// The bytes of an expert's pieces, from the start of its slot; `None` if there is no such expert.
    pub fn spans(&self, layer: usize, expert: u32) -> Option<[Range<usize>; PIECES]> {
        let pieces = self.map.layers.get(layer)?.get(expert as usize)?;
        Some(Layout::new(pieces, self.reader.source().block()).spans)
    }

    /// The slot an expert is in now. It stays there if all are [resident](Experts::is_resident) and filled.
    pub fn slot_of(&self, layer: usize, expert: u32) -> Option<SlotId> {
        let key = self.key(layer, expert)?;
        self.live.borrow().slots.find(key)
    }

    /// Reads in what can be known to be wanted. Resident: every expert, before this returns; `progress` gets bytes read
    /// and bytes in all. Streaming: the hot list of the last run, in the background, after the slots' memory has been
    /// committed. Without this call experts arrive as they are asked for.
    pub fn fill(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), StoreError> {
        if !self.is_resident() {
            self.slab.commit_pages(os::physical_cores());
            self.read_in_hot();
            return Ok(());
        }
        let all: Vec<Key> = (0..self.map.layers.len() * self.experts)
            .map(|key| key as Key)
            .filter(|&key| self.pieces_of(key).is_some())
            .collect();
        let live = &mut *self.live.borrow_mut();
        let mut sent = Vec::with_capacity(all.len());
        for key in all {
            // Pinned for good: never evicted.
            if let Some(claim) = live.slots.claim(key, Purpose::Demand, &live.scores) {
                self.send(live, key, claim.slot, Purpose::Demand);
                sent.push((key, claim.slot));
            }
        }
        let mut bytes = 0;
        for (key, slot) in sent {
            loop {
                let seen = self.reader.landed();
                match live.slots.state(slot) {
                    State::Ready => break,
                    State::Failed => return Err(self.failure(live, slot)),
                    State::Damaged => self.send(live, key, slot, Purpose::Demand),
                    _ => self.reader.wait(seen),
                }
            }
            bytes += self.pieces_of(key).map_or(0, |pieces| pieces.iter().map(|piece| piece.len as u64).sum());
            progress(bytes, self.map.bytes());
        }
        Ok(())
    }

    /// From now on experts may be handed out while their checksums are being compared; see [`Asked::next`]. For devices that
    /// have passed every mark: one that is late would go on reading a slot into which the right bytes come.
    pub fn check_beside(&self, on: bool) {
        self.reader.check_beside(on);
    }

    /// True if [`Experts::read_ahead`] would read: otherwise the caller need not spend time on a prediction.
    pub fn wants_prediction(&self, phase: Phase) -> bool {
        !self.is_resident() && self.live.borrow().ahead.is_on(phase)
    }

    /// `layer` will probably be asked for these experts next: some for each row, with repetitions. They are read when nothing
    /// more urgent is left, until the byte budget is used up: those of most rows first, else in the order given.
    pub fn read_ahead(&self, layer: usize, guess: &[u32], phase: Phase) {
        if !self.wants_prediction(phase) {
            return;
        }
        let live = &mut *self.live.borrow_mut();
        let mut likely: Vec<(u32, usize)> = Vec::with_capacity(guess.len());
        likely.extend(guess.iter().enumerate().map(|(place, &expert)| (expert, place)));
        likely.sort_unstable();
        let ranked = likely.chunk_by(|a, b| a.0 == b.0).filter_map(|same| {
            let &(expert, first) = same.first()?;
            Some((std::cmp::Reverse(same.len()), first, expert))
        });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_unstable();
        for (.., expert) in ranked {
            let Some(key) = self.key(layer, expert) else { continue };
            if live.slots.find(key).is_some() {
                continue;
            }
            if !live.ahead.has_room() {
                break;
            }
            let Some(claim) = live.slots.claim(key, Purpose::Prediction, &live.scores) else { break };
            self.count_eviction(&claim);
            live.ahead.sent(layer, claim.slot);
            self.send(live, key, claim.slot, Purpose::Prediction);
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

    /// Sets the reader to work on a claimed slot.
    fn send(&self, live: &mut Live, key: Key, slot: SlotId, purpose: Purpose) {
        let Some(pieces) = self.pieces_of(key) else { return };
        let layout = Layout::new(pieces, self.reader.source().block());
        if let Some(spans) = live.spans.get_mut(slot.index()) {
            spans.clone_from(&layout.spans);
        }
        match purpose {
            Purpose::Demand => self.reader.demand(slot, layout),
            Purpose::Prediction | Purpose::WarmStart => self.reader.later(slot, layout),
        }
        self.metrics.expert_slots_used.set(live.slots.used() as i64);
    }

    /// Brings the picture of what is in memory up to date, from time to time.
    fn draw(&self, live: &mut Live) {
        if live.drawn.is_none_or(|drawn| drawn.elapsed() > DRAW) {
            live.drawn = Some(Instant::now());
            self.board.draw(live.slots.all(State::Ready).map(|(key, _)| key as usize));
        }
    }

    fn count_eviction(&self, claim: &Claim) {
        if claim.evicted.is_some() {
            self.metrics.expert_evictions.inc();
        }
        if claim.wasted {
            self.metrics.prefetches_wasted.inc();
        }
    }

    /// The error of reading the expert in this slot.
    fn failure(&self, live: &Live, slot: SlotId) -> StoreError {
        let key = live.slots.key(slot).unwrap_or_default() as usize;
        let (layer, expert) = (key / self.experts, key % self.experts);
        match self.reader.failure(slot) {
            Some(Failure { file, offset, len, source }) => {
                StoreError::Read { layer, expert, file: self.reader.source().path(file), offset, len, source }
            }
            None => StoreError::Other(format!("layer {layer}, expert {expert} could not be read")),
        }
    }
}

impl Drop for Experts {
    fn drop(&mut self) {
        self.save_hot_or_warn();
    }
}

#[cfg(test)]
mod tests;
