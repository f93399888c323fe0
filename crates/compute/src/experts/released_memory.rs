//! [`ReleasedMemory`]: releases memory again until the system has taken it.
//!
//! A Mac ignores the release of a page that the GPU has wired, without an error. It may unwire the pages of a freed
//! buffer some time later, and documents no moment at which they are unwired.

use std::ops::Range;

/// Maximum number of checks at which a range is released again. A check is at least 250 ms after the one before.
const MAX_RELEASES: u32 = 40;
/// Number of checks at which a range is released again if the system does not report wired memory.
const BLIND_RELEASES: u32 = 2;

/// Ranges of the slab that were released and may still be wired.
#[derive(Debug, Default)]
pub(super) struct ReleasedMemory {
    pending: Vec<PendingRange>,
}

#[derive(Debug)]
struct PendingRange {
    bytes: Range<usize>,
    /// Wired memory of the process before the release. `None` if the system does not report it.
    wired_before: Option<u64>,
    releases: u32,
}

impl ReleasedMemory {
    /// Records that this range was released. `wired_before` is the wired memory before the device freed its buffers.
    pub fn add(&mut self, bytes: Range<usize>, wired_before: Option<u64>) {
        self.pending.push(PendingRange { bytes, wired_before, releases: 0 });
    }

    /// Forgets the memory before this byte, which is in use again.
    pub fn reuse_until(&mut self, end: usize) {
        self.pending.iter_mut().for_each(|range| range.bytes.start = range.bytes.start.max(end));
        self.pending.retain(|range| !range.bytes.is_empty());
    }

    /// The ranges to release again now. `wired` is the wired memory of the process. A range is released once more after
    /// the system reports less wired memory, and then never again.
    pub fn due(&mut self, wired: impl FnOnce() -> Option<u64>) -> Vec<Range<usize>> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        let wired = wired();
        let due = self.pending.iter().map(|range| range.bytes.clone()).collect();
        self.pending.retain_mut(|range| {
            range.releases += 1;
            match range.wired_before.zip(wired) {
                Some((before, now)) => {
                    let is_unwired = now.saturating_add(range.bytes.len() as u64) <= before;
                    !is_unwired && range.releases < MAX_RELEASES
                }
                None => range.releases < BLIND_RELEASES,
            }
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system that ignores the release of wired pages and unwires the pages of a freed buffer `delay` checks later.
    fn checks_until_free(delay: u32, reports: bool) -> Option<u32> {
        let bytes = 3000..5000;
        let wired = |is_wired: bool| reports.then_some(10_000 + if is_wired { 2000 } else { 0 });
        let mut released = ReleasedMemory::default();
        released.add(bytes.clone(), wired(true));
        let mut free_at = None;
        for check in 1..100 {
            let is_wired = check < delay;
            let due = released.due(|| wired(is_wired));
            assert!(due.is_empty() || due == std::slice::from_ref(&bytes), "{due:?}");
            if !due.is_empty() && !is_wired {
                free_at = free_at.or(Some(check));
            }
        }
        assert!(released.pending.is_empty(), "it is released for ever");
        free_at
    }

    #[test]
    fn memory_is_released_again_until_unwired() {
        for delay in [0, 1, 2, 7, MAX_RELEASES] {
            assert_eq!(checks_until_free(delay, true), Some(delay.max(1)), "{delay}");
        }
        assert_eq!(checks_until_free(MAX_RELEASES + 1, true), None);
        assert_eq!([1, 2, 3].map(|delay| checks_until_free(delay, false)), [Some(1), Some(2), None]);
    }

    #[test]
    fn used_memory_is_not_released() {
        let mut released = ReleasedMemory::default();
        released.add(4..8, None);
        released.add(2..4, None);
        released.reuse_until(3);
        assert_eq!(released.due(|| None), [4..8, 3..4]);
        released.reuse_until(8);
        assert!(released.due(|| None).is_empty());
    }
}
