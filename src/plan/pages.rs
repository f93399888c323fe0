//! The plan's pages of keys and values.

use super::Plan;

/// The part of the prompt cache that is pages; the rest are states, which are larger than the pages that come with them in a
/// conversation of short turns.
const PAGES: u64 = 4;

impl Plan {
    /// Pages of `bytes` in the context's memory and in the prompt cache's part for them.
    pub fn pages(&self, bytes: u64) -> usize {
        usize::try_from((self.kv + self.prompt_cache / PAGES) / bytes.max(1)).unwrap_or(usize::MAX)
    }

    /// States of `bytes` in the rest of the prompt cache.
    pub fn states(&self, bytes: u64) -> u64 {
        (self.prompt_cache - self.prompt_cache / PAGES).checked_div(bytes).unwrap_or(0)
    }
}
