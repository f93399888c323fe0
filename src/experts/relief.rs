//! Slots given back while the system is short of memory, and taken again when there is plenty: better to read an expert once
//! more than to be swapped out, or killed.
//!
//! The last slots of the slab go, so that whole huge pages become free; what is wanted there moves to the front. A model that
//! was [resident](Experts::is_resident) streams from then on. Slots come back a few at a time, when memory has not been short
//! for a while and those that there are have been filled. Nothing goes where a device has pinned the slots' pages (CUDA).

use super::{
    Experts, Live,
    slots::{SlotId, State},
};
use crate::{
    device::{SyncPoint, Timeline},
    platform::os::{Memory, Pressure},
};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// The time between two looks at the system's memory.
const LOOK: Duration = Duration::from_millis(250);

/// Memory that was short may be so again: slots are taken only after so long.
const CALM: Duration = Duration::from_secs(10);

/// The part of all slots that is taken at once.
const STEP: usize = 16;

/// The state of giving and taking.
pub(super) struct Relief {
    pressure: Pressure,
    /// As many slots stay.
    least: usize,
    next: Instant,
    /// When memory was last short.
    short: Option<Instant>,
}

impl Relief {
    pub fn new(least: usize) -> Self {
        Self { pressure: Pressure::new(), least: least.max(1), next: Instant::now(), short: None }
    }
}

impl Experts {
    /// Every expert has a slot of its own.
    pub fn is_resident(&self) -> bool {
        self.resident.get()
    }

    /// Slots that there are now.
    pub fn slots(&self) -> usize {
        self.live.borrow().slots.len()
    }

    /// The device that experts were asked for is no more: nothing reads a slot any longer, whatever mark keeps it.
    pub fn forget_device(&self) {
        self.live.borrow_mut().slots.advance(SyncPoint(u64::MAX));
    }

    /// Looks, if it is time for it, whether the system is short of memory, and gives slots back or takes them again. For
    /// between two passes: `device` has done all that it was given.
    pub fn fit(&self, device: &mut dyn Timeline) {
        let live = &mut *self.live.borrow_mut();
        let now = Instant::now();
        if now < live.relief.next {
            return;
        }
        live.slots.advance(device.completed());
        let memory = live.relief.pressure.look();
        let gave = self.adapt(live, memory, now);
        live.relief.next = now + if gave { Pressure::SETTLES } else { LOOK };
    }

    /// True if slots were given back.
    pub(super) fn adapt(&self, live: &mut Live, memory: Memory, now: Instant) -> bool {
        if self.slab.has_locked_pages() {
            return false;
        }
        let (have, all) = (live.slots.len(), self.slab.len() / self.slot_bytes.max(1));
        match memory {
            Memory::Short(bytes) => {
                let before = live.relief.short.replace(now);
                let slots = bytes.div_ceil(self.slot_bytes.max(1) as u64);
                let to = have.saturating_sub(usize::try_from(slots).unwrap_or(have)).max(live.relief.least);
                let gave = to < have && self.give_back(live, to);
                if gave && before.is_none_or(|before| now - before > CALM) {
                    tracing::warn!(slots = live.slots.len(), of = all, "memory is short: slots are given back");
                }
                gave
            }
            Memory::Spare(bytes) if have < all && live.slots.used() == have => {
                let calm = live.relief.short.is_none_or(|short| now - short > CALM);
                let room = usize::try_from(bytes / self.slot_bytes.max(1) as u64).unwrap_or(all);
                let to = have + room.min((all / STEP).max(1)).min(all - have);
                if calm && to > have && self.take_again(live, to) && to == all {
                    tracing::info!(slots = all, "memory is plenty again: all slots are back");
                }
                false
            }
            Memory::Spare(_) | Memory::Enough => false,
        }
    }

    fn give_back(&self, live: &mut Live, to: usize) -> bool {
        let have = live.slots.len();
        if self.resident.replace(false) {
            // They were pinned for good.
            let ready: Vec<SlotId> = live.slots.all(State::Ready).map(|(_, slot)| slot).collect();
            ready.into_iter().for_each(|slot| live.slots.unpin(slot, SyncPoint::START, &live.scores));
        }
        let shrunk = live.slots.shrink(to, &live.scores);
        for (from, into) in shrunk.moved {
            let spans = live.spans.get(from.index()).cloned();
            if let (Some(spans), Some(place)) = (spans, live.spans.get_mut(into.index())) {
                *place = spans;
            }
            let at = |slot: SlotId| self.bytes(slot.index()..slot.index() + 1);
            // SAFETY: the table has just taken the first slot from an expert that nobody had pinned or was reading in, whose
            // marks the device has passed, and has given it the second, which was free: nobody else looks at either.
            let (from, into) = unsafe { (self.slab.bytes(at(from)), self.slab.bytes_mut(at(into))) };
            into.copy_from_slice(from);
        }
        self.metrics.expert_evictions.inc_by(shrunk.evicted as u64);
        self.metrics.prefetches_wasted.inc_by(shrunk.wasted as u64);
        let left = live.slots.len();
        self.counted(live);
        if left == have {
            return false;
        }
        self.metrics.memory_pressure.inc();
        // SAFETY: no expert is in these slots, and none will be before they are taken again.
        if let Err(error) = unsafe { self.slab.release_pages(self.bytes(left..have)) } {
            tracing::warn!(%error, "the system does not take memory back");
        }
        true
    }

    fn take_again(&self, live: &mut Live, to: usize) -> bool {
        if let Err(error) = self.slab.reuse_pages(self.bytes(live.slots.len()..to)) {
            tracing::warn!(%error, "the system does not give memory again");
            return false;
        }
        live.slots.grow(to);
        self.counted(live);
        true
    }

    /// Where the slab has these slots.
    fn bytes(&self, slots: Range<usize>) -> Range<usize> {
        slots.start * self.slot_bytes..slots.end * self.slot_bytes
    }

    fn counted(&self, live: &Live) {
        let (slots, used) = (live.slots.len(), live.slots.used());
        self.metrics.expert_slots.set(slots as i64);
        self.metrics.expert_slots_used.set(used as i64);
        self.metrics.memory_experts.set((slots * self.slot_bytes) as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Choice, Options, PIECES, Phase,
        tests::{EXPERTS, LAYERS, checkpoint, row, take},
    };
    use super::*;
    use crate::device::CpuTimeline;

    /// One token: two experts of each layer.
    fn token(store: &Experts, map: &super::super::ExpertMap, n: usize) {
        for layer in 0..LAYERS {
            let one = ((n * 5 + layer) % EXPERTS) as u32;
            take(store, map, layer, &[one, (one + 3) % EXPERTS as u32], Phase::Decode);
        }
    }

    /// While the first lives, what this thread logs goes into a file, in which the second counts a text.
    fn logged() -> (tracing::subscriber::DefaultGuard, impl Fn(&str) -> usize) {
        let log = tempfile::NamedTempFile::new().unwrap();
        let file = log.reopen().unwrap();
        let subscriber = tracing_subscriber::fmt().with_writer(move || file.try_clone().unwrap()).finish();
        let guard = tracing::subscriber::set_default(subscriber);
        (guard, move |text| std::fs::read_to_string(log.path()).unwrap().matches(text).count())
    }

    #[test]
    fn slots_go_and_come_and_every_byte_stays_right() {
        let all = LAYERS * EXPERTS;
        for slots in [all, all - 4] {
            let (_guard, said) = logged();
            let checkpoint = checkpoint();
            let (store, metrics) = checkpoint.open(Options { least: 6, ..Options::new(slots) });
            store.fill(&mut |_, _| ()).unwrap();
            assert_eq!(store.is_resident(), slots == all);
            let (now, bytes) = (Instant::now(), store.slot_bytes() as u64);
            let adapt = |memory, seconds| {
                let live = &mut *store.live.borrow_mut();
                store.adapt(live, memory, now + Duration::from_secs(seconds))
            };
            (0..20).for_each(|n| token(&store, &checkpoint.map, n));
            assert!(!adapt(Memory::Enough, 0) && !adapt(Memory::Spare(1 << 40), 0));
            assert_eq!(store.slots(), slots, "there is nothing to take");

            assert!(adapt(Memory::Short(3 * bytes - 1), 1));
            assert_eq!(store.slots(), slots - 3);
            assert!(!store.is_resident());
            (0..20).for_each(|n| token(&store, &checkpoint.map, n));
            assert!(adapt(Memory::Short(1 << 40), 2));
            assert_eq!(store.slots(), 6, "the least stay");
            assert!(!adapt(Memory::Short(1 << 40), 3));
            assert_eq!(metrics.memory_pressure.get(), 2);
            assert_eq!(metrics.memory_experts.get(), 6 * bytes as i64);
            (0..20).for_each(|n| token(&store, &checkpoint.map, n));

            adapt(Memory::Spare(1 << 40), 4);
            assert_eq!(store.slots(), 6, "it was short a moment ago");
            adapt(Memory::Spare(bytes / 2), 60);
            assert_eq!(store.slots(), 6, "that is not enough for one");
            for round in 0..40 {
                adapt(Memory::Spare(1 << 40), 61);
                let taken = store.slots();
                adapt(Memory::Spare(1 << 40), 61);
                assert!(store.slots() == taken, "those that there are have to be filled first");
                (0..20).for_each(|n| token(&store, &checkpoint.map, n + round));
            }
            assert_eq!((store.slots(), metrics.expert_slots.get()), (slots, slots as i64));
            assert_eq!(metrics.memory_pressure.get(), 2);
            assert_eq!(["slots are given back", "all slots are back"].map(said), [1, 1]);
        }
    }

    #[test]
    fn slots_whose_pages_a_device_keeps_to_stay() {
        let checkpoint = checkpoint();
        let (store, metrics) = checkpoint.open(Options { least: 1, ..Options::new(8) });
        store.slab().lock_pages();
        assert!(!store.adapt(&mut store.live.borrow_mut(), Memory::Short(1 << 40), Instant::now()));
        assert_eq!((store.slots(), metrics.memory_pressure.get()), (8, 0));
        // SAFETY: nobody uses the slots.
        assert!(unsafe { store.slab().release_pages(0..store.slab().len()) }.is_err());
    }

    #[test]
    fn the_systems_memory_is_looked_at_from_time_to_time() {
        /// Counts how often it is asked how far it has come.
        struct Counting(u32);
        impl Timeline for Counting {
            fn completed(&mut self) -> SyncPoint {
                self.0 += 1;
                SyncPoint::START
            }
        }
        let (store, _) = checkpoint().open(Options::new(8));
        // Whatever the system says, nothing is given back.
        store.slab().lock_pages();
        let (mut device, before) = (Counting(0), Instant::now());
        store.fit(&mut device);
        let next = store.live.borrow().relief.next;
        assert!(before + LOOK <= next && next <= Instant::now() + LOOK);
        for (wait, looks) in [(Duration::from_secs(60), 1), (Duration::ZERO, 2)] {
            store.live.borrow_mut().relief.next = Instant::now() + wait;
            store.fit(&mut device);
            assert_eq!(device.0, looks, "{wait:?}");
        }
    }

    #[test]
    fn a_shortage_is_said_once() {
        let (_guard, said) = logged();
        let (store, _) = checkpoint().open(Options { least: 4, ..Options::new(8) });
        let (now, bytes) = (Instant::now(), store.slot_bytes() as u64);
        // The third shortage comes after a calm time; in the last there is nothing left to give.
        for (seconds, slots, lines) in [(0, 7, 1), (9, 6, 1), (20, 5, 2), (21, 4, 2), (60, 4, 2)] {
            store.adapt(&mut store.live.borrow_mut(), Memory::Short(bytes), now + Duration::from_secs(seconds));
            assert_eq!((store.slots(), said("slots are given back")), (slots, lines), "after {seconds} s");
        }
    }

    #[test]
    fn slots_that_somebody_holds_stay() {
        let checkpoint = checkpoint();
        let (store, _) = checkpoint.open(Options { least: 1, ..Options::new(8) });
        let ids = [0, 1, 2, 3, 4, 5];
        let mut asked = store.ask(0, &row(&ids), Phase::Decode, &mut CpuTimeline).unwrap();
        let mut seen = 0;
        while let Some(batch) = asked.next(&mut CpuTimeline).unwrap() {
            seen += batch.len();
            let before: Vec<[Vec<u8>; PIECES]> = batch.iter().map(|l| l.pieces.map(<[u8]>::to_vec)).collect();
            store.adapt(&mut store.live.borrow_mut(), Memory::Short(1 << 40), Instant::now());
            assert!(
                batch.iter().zip(before).all(|(landed, before)| landed.pieces.iter().zip(before).all(|(a, b)| *a == b))
            );
        }
        drop(asked);
        assert_eq!((seen, store.slots()), (6, 6), "free ones behind them go");
        // A device that has not passed the mark of what reads them keeps them, too.
        struct Late;
        impl Timeline for Late {
            fn sync_point(&mut self) -> SyncPoint {
                SyncPoint(7)
            }
        }
        let choice = Choice { ids: &ids, k: 6, logits: &[] };
        let mut asked = store.ask(0, &choice, Phase::Decode, &mut Late).unwrap();
        while asked.next(&mut Late).unwrap().is_some() {}
        asked.reads_until(Late.sync_point());
        store.fit(&mut Late);
        assert!(!store.adapt(&mut store.live.borrow_mut(), Memory::Short(1 << 40), Instant::now()));
        store.live.borrow_mut().slots.advance(SyncPoint(7));
        assert!(store.adapt(&mut store.live.borrow_mut(), Memory::Short(1 << 40), Instant::now()));
        assert_eq!(store.slots(), 1);
        take(&store, &checkpoint.map, 1, &[5], Phase::Decode);
    }
}
