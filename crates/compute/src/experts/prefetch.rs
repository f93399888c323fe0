//! [`Prefetcher`]: tracks prefetches in progress and decides by measurement whether to prefetch.
//!
//! During a trial, prefetching is on for every other token, until each setting has had at least eight tokens and 16
//! reads. The measure is the stall time divided by the number of experts read. The better setting is used until the
//! next trial. The interval between trials doubles each time. Before the first trial, prefetching is on, since it helps
//! most after a cold start.

use super::{choice::PassSize, slot_table::SlotId};

/// Whether to prefetch experts: the value of `--prefetch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// Prefetch if trials show that prefetching reduces stall time.
    #[default]
    Auto,
    On,
    Off,
}

/// Maximum total bytes of prefetched experts whose layers have not been fetched yet.
const MAX_BYTES: usize = 128 << 20;

/// Number of tokens before the first trial.
const WARM_UP_TOKENS: u32 = 8;
/// Minimum number of tokens per trial. Each setting gets half of them.
const TRIAL_TOKENS: u32 = 16;
/// Minimum number of experts that each setting must read during a trial, for a valid comparison.
const MIN_TRIAL_READS: u64 = 16;

/// Number of tokens between the first two trials. The interval doubles with each trial.
const KEEP_TOKENS: u32 = 128;
/// Maximum number of tokens between two trials.
const MAX_KEEP_TOKENS: u32 = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrialStage {
    WarmUp,
    /// Prefetching is on for every other token.
    Trial,
    /// The setting that was better in the last trial is used.
    Settled,
}

/// The prefetches in progress, and the trial.
pub struct Prefetcher {
    setting: Prefetch,
    is_on: bool,
    stage: TrialStage,
    /// Number of tokens left in this stage.
    tokens_left: u32,
    /// Length of the next `Settled` stage in tokens.
    keep_tokens: u32,
    /// The layer passed to the last call of [`Prefetcher::start_layer`].
    layer: usize,
    /// Stall time in seconds, without and with prefetching.
    stall_seconds: [f64; 2],
    /// Number of experts that had to be read, without and with prefetching.
    reads: [u64; 2],
    max_in_flight: usize,
    in_flight: Vec<(usize, SlotId)>,
}

impl Prefetcher {
    pub fn new(setting: Prefetch, slots: usize, slot_bytes: usize) -> Self {
        Self {
            setting,
            is_on: setting != Prefetch::Off,
            stage: TrialStage::WarmUp,
            tokens_left: WARM_UP_TOKENS,
            keep_tokens: KEEP_TOKENS,
            layer: 0,
            stall_seconds: [0.0; 2],
            reads: [0; 2],
            // Prefetched experts stay pinned until their layer is fetched, so they may take at most an eighth of the
            // slots.
            max_in_flight: (MAX_BYTES / slot_bytes.max(1)).min(slots / 8),
            in_flight: Vec::new(),
        }
    }

    /// True if experts should be prefetched for a pass of this size. A prompt needs nearly all experts, so predictions
    /// for a prompt are almost always right. Trials apply to decoding only.
    pub fn is_on(&self, size: PassSize) -> bool {
        let is_on = match size {
            PassSize::Large => self.setting != Prefetch::Off,
            PassSize::Small => self.is_on,
        };
        is_on && self.max_in_flight > 0
    }

    /// True if the budget allows another prefetch.
    pub fn has_budget(&self) -> bool {
        self.in_flight.len() < self.max_in_flight
    }

    pub fn add(&mut self, layer: usize, slot: SlotId) {
        self.in_flight.push((layer, slot));
    }

    /// Removes and returns the slot of the first prefetch for which `can_take` holds.
    pub fn take_first(&mut self, can_take: impl Fn(SlotId) -> bool) -> Option<SlotId> {
        let at = self.in_flight.iter().position(|&(_, slot)| can_take(slot))?;
        Some(self.in_flight.remove(at).1)
    }

    /// Removes one prefetch of `layer` and returns its slot. Called when the layer is fetched.
    pub fn take_for_layer(&mut self, layer: usize) -> Option<SlotId> {
        let at = self.in_flight.iter().position(|(other, _)| *other == layer)?;
        Some(self.in_flight.swap_remove(at).1)
    }

    /// Records that `layer` is fetched during decoding. If `layer` is not greater than the last layer, a new token
    /// starts.
    pub fn start_layer(&mut self, layer: usize) {
        let is_new_token = layer <= self.layer;
        self.layer = layer;
        if !is_new_token || self.setting != Prefetch::Auto {
            return;
        }
        self.tokens_left = self.tokens_left.saturating_sub(1);
        let is_incomplete = self.tokens_left > 0 || self.reads.iter().any(|&reads| reads < MIN_TRIAL_READS);
        match self.stage {
            TrialStage::Trial if is_incomplete => self.is_on = !self.is_on,
            TrialStage::Trial => {
                let [without, with] = [0, 1].map(|setting| self.stall_seconds[setting] / self.reads[setting] as f64);
                // Gains below 2 % do not count: they are noise, and prefetching itself costs time.
                self.is_on = with < 0.98 * without;
                tracing::debug!(with, without, on = self.is_on, "prefetch trial: stall seconds per expert read");
                (self.stage, self.tokens_left) = (TrialStage::Settled, self.keep_tokens);
                self.keep_tokens = (self.keep_tokens * 2).min(MAX_KEEP_TOKENS);
            }
            TrialStage::WarmUp | TrialStage::Settled if self.tokens_left == 0 => {
                self.stage = TrialStage::Trial;
                self.tokens_left = TRIAL_TOKENS;
                self.stall_seconds = [0.0; 2];
                self.reads = [0; 2];
            }
            TrialStage::WarmUp | TrialStage::Settled => {}
        }
    }

    /// Counts the experts of a layer that were read: experts that missed, and experts that were prefetched.
    pub fn count_reads(&mut self, misses: u64, prefetched: u64) {
        self.reads[usize::from(self.is_on)] += misses + prefetched;
    }

    pub fn count_stall(&mut self, seconds: f64) {
        self.stall_seconds[usize::from(self.is_on)] += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates `tokens` tokens of two layers. Each expert stalls for `with` seconds with prefetching and for
    /// `without` seconds without it. Returns the number of tokens for which prefetching was on.
    fn run(prefetcher: &mut Prefetcher, tokens: usize, with: f64, without: f64) -> usize {
        let mut on = 0;
        for _ in 0..tokens {
            for layer in 0..2 {
                prefetcher.start_layer(layer);
                prefetcher.count_reads(4, 0);
                prefetcher.count_stall(4.0 * if prefetcher.is_on(PassSize::Small) { with } else { without });
            }
            on += usize::from(prefetcher.is_on(PassSize::Small));
        }
        on
    }

    #[test]
    fn useful_prefetch_stays_on_useless_turns_off() {
        let mut pays = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut pays, 4000, 0.5e-3, 1e-3) > 3700);
        let mut costs = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut costs, 4000, 1.1e-3, 1e-3) < 120);
        let mut same = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut same, 4000, 1e-3, 1e-3) < 120);
    }

    #[test]
    fn later_trial_can_change_the_setting() {
        let mut prefetcher = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
        run(&mut prefetcher, 200, 1e-3, 0.5e-3);
        assert!(!prefetcher.is_on(PassSize::Small));
        run(&mut prefetcher, 2000, 0.5e-3, 1e-3);
        assert!(prefetcher.is_on(PassSize::Small));
    }

    #[test]
    fn budget_limits_bytes_and_share_of_slots() {
        assert_eq!(Prefetcher::new(Prefetch::On, 10_000, 16 << 20).max_in_flight, 8);
        assert_eq!(Prefetcher::new(Prefetch::On, 16, 1 << 20).max_in_flight, 2);
        assert!(!Prefetcher::new(Prefetch::On, 4, 1 << 20).is_on(PassSize::Small));
    }

    /// Expects a warm-up of 8 tokens. A trial of at least 16 tokens follows, until each setting has read 16 experts.
    /// Then the better setting is used for 128 tokens, and after each further trial for twice as many tokens.
    #[test]
    fn trial_stages_have_their_lengths() {
        for (experts, trial) in [(4, 16), (1, 32), (0, 500)] {
            let mut prefetcher = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
            let mut settings = Vec::new();
            for _ in 0..600 {
                // The simulated model has one layer, so every call starts a token.
                prefetcher.start_layer(0);
                settings.push(prefetcher.is_on(PassSize::Small));
                prefetcher.count_reads(experts / 2, experts - experts / 2);
                prefetcher.count_stall(if prefetcher.is_on(PassSize::Small) { 0.97 } else { 1.0 });
            }
            assert!(settings[..8].iter().all(|on| *on));
            assert!(settings[8..7 + trial].iter().enumerate().all(|(token, on)| *on == (token % 2 == 1)), "{experts}");
            if experts > 0 {
                assert!(settings[7 + trial..7 + trial + 128].iter().all(|on| *on), "{experts}: a gain of 3 % counts");
                let next = 7 + trial + 129;
                assert!(!settings[next], "{experts}: the next trial");
                assert!(settings[next + trial - 1..600].iter().take(256).all(|on| *on), "{experts}");
            }
        }
        for setting in [Prefetch::On, Prefetch::Off] {
            let mut prefetcher = Prefetcher::new(setting, 1000, 1 << 20);
            assert_eq!(run(&mut prefetcher, 100, 1.0, 0.1), if setting == Prefetch::On { 100 } else { 0 });
            assert_eq!(prefetcher.is_on(PassSize::Large), setting == Prefetch::On);
        }
    }

    #[test]
    fn earlier_or_same_layer_starts_a_token() {
        let mut prefetcher = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
        let mut tokens = Vec::new();
        for layer in [0, 1, 2, 0, 2, 2, 1, 5, 6] {
            let before = prefetcher.tokens_left;
            prefetcher.start_layer(layer);
            tokens.push(before - prefetcher.tokens_left);
        }
        assert_eq!(tokens, [1, 0, 0, 1, 0, 1, 1, 0, 0]);
    }

    #[test]
    fn each_prefetch_is_taken_once() {
        let mut prefetcher = Prefetcher::new(Prefetch::On, 16, 1 << 20);
        assert!(prefetcher.has_budget());
        prefetcher.add(1, SlotId(4));
        assert!(prefetcher.has_budget());
        prefetcher.add(2, SlotId(5));
        assert!(!prefetcher.has_budget());
        assert_eq!((prefetcher.take_for_layer(3), prefetcher.take_first(|slot| slot.0 > 5)), (None, None));
        assert_eq!((prefetcher.take_for_layer(2), prefetcher.take_for_layer(2)), (Some(SlotId(5)), None));
        assert_eq!((prefetcher.take_first(|slot| slot.0 == 4), prefetcher.take_for_layer(1)), (Some(SlotId(4)), None));
        assert!(prefetcher.has_budget());
    }

    #[test]
    fn gains_below_two_percent_turn_off() {
        for (with, kept) in [(0.985, false), (0.975, true)] {
            let mut prefetcher = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
            run(&mut prefetcher, 60, with, 1.0);
            assert_eq!((prefetcher.stage, prefetcher.is_on), (TrialStage::Settled, kept), "{with}");
        }
    }
}
