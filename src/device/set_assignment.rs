//! Assigns buffers to Metal's residency sets.
//!
//! macOS decides per set, and macOS 27 wires a set again as a whole if its residency was revoked. So buffers are spread
//! over several sets.

/// Maximum number of sets: a Metal command queue takes 32.
const MAX_SETS: usize = 32;
/// A set has at most this fraction of the working set, except for one larger buffer.
const SET_FRACTION: u64 = 20;

/// Assigns buffers to residency sets by size.
#[derive(Debug)]
pub struct SetAssignment {
    set_bytes: u64,
    /// Bytes in each set.
    sets: Vec<u64>,
}

impl SetAssignment {
    /// `working_set` is the most bytes that the device recommends to allocate.
    pub fn new(working_set: u64) -> Self {
        Self { set_bytes: (working_set / SET_FRACTION).max(1), sets: Vec::new() }
    }

    /// The set for a new buffer: the first with room, else a new one, which has the next number, else the smallest.
    pub fn add(&mut self, bytes: u64) -> usize {
        let with_room = self.sets.iter().position(|used| used.saturating_add(bytes) <= self.set_bytes);
        let smallest = || (0..self.sets.len()).min_by_key(|index| self.sets[*index]).unwrap_or(0);
        let set = with_room.unwrap_or_else(|| if self.sets.len() < MAX_SETS { self.sets.len() } else { smallest() });
        if set == self.sets.len() {
            self.sets.push(0);
        }
        self.sets[set] += bytes;
        set
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
        // 2.4 GiB per set: two segments each.
        let found: Vec<usize> = (0..6).map(|_| sets.add(gib)).collect();
        assert_eq!(found, [0, 0, 1, 1, 2, 2]);
        assert_eq!(sets.add(5 * gib), 3, "a long buffer has its own set");
        assert_eq!(sets.add(gib / 4), 0, "a small buffer joins the first");
        sets.remove(1, gib);
        assert_eq!(sets.add(gib), 1);
        for _ in 0..200 {
            assert!(sets.add(gib) < 32);
        }
        let (least, most) = (sets.sets.iter().min().unwrap(), sets.sets.iter().max().unwrap());
        assert!(most - least <= 3 * gib, "{:?}", sets.sets);
    }
}
