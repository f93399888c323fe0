//! `Prefetcher`: which predicted experts are being read, and whether prefetching pays.
//!
//! The benefit is measured. During a trial of some dozen tokens every other token is prefetched for. The two settings are
//! compared by stall time per expert that had to be read. The better one is kept for a while, longer after each trial.
//! Prefetching is on before the first trial, because a cold start gains most from it.

use super::{choice::PassKind, slot_table::SlotId};

/// `--prefetch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// On while it measures better than off.
    #[default]
    Auto,
    On,
    Off,
}

/// Bytes that may be prefetched for layers that have not asked yet.
const MAX_BYTES: usize = 128 << 20;

/// Tokens before the first trial.
const WARM_UP_TOKENS: u32 = 8;
/// Tokens of a trial, at least.
const TRIAL_TOKENS: u32 = 16;
/// Experts that each setting must have read in a trial for a valid comparison.
const MIN_TRIAL_READS: u64 = 16;

/// Tokens between the first two trials. The interval doubles with each trial.
const KEEP_TOKENS: u32 = 128;
const MAX_KEEP_TOKENS: u32 = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrialStage {
    WarmUp,
    /// Tokens with and without prefetching alternate.
    Trial,
    /// The better setting of the last trial is in use.
    Settled,
}

/// The prefetches in progress, and the trial.
pub struct Prefetcher {
    setting: Prefetch,
    is_on: bool,
    stage: TrialStage,
    /// Tokens left in this stage.
    tokens_left: u32,
    /// Tokens of the next `Settled` stage.
    keep_tokens: u32,
    layer: usize,
    /// Stall seconds without and with prefetching.
    stall_seconds: [f64; 2],
    /// Experts that had to be read, without and with prefetching.
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
            // Prefetched experts pin their slots until their layer has asked, so they may take an eighth of all slots.
            max_in_flight: (MAX_BYTES / slot_bytes.max(1)).min(slots / 8),
            in_flight: Vec::new(),
        }
    }

    /// A prompt needs nearly all experts, so its predictions always pay. Trials apply to decoding only.
    pub fn is_on(&self, phase: PassKind) -> bool {
        let is_on = match phase {
            PassKind::Prefill => self.setting != Prefetch::Off,
            PassKind::Decode => self.is_on,
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

    /// Removes and returns the first prefetch for which `can_take` holds.
    pub fn take_first(&mut self, can_take: impl Fn(SlotId) -> bool) -> Option<SlotId> {
        let at = self.in_flight.iter().position(|&(_, slot)| can_take(slot))?;
        Some(self.in_flight.remove(at).1)
    }

    /// Removes and returns one prefetch of a layer that asks now.
    pub fn take_for_layer(&mut self, layer: usize) -> Option<SlotId> {
        let at = self.in_flight.iter().position(|(other, _)| *other == layer)?;
        Some(self.in_flight.swap_remove(at).1)
    }

    /// Records that `layer` asks while decoding. A layer that is not after the previous one starts a new token.
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
                let [without, with] = [0, 1].map(|way| self.stall_seconds[way] / self.reads[way] as f64);
                // A gain below 2 % is noise, and prefetching has a cost.
                self.is_on = with < 0.98 * without;
                tracing::debug!(with, without, on = self.is_on, "prefetch trial: stall seconds per expert read");
                (self.stage, self.tokens_left) = (TrialStage::Settled, self.keep_tokens);
                self.keep_tokens = (self.keep_tokens * 2).min(MAX_KEEP_TOKENS);
            }
            TrialStage::WarmUp | TrialStage::Settled if self.tokens_left == 0 => {
                (self.stage, self.tokens_left) = (TrialStage::Trial, TRIAL_TOKENS);
                (self.stall_seconds, self.reads) = ([0.0; 2], [0; 2]);
            }
            TrialStage::WarmUp | TrialStage::Settled => {}
        }
    }

    /// Counts the experts of a layer that had to be read: missing ones and prefetched ones.
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

    /// Runs `tokens` tokens of two layers in which an expert costs `with` or `without` seconds; returns how many of
    /// them had reading prefetcher on.
    fn run(prefetcher: &mut Prefetcher, tokens: usize, with: f64, without: f64) -> usize {
        let mut on = 0;
        for _ in 0..tokens {
            for layer in 0..2 {
                prefetcher.start_layer(layer);
                prefetcher.count_reads(4, 0);
                prefetcher.count_stall(4.0 * if prefetcher.is_on(PassKind::Decode) { with } else { without });
            }
            on += usize::from(prefetcher.is_on(PassKind::Decode));
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
        assert!(!prefetcher.is_on(PassKind::Decode));
        run(&mut prefetcher, 2000, 0.5e-3, 1e-3);
        assert!(prefetcher.is_on(PassKind::Decode));
    }

    #[test]
    fn budget_limits_bytes_and_share_of_slots() {
        assert_eq!(Prefetcher::new(Prefetch::On, 10_000, 16 << 20).max_in_flight, 8);
        assert_eq!(Prefetcher::new(Prefetch::On, 16, 1 << 20).max_in_flight, 2);
        assert!(!Prefetcher::new(Prefetch::On, 4, 1 << 20).is_on(PassKind::Decode));
    }

    /// Stages by token: 8 tokens of warm-up, then alternating tokens: at least 16, and until each setting has read 16
    /// experts. Then the better setting for 128 tokens, and twice as many after each further trial.
    #[test]
    fn trial_stages_have_their_lengths() {
        for (experts, trial) in [(4, 16), (1, 32), (0, 500)] {
            let mut prefetcher = Prefetcher::new(Prefetch::Auto, 1000, 1 << 20);
            let mut ways = Vec::new();
            for _ in 0..600 {
                // One layer, so every call starts a token.
                prefetcher.start_layer(0);
                ways.push(prefetcher.is_on(PassKind::Decode));
                prefetcher.count_reads(experts / 2, experts - experts / 2);
                prefetcher.count_stall(if prefetcher.is_on(PassKind::Decode) { 0.97 } else { 1.0 });
            }
            assert!(ways[..8].iter().all(|on| *on));
            assert!(ways[8..7 + trial].iter().enumerate().all(|(token, on)| *on == (token % 2 == 1)), "{experts}");
            if experts > 0 {
                assert!(ways[7 + trial..7 + trial + 128].iter().all(|on| *on), "{experts}: a gain of 3 % counts");
                let next = 7 + trial + 129;
                assert!(!ways[next], "{experts}: the next trial");
                assert!(ways[next + trial - 1..600].iter().take(256).all(|on| *on), "{experts}");
            }
        }
        for setting in [Prefetch::On, Prefetch::Off] {
            let mut prefetcher = Prefetcher::new(setting, 1000, 1 << 20);
            assert_eq!(run(&mut prefetcher, 100, 1.0, 0.1), if setting == Prefetch::On { 100 } else { 0 });
            assert_eq!(prefetcher.is_on(PassKind::Prefill), setting == Prefetch::On);
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
