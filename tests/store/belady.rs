//! Compares Belady's algorithm with exhaustive search.

use proptest::prelude::*;
use test_support::belady::misses;

fn count(requests: &[u32], slots: usize) -> usize {
    misses(requests, slots).iter().filter(|&&miss| miss).count()
}

/// The minimum number of misses, found by trying all choices.
fn exhaustive(requests: &[u32], slots: usize, cached: &mut Vec<u32>) -> usize {
    let Some((&key, rest)) = requests.split_first() else { return 0 };
    if cached.contains(&key) {
        return exhaustive(rest, slots, cached);
    }
    let mut fewest = exhaustive(rest, slots, cached);
    if cached.len() < slots {
        cached.push(key);
        fewest = fewest.min(exhaustive(rest, slots, cached));
        cached.pop();
    } else {
        for i in 0..cached.len() {
            let old = std::mem::replace(&mut cached[i], key);
            fewest = fewest.min(exhaustive(rest, slots, cached));
            cached[i] = old;
        }
    }
    1 + fewest
}

proptest! {
    #[test]
    fn no_cache_has_fewer_misses(requests in proptest::collection::vec(0u32..5, 0..9), slots in 0usize..4) {
        prop_assert_eq!(count(&requests, slots), exhaustive(&requests, slots, &mut Vec::new()));
    }
}
