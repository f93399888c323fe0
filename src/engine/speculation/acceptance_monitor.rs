//! Detects a draft that does not belong to its model.
//!
//! A draft that reads the wrong layers, uses another norm convention, or was trained for another model never changes an
//! answer, since every token is verified. It is useless all the same, and the user should be told.

/// Cycles in the sample.
const SAMPLE: u32 = 48;
/// Fewest cycles of the sample in which the first drafted token must be accepted. At high temperatures a suitable draft can have
/// as few as 30 % accepted; one in 100,000 such drafts fails the sample. Sampling noise makes smaller samples unfair.
const MIN_ACCEPTED: u32 = 3;

/// Counts how often the first token of a draft is accepted, until the sample is complete.
#[derive(Debug, Default)]
pub struct AcceptanceMonitor {
    cycles: u32,
    accepted: u32,
}

impl AcceptanceMonitor {
    /// Records a cycle that accepted this many tokens. Returns true once if the draft turns out not to fit.
    ///
    /// The first sample decides. Whether a draft belongs to its model does not change later, and repeating the test would
    /// eventually fail a good draft by chance.
    pub fn record(&mut self, accepted: usize) -> bool {
        if self.cycles == SAMPLE {
            return false;
        }
        self.cycles += 1;
        self.accepted += u32::from(accepted > 0);
        self.cycles == SAMPLE && self.accepted < MIN_ACCEPTED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cycles at which the monitor reports the draft.
    fn reports(accepted: impl Fn(u32) -> usize) -> Vec<u32> {
        let mut monitor = AcceptanceMonitor::default();
        (0..200).filter(|cycle| monitor.record(accepted(*cycle))).collect()
    }

    #[test]
    fn rarely_accepted_draft_is_reported_once() {
        assert_eq!(reports(|_| 0), [47]);
        assert_eq!(reports(|cycle| usize::from(cycle % 24 == 0)), [47]);
    }

    #[test]
    fn suitable_draft_is_never_reported() {
        assert!(reports(|cycle| usize::from(cycle % 12 == 0)).is_empty());
        // Long runs of rejections can follow later, for example at a high temperature.
        assert!(reports(|cycle| usize::from(cycle < 48)).is_empty());
        assert!(reports(|cycle| usize::from(cycle % 40 >= 20)).is_empty());
    }
}
