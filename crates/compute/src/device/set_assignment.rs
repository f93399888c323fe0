//! Assigns buffers to Metal's residency sets.
//!
//! macOS grants and revokes residency per set. If it revokes the residency of a set, all buffers of the set must become
//! resident again. Buffers are therefore spread over several sets.

/// Maximum number of residency sets of a Metal command queue.
const MAX_SETS: usize = 32;
/// A set takes buffers up to `1 / SET_FRACTION` of the working set. A set with a single larger buffer is the exception.
const SET_FRACTION: u64 = 20;

/// Assigns buffers to residency sets by size.
#[derive(Debug)]
pub struct SetAssignment {
    set_bytes: u64,
    /// Total bytes of the buffers in each set.
    sets: Vec<u64>,
}

impl SetAssignment {
    /// `working_set` is the maximum number of bytes that the device recommends to use.
    pub fn new(working_set: u64) -> Self {
        Self { set_bytes: (working_set / SET_FRACTION).max(1), sets: Vec::new() }
    }

    /// Assigns a new buffer to the first set with room, otherwise to a new set with the next number. Uses the smallest
    /// set if `create_set` returns false for the new set, or if no set has room and there are [`MAX_SETS`] sets. Returns
    /// the number of the set, or `None` if there is no set.
    pub fn add(&mut self, bytes: u64, create_set: impl FnOnce() -> bool) -> Option<usize> {
        let with_room = self.sets.iter().position(|used| used.saturating_add(bytes) <= self.set_bytes);
        let set = match with_room {
            Some(set) => set,
            None if self.sets.len() < MAX_SETS && create_set() => {
                self.sets.push(0);
                self.sets.len() - 1
            }
            None => (0..self.sets.len()).min_by_key(|index| self.sets[*index])?,
        };
        self.sets[set] += bytes;
        Some(set)
    }

    pub fn remove(&mut self, set: usize, bytes: u64) {
        if let Some(used) = self.sets.get_mut(set) {
            *used = used.saturating_sub(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_spread_over_residency_sets() {
        let gib = 1 << 30;
        let mut sets = SetAssignment::new(48 * gib);
        let add = |sets: &mut SetAssignment, bytes| sets.add(bytes, || true).unwrap();
        // Each set takes 2.4 GiB, which is enough for two segments.
        let found: Vec<usize> = (0..6).map(|_| add(&mut sets, gib)).collect();
        assert_eq!(found, [0, 0, 1, 1, 2, 2]);
        assert_eq!(add(&mut sets, 5 * gib), 3, "a long buffer has its own set");
        assert_eq!(add(&mut sets, gib / 4), 0, "a small buffer joins the first");
        sets.remove(1, gib);
        assert_eq!(add(&mut sets, gib), 1);
        // The driver refuses another set: the smallest one takes the buffer.
        assert_eq!(sets.add(5 * gib, || false), Some(1));
        sets.remove(1, 5 * gib);
        for _ in 0..200 {
            assert!(add(&mut sets, gib) < 32);
        }
        let least = sets.sets.iter().min().unwrap();
        let most = sets.sets.iter().max().unwrap();
        assert!(most - least <= 3 * gib, "{:?}", sets.sets);
    }

    #[test]
    fn buffer_without_any_set_has_none() {
        let mut sets = SetAssignment::new(1 << 30);
        assert_eq!(sets.add(1, || false), None);
        assert_eq!(sets.add(1, || true), Some(0), "the driver may create a set later");
    }
}
