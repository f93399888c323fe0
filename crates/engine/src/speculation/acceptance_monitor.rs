//! Detects a draft that does not fit the model: one that reads the wrong layers, uses another norm convention, or was
//! trained for another model.
//!
//! Such a draft never changes an answer, since every token is verified. But it wastes time, and the user should know.

/// Number of draft-and-verify cycles in the sample.
const SAMPLE: u32 = 48;
/// Minimum number of cycles of the sample in which the first drafted token is accepted. At high temperatures, a
/// suitable draft may have its first token accepted in only 30 % of cycles. The chance that such a draft fails the test
/// is 1 in 100,000.
const MIN_ACCEPTED: u32 = 3;

/// Counts the cycles of the sample, and the cycles in which the first drafted token was accepted.
#[derive(Debug, Default)]
pub struct AcceptanceMonitor {
    cycles: u32,
    accepted: u32,
}

impl AcceptanceMonitor {
    /// Records a cycle in which `accepted` tokens were accepted. Returns true at the end of the sample if the draft
    /// does not fit the model, and false at all other times.
    ///
    /// Tests only the first cycles, since it cannot change later whether the draft fits. A repeated test would sooner
    /// or later reject a good draft by chance.
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

    /// The cycles at which the monitor reports that the draft does not fit.
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
