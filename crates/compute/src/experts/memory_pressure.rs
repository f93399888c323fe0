//! Memory pressure: decides how many slots the store may use while the system is short of memory.
//!
//! Under pressure the store releases slots, since reading an expert again is cheaper than swapping or being killed. The
//! store releases slots from the end of the slab, so that whole huge pages become free. After [`RESTORE_DELAY`] without
//! a shortage, it restores a few slots at a time, but only if all usable slots are filled. If a GPU uses the slab,
//! whole segments are released and restored.

use moestro_base::platform::os::{MemoryLevel, MemoryMonitor};
use std::time::{Duration, Instant};

/// Minimum time between the last shortage and restoring slots.
const RESTORE_DELAY: Duration = Duration::from_secs(10);

/// At most `1 / RESTORE_FRACTION` of all slots is restored at once.
const RESTORE_FRACTION: usize = 16;

/// Slot counts of the store, for [`MemoryPressure::decide`].
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotCounts {
    pub present: usize,
    pub used: usize,
    /// Number of slots when the store was opened.
    pub all: usize,
    /// Slots are released and restored in multiples of this number.
    pub step: usize,
}

/// The decision of [`MemoryPressure::decide`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotChange {
    None,
    /// Release slots until `to` slots are left. `is_logged` is false if a recent shortage was logged already.
    Shrink {
        to: usize,
        is_logged: bool,
    },
    /// Restore slots until there are `to` slots.
    Grow {
        to: usize,
    },
}

/// Decides when slots are released and restored.
pub(super) struct MemoryPressure {
    monitor: MemoryMonitor,
    min_slots: usize,
    pub next_check: Instant,
    /// Time of the last shortage, or of the last attempt to restore slots that failed.
    last_short: Option<Instant>,
}

impl MemoryPressure {
    pub fn new(min_slots: usize) -> Self {
        let monitor = MemoryMonitor::open();
        Self { monitor, min_slots: min_slots.max(1), next_check: Instant::now(), last_short: None }
    }

    /// The system's memory level. `None` if the next check is not due yet.
    pub fn check(&mut self, now: Instant) -> Option<MemoryLevel> {
        (now >= self.next_check).then(|| self.monitor.check())
    }

    /// Sets the time of the next check. After slots were released, waits until the system counts their memory as free.
    pub fn schedule(&mut self, now: Instant, has_released: bool) {
        self.next_check = now + if has_released { MemoryMonitor::SETTLE_TIME } else { MemoryMonitor::CHECK_INTERVAL };
    }

    /// Waits for [`RESTORE_DELAY`] before slots are restored.
    pub fn delay_restore(&mut self, now: Instant) {
        self.last_short = Some(now);
    }

    pub fn decide(&mut self, level: MemoryLevel, now: Instant, counts: SlotCounts, slot_bytes: usize) -> SlotChange {
        let SlotCounts { present, used, all, step } = counts;
        let slot_bytes = slot_bytes.max(1) as u64;
        match level {
            MemoryLevel::Short(bytes) => {
                let before = self.last_short.replace(now);
                let slots = usize::try_from(bytes.div_ceil(slot_bytes)).unwrap_or(present);
                let to = present.saturating_sub(slots) / step * step;
                let to = to.max(self.min_slots.next_multiple_of(step));
                let is_logged = before.is_none_or(|before| now - before > RESTORE_DELAY);
                if to < present { SlotChange::Shrink { to, is_logged } } else { SlotChange::None }
            }
            MemoryLevel::Spare(bytes) if present < all && used == present => {
                let is_calm = self.last_short.is_none_or(|short| now - short > RESTORE_DELAY);
                let spare = usize::try_from(bytes / slot_bytes).unwrap_or(all);
                let most = spare.min((all / RESTORE_FRACTION).max(step)).min(all - present);
                let to = if present + most == all { all } else { (present + most) / step * step };
                if is_calm && to > present { SlotChange::Grow { to } } else { SlotChange::None }
            }
            MemoryLevel::Spare(_) | MemoryLevel::Enough => SlotChange::None,
        }
    }
}
