//! Which random cases a test runs.

use std::{env, ops::Range};

/// The seeds of `usual` random cases. `MOESTRO_TEST_TIMES` multiplies their number, and `MOESTRO_TEST_SEED` is the first
/// of them. Prints the seeds, so that the output of a failed test says how to repeat it.
pub fn seeds(usual: u64) -> Range<u64> {
    let [first, times] = [("MOESTRO_TEST_SEED", 0), ("MOESTRO_TEST_TIMES", 1)]
        .map(|(name, default)| env::var(name).map_or(default, |text| text.parse().unwrap()));
    let seeds = first..first + usual * times;
    println!("seeds {seeds:?}: MOESTRO_TEST_SEED={first} MOESTRO_TEST_TIMES={times}");
    seeds
}
