//! Reading ahead: which predicted experts are under way, and whether predicting pays.
//!
//! The benefit is measured, not assumed: for a few dozen tokens every other one is read ahead for, and the two ways are
//! compared by the time the model stood still per expert that had to come from disk. The better way is kept for a
//! while, longer each time. Until the first trial is over predictions are read ahead: a cold start gains most.

use super::{Phase, slots::SlotId};

/// `--prefetch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// On while it measures better than off.
    #[default]
    Auto,
    On,
    Off,
}

/// Bytes that may be read ahead for a layer that has not asked yet.
const BUDGET: usize = 128 << 20;

/// Tokens before the first trial, and in a trial.
const COLD: u32 = 8;
const TRIAL: u32 = 16;

/// Experts that each way must have brought from disk for a trial to say anything.
const ENOUGH: u64 = 16;

/// Tokens the better way is kept for at first, and at most.
const KEEP: u32 = 128;
const KEEP_MOST: u32 = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Cold,
    /// Tokens with and without take turns.
    Try,
    Keep,
}

/// The predictions under way, and the trial of reading ahead.
pub struct Ahead {
    setting: Prefetch,
    on: bool,
    stage: Stage,
    /// Tokens left in this stage, and how many the next `Keep` has.
    left: u32,
    keep: u32,
    layer: usize,
    /// Seconds stood still, and experts that came from disk: without, with.
    stall: [f64; 2],
    needed: [u64; 2],
    most: usize,
    sent: Vec<(usize, SlotId)>,
}

impl Ahead {
    pub fn new(setting: Prefetch, slots: usize, slot_bytes: usize) -> Self {
        Self {
            setting,
            on: setting != Prefetch::Off,
            stage: Stage::Cold,
            left: COLD,
            keep: KEEP,
            layer: 0,
            stall: [0.0; 2],
            needed: [0; 2],
            // Predictions hold their slots until their layer has come: they must leave most of the pool alone.
            most: (BUDGET / slot_bytes.max(1)).min(slots / 8),
            sent: Vec::new(),
        }
    }

    /// A prompt asks for nearly all experts, so guesses about it are always worth a read; trials are about decoding.
    pub fn is_on(&self, phase: Phase) -> bool {
        let on = match phase {
            Phase::Prefill => self.setting != Prefetch::Off,
            Phase::Decode => self.on,
        };
        on && self.most > 0
    }

    /// True if the budget allows one more.
    pub fn has_room(&self) -> bool {
        self.sent.len() < self.most
    }

    pub fn sent(&mut self, layer: usize, slot: SlotId) {
        self.sent.push((layer, slot));
    }

    /// Takes the first prediction that `may_go` off the list, before its layer has come.
    pub fn give_up(&mut self, may_go: impl Fn(SlotId) -> bool) -> Option<SlotId> {
        let at = self.sent.iter().position(|&(_, slot)| may_go(slot))?;
        Some(self.sent.remove(at).1)
    }

    /// Takes one prediction for a layer that asks now off the list.
    pub fn settle(&mut self, layer: usize) -> Option<SlotId> {
        let at = self.sent.iter().position(|(other, _)| *other == layer)?;
        Some(self.sent.swap_remove(at).1)
    }

    /// `layer` asks while decoding; going back to an earlier layer is a new token.
    pub fn tick(&mut self, layer: usize) {
        let new_token = layer <= self.layer;
        self.layer = layer;
        if !new_token || self.setting != Prefetch::Auto {
            return;
        }
        self.left = self.left.saturating_sub(1);
        match self.stage {
            Stage::Try if self.left > 0 || self.needed.iter().any(|&needed| needed < ENOUGH) => self.on = !self.on,
            Stage::Try => {
                let [without, with] = [0, 1].map(|way| self.stall[way] / self.needed[way] as f64);
                // Two in a hundred is noise, and a prediction is not free.
                self.on = with < 0.98 * without;
                tracing::debug!(with, without, on = self.on, "reading ahead, seconds stalled an expert");
                (self.stage, self.left) = (Stage::Keep, self.keep);
                self.keep = (self.keep * 2).min(KEEP_MOST);
            }
            Stage::Cold | Stage::Keep if self.left == 0 => {
                (self.stage, self.left) = (Stage::Try, TRIAL);
                (self.stall, self.needed) = ([0.0; 2], [0; 2]);
            }
            Stage::Cold | Stage::Keep => {}
        }
    }

    /// A layer found `misses` experts nowhere and `foreseen` because they had been predicted.
    pub fn looked_up(&mut self, misses: u64, foreseen: u64) {
        self.needed[usize::from(self.on)] += misses + foreseen;
    }

    pub fn stalled(&mut self, seconds: f64) {
        self.stall[usize::from(self.on)] += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `tokens` tokens of two layers in which an expert costs `with` or `without` seconds; returns how many of
    /// them had reading ahead on.
    fn run(ahead: &mut Ahead, tokens: usize, with: f64, without: f64) -> usize {
        let mut on = 0;
        for _ in 0..tokens {
            for layer in 0..2 {
                ahead.tick(layer);
                ahead.looked_up(4, 0);
                ahead.stalled(4.0 * if ahead.is_on(Phase::Decode) { with } else { without });
            }
            on += usize::from(ahead.is_on(Phase::Decode));
        }
        on
    }

    #[test]
    fn what_pays_is_kept_and_what_does_not_is_rarely_tried() {
        let mut pays = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut pays, 4000, 0.5e-3, 1e-3) > 3700);
        let mut costs = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut costs, 4000, 1.1e-3, 1e-3) < 120);
        let mut same = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
        assert!(run(&mut same, 4000, 1e-3, 1e-3) < 120);
    }

    #[test]
    fn a_change_of_mind_takes_one_more_trial() {
        let mut ahead = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
        run(&mut ahead, 200, 1e-3, 0.5e-3);
        assert!(!ahead.is_on(Phase::Decode));
        run(&mut ahead, 2000, 0.5e-3, 1e-3);
        assert!(ahead.is_on(Phase::Decode));
    }

    #[test]
    fn the_budget_is_bytes_and_never_most_of_the_pool() {
        assert_eq!(Ahead::new(Prefetch::On, 10_000, 16 << 20).most, 8);
        assert_eq!(Ahead::new(Prefetch::On, 16, 1 << 20).most, 2);
        assert!(!Ahead::new(Prefetch::On, 4, 1 << 20).is_on(Phase::Decode));
    }

    /// The stages of a trial, token by token: eight as they come, then with and without in turn, at least sixteen and until each
    /// way has brought sixteen experts; then the better way for 128 tokens, and for twice as many each time after.
    #[test]
    fn a_trial_has_its_length() {
        for (experts, trial) in [(4, 16), (1, 32), (0, 500)] {
            let mut ahead = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
            let mut ways = Vec::new();
            for _ in 0..600 {
                // One layer: it comes again with every token.
                ahead.tick(0);
                ways.push(ahead.is_on(Phase::Decode));
                ahead.looked_up(experts / 2, experts - experts / 2);
                ahead.stalled(if ahead.is_on(Phase::Decode) { 0.97 } else { 1.0 });
            }
            assert!(ways[..8].iter().all(|on| *on));
            assert!(ways[8..7 + trial].iter().enumerate().all(|(token, on)| *on == (token % 2 == 1)), "{experts}");
            if experts > 0 {
                assert!(ways[7 + trial..7 + trial + 128].iter().all(|on| *on), "{experts}: 3 in a hundred pay");
                let next = 7 + trial + 129;
                assert!(!ways[next], "{experts}: the next trial");
                assert!(ways[next + trial - 1..600].iter().take(256).all(|on| *on), "{experts}");
            }
        }
        for setting in [Prefetch::On, Prefetch::Off] {
            let mut ahead = Ahead::new(setting, 1000, 1 << 20);
            assert_eq!(run(&mut ahead, 100, 1.0, 0.1), if setting == Prefetch::On { 100 } else { 0 });
            assert_eq!(ahead.is_on(Phase::Prefill), setting == Prefetch::On);
        }
    }

    #[test]
    fn a_layer_that_was_passed_is_no_new_token() {
        let mut ahead = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
        let mut tokens = Vec::new();
        for layer in [0, 1, 2, 0, 2, 2, 1, 5, 6] {
            let before = ahead.left;
            ahead.tick(layer);
            tokens.push(before - ahead.left);
        }
        assert_eq!(tokens, [1, 0, 0, 1, 0, 1, 1, 0, 0]);
    }

    #[test]
    fn predictions_leave_the_list_once() {
        let mut ahead = Ahead::new(Prefetch::On, 16, 1 << 20);
        assert!(ahead.has_room());
        ahead.sent(1, SlotId(4));
        assert!(ahead.has_room());
        ahead.sent(2, SlotId(5));
        assert!(!ahead.has_room());
        assert_eq!((ahead.settle(3), ahead.give_up(|slot| slot.0 > 5)), (None, None));
        assert_eq!((ahead.settle(2), ahead.settle(2)), (Some(SlotId(5)), None));
        assert_eq!((ahead.give_up(|slot| slot.0 == 4), ahead.settle(1)), (Some(SlotId(4)), None));
        assert!(ahead.has_room());
    }

    #[test]
    fn only_what_pays_two_in_a_hundred_is_kept() {
        for (with, kept) in [(0.985, false), (0.975, true)] {
            let mut ahead = Ahead::new(Prefetch::Auto, 1000, 1 << 20);
            run(&mut ahead, 60, with, 1.0);
            assert_eq!((ahead.stage, ahead.on), (Stage::Keep, kept), "{with}");
        }
    }
}
