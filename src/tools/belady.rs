//! The cache nobody can build: one that knows the future. Real caches are measured against it.

use std::collections::{BTreeSet, HashMap};

/// For each of the experts asked for, in order, whether a cache of `slots` that always gives up the expert wanted last
/// would have missed it (Belady 1966; an expert wanted later than all others is read and not kept). It starts empty. No
/// cache of that size misses less often.
pub fn misses(asked: &[u32], slots: usize) -> Vec<bool> {
    const NEVER: usize = usize::MAX;
    let mut next = vec![NEVER; asked.len()];
    let mut seen = HashMap::new();
    for (at, key) in asked.iter().enumerate().rev() {
        if let (Some(later), Some(next)) = (seen.insert(key, at), next.get_mut(at)) {
            *next = later;
        }
    }
    let mut held: BTreeSet<(usize, u32)> = BTreeSet::new();
    asked
        .iter()
        .zip(&next)
        .enumerate()
        .map(|(at, (&key, &next))| {
            // Experts held are filed under the time when they are wanted again: now.
            let hit = held.remove(&(at, key));
            if hit || held.len() < slots {
                held.insert((next, key));
            } else if held.last().is_some_and(|&(latest, _)| latest > next) {
                held.pop_last();
                held.insert((next, key));
            }
            !hit
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn count(asked: &[u32], slots: usize) -> usize {
        misses(asked, slots).iter().filter(|&&miss| miss).count()
    }

    /// The least number of misses, by trying every choice.
    fn exhaustive(asked: &[u32], slots: usize, held: &mut Vec<u32>) -> usize {
        let Some((&key, rest)) = asked.split_first() else { return 0 };
        if held.contains(&key) {
            return exhaustive(rest, slots, held);
        }
        let mut least = exhaustive(rest, slots, held);
        if held.len() < slots {
            held.push(key);
            least = least.min(exhaustive(rest, slots, held));
            held.pop();
        } else {
            for i in 0..held.len() {
                let old = std::mem::replace(&mut held[i], key);
                least = least.min(exhaustive(rest, slots, held));
                held[i] = old;
            }
        }
        1 + least
    }

    #[test]
    fn textbook() {
        // The sequence of Belady's anomaly.
        let asked = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
        assert_eq!(count(&asked, 3), 7);
        assert_eq!(count(&asked, 4), 6);
        assert_eq!(count(&asked, 5), 5);
        assert_eq!(count(&asked, 0), 12);
    }

    proptest! {
        #[test]
        fn nothing_misses_less(asked in proptest::collection::vec(0u32..5, 0..9), slots in 0usize..4) {
            prop_assert_eq!(count(&asked, slots), exhaustive(&asked, slots, &mut Vec::new()));
        }
    }
}
