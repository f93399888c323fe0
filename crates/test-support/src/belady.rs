//! Belady's algorithm: the optimal cache replacement, which knows all future requests. Tests compare real caches with
//! this optimum.

use std::collections::{BTreeSet, HashMap};

/// For each request, true if an optimal cache of `slots` entries misses. The cache starts empty.
///
/// On a miss, the cache evicts the entry whose next use is the latest (Belady 1966). If the requested entry has the
/// latest next use, it is not cached.
pub fn misses(requests: &[u32], slots: usize) -> Vec<bool> {
    const NEVER: usize = usize::MAX;
    let mut next = vec![NEVER; requests.len()];
    let mut seen = HashMap::new();
    for (at, key) in requests.iter().enumerate().rev() {
        if let (Some(later), Some(next)) = (seen.insert(key, at), next.get_mut(at)) {
            *next = later;
        }
    }
    let mut cached: BTreeSet<(usize, u32)> = BTreeSet::new();
    requests
        .iter()
        .zip(&next)
        .enumerate()
        .map(|(at, (&key, &next))| {
            // Entries are ordered by their next use. A cached entry for this key has the current request as its next
            // use.
            let hit = cached.remove(&(at, key));
            if hit || cached.len() < slots {
                cached.insert((next, key));
            } else if cached.last().is_some_and(|&(latest, _)| latest > next) {
                cached.pop_last();
                cached.insert((next, key));
            }
            !hit
        })
        .collect()
}
