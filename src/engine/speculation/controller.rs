//! Decides whether to speculate, and how wide, from measured times, so that a wrong guess costs at most 2 % of the time
//! and one probe.
//!
//! ```text
//! WARM (8 plain steps) -> PLAIN <-> PROBE (3 cycles) -> SPECULATE
//!                           ^                              |  gain below 1, or the ledger in the red
//!                           +------------------------------+
//! ```
//! A cycle of `n` rows verifies `n - 1` drafted tokens. With `a[j]` the share of drafts in place `j` that were accepted when
//! all before them were, it commits `E(n) = 1 + sum over r of (a[1] .. a[r])` tokens in the mean, and pays if that takes less
//! time than as many plain steps: `gain(n) = E(n) * t1 / t(n)`. Times are measured with the expert reads in them; a width that
//! has not been tried is taken to cost a little more than the nearest narrower one.

/// Widths that are tried: rows of a verify, the token that is certain among them.
const WIDTHS: [usize; 8] = [2, 3, 4, 5, 6, 8, 12, 16];
/// The share of the time that may be lost.
const ALLOWANCE: f64 = 0.02;
/// The gain from which on speculating is worth going on with.
const MARGIN: f64 = 1.05;
/// Plain steps before the first decision, and to measure a plain step anew.
const CALIBRATION: u32 = 8;
/// Cycles of a probe.
const PROBE: u32 = 3;
/// A row more than measured costs this share of a plain step, until it is measured.
const ROW: f64 = 0.15;
/// Tokens between probes: the least, the most.
const BACKOFF: [u64; 2] = [32, 2048];
/// After so many cycles plain steps are measured again; after so many a neighbouring width is tried.
const RECALIBRATE: u32 = 64;
const NEIGHBOUR: u32 = 16;

/// The operator's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculate {
    /// As long as it pays.
    #[default]
    Auto,
    Off,
    /// At the full width whatever it costs, for tests and measurements.
    Force,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Plain steps are measured; then on to this.
    Calibrate {
        left: u32,
        speculating: bool,
    },
    Plain,
    Probe {
        left: u32,
        rows: usize,
    },
    Speculating {
        cycles: u32,
    },
}

/// Decides each step's width. Knows times and counts, no clock and no model.
#[derive(Debug, Clone)]
pub struct Controller {
    setting: Speculate,
    /// The most rows.
    cap: usize,
    mode: Mode,
    /// Seconds of a plain step; of the first two after a cycle nothing is learned, since caches are still turning over.
    plain: Option<f64>,
    fresh: u32,
    /// Seconds of a cycle, by the index of its width.
    cycles: [Option<f64>; WIDTHS.len()],
    /// Accepted and tried, by place, older cycles counting less.
    accepted: [[f64; 2]; 15],
    /// Seconds saved and seconds in all.
    saved: f64,
    total: f64,
    tokens: u64,
    next_probe: u64,
    backoff: u64,
    /// Alternates where a neighbouring width is looked for.
    wider: bool,
}

impl Controller {
    /// At most `drafts` tokens are drafted at a time.
    pub fn new(setting: Speculate, drafts: usize) -> Self {
        Self {
            setting,
            cap: (drafts + 1).clamp(1, WIDTHS[WIDTHS.len() - 1]),
            mode: Mode::Calibrate { left: CALIBRATION, speculating: false },
            plain: None,
            fresh: 0,
            cycles: [None; WIDTHS.len()],
            // As if two of three had been accepted: hopeful enough to be tried.
            accepted: [[1.4, 2.0]; 15],
            saved: 0.0,
            total: 0.0,
            tokens: 0,
            next_probe: 16,
            backoff: BACKOFF[0],
            wider: false,
        }
    }

    /// Rows of the next step: 1 is a plain one.
    pub fn rows(&mut self) -> usize {
        match self.setting {
            Speculate::Off => return 1,
            Speculate::Force => return self.cap,
            Speculate::Auto if self.cap < 2 => return 1,
            Speculate::Auto => {}
        }
        if let Mode::Calibrate { left: 0, speculating } = self.mode {
            self.mode = if speculating { Mode::Speculating { cycles: 1 } } else { Mode::Plain };
        }
        match self.mode {
            Mode::Calibrate { .. } => 1,
            Mode::Plain => self.probe(),
            Mode::Probe { left: 0, .. } => match self.best(true) {
                Some((gain, rows)) if gain > MARGIN => {
                    self.mode = Mode::Speculating { cycles: 0 };
                    self.backoff = BACKOFF[0];
                    rows
                }
                _ => self.rest(2 * self.backoff),
            },
            Mode::Probe { rows, .. } => rows,
            Mode::Speculating { cycles } => match self.best(true) {
                Some((gain, rows)) if gain >= 1.0 && self.saved >= -ALLOWANCE * self.total => {
                    if cycles > 0 && cycles.is_multiple_of(RECALIBRATE) {
                        self.mode = Mode::Calibrate { left: CALIBRATION, speculating: true };
                        return 1;
                    }
                    if cycles > 0 && cycles.is_multiple_of(NEIGHBOUR) { self.neighbour(rows) } else { rows }
                }
                _ => self.rest(2 * BACKOFF[0]),
            },
        }
    }

    /// A plain step took so long.
    pub fn plain(&mut self, seconds: f64) {
        self.total += seconds;
        self.tokens += 1;
        self.fresh += 1;
        if self.fresh > 2 {
            // A step that waited for something else is no measure.
            self.plain = Some(self.plain.map_or(seconds, |mean| mean + 0.1 * (seconds.min(3.0 * mean) - mean)));
        }
        if let Mode::Calibrate { left, .. } = &mut self.mode {
            *left = left.saturating_sub(1);
        }
    }

    /// A cycle verified `drafted` tokens, of which the first `accepted` were right, in so long, drafting included. Returns the
    /// seconds that it saved, or, below zero, lost.
    pub fn cycle(&mut self, drafted: usize, accepted: usize, seconds: f64) -> f64 {
        let committed = accepted as u64 + 1;
        self.total += seconds;
        self.tokens += committed;
        self.fresh = 0;
        let saved = self.plain.map_or(0.0, |plain| committed as f64 * plain - seconds);
        self.saved += saved;
        if let Some(index) = WIDTHS.iter().position(|&rows| rows > drafted) {
            let mean = &mut self.cycles[index];
            *mean = Some(mean.map_or(seconds, |mean| mean + 0.2 * (seconds - mean)));
        }
        for (place, [right, tried]) in self.accepted.iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            *right = *right * 0.95 + f64::from(u8::from(place < accepted));
            *tried = *tried * 0.95 + 1.0;
        }
        match &mut self.mode {
            Mode::Probe { left, .. } => *left = left.saturating_sub(1),
            Mode::Speculating { cycles } => *cycles += 1,
            Mode::Calibrate { .. } | Mode::Plain => {}
        }
        saved
    }

    /// Tokens that a cycle commits in the mean.
    fn expected(&self, rows: usize) -> f64 {
        let mut all = 1.0;
        self.accepted.iter().take(rows - 1).fold(1.0, |sum, [right, tried]| {
            all *= right / tried;
            sum + all
        })
    }

    /// Seconds of a cycle, measured or guessed.
    fn seconds(&self, index: usize) -> Option<f64> {
        if let Some(measured) = self.cycles[index] {
            return Some(measured);
        }
        let plain = self.plain?;
        let narrower = (0..index).rev().find_map(|below| Some((WIDTHS[below], self.cycles[below]?)));
        let (rows, seconds) = narrower.unwrap_or((1, plain));
        Some(seconds + ROW * plain * (WIDTHS[index] - rows) as f64)
    }

    /// The best gain and its width, of those that were measured or of all.
    fn best(&self, measured: bool) -> Option<(f64, usize)> {
        let plain = self.plain?;
        let widths = WIDTHS
            .iter()
            .enumerate()
            .filter(|&(index, &rows)| rows <= self.cap && (!measured || self.cycles[index].is_some()));
        widths
            .filter_map(|(index, &rows)| Some((self.expected(rows) * plain / self.seconds(index)?, rows)))
            .max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Begins a probe if one is due, promises something, and can be paid for.
    fn probe(&mut self) -> usize {
        if self.tokens < self.next_probe {
            return 1;
        }
        let (Some(plain), Some((gain, rows))) = (self.plain, self.best(false)) else { return 1 };
        let index = WIDTHS.iter().position(|&width| width == rows).unwrap_or(0);
        let cost = self.seconds(index).map_or(f64::INFINITY, |seconds| 2.0 * (seconds - plain));
        if gain < 1.0 || self.saved + ALLOWANCE * self.total < cost {
            self.next_probe = self.tokens + self.backoff;
            return 1;
        }
        self.mode = Mode::Probe { left: PROBE, rows };
        rows
    }

    /// Goes on without speculating, for so many tokens at least.
    fn rest(&mut self, tokens: u64) -> usize {
        self.backoff = tokens.min(BACKOFF[1]);
        self.next_probe = self.tokens + self.backoff;
        self.mode = Mode::Plain;
        1
    }

    /// A width beside this one.
    fn neighbour(&mut self, rows: usize) -> usize {
        self.wider = !self.wider;
        let index = WIDTHS.iter().position(|&width| width == rows).unwrap_or(0);
        let other = if self.wider { index + 1 } else { index.saturating_sub(1) };
        WIDTHS.get(other).copied().filter(|&width| width <= self.cap).unwrap_or(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise of about 15 % and events, from a counter: the same at every run.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }

        fn noise(&mut self) -> f64 {
            0.75 + 0.5 * self.roll()
        }
    }

    /// Experts that `n` rows ask for, in units of one row's, when they choose 8 of 256 independently.
    fn union(rows: usize) -> f64 {
        256.0 * (1.0 - (1.0 - 8.0f64 / 256.0).powi(rows as i32)) / 8.0
    }

    /// The time of 1,500 tokens, in that of plain steps. `cost` is of a pass of so many rows, drafting included.
    fn run(
        controller: &mut Controller,
        dice: &mut Dice,
        cost: impl Fn(usize) -> f64,
        right: impl Fn(usize, usize) -> f64,
    ) -> f64 {
        let (mut time, mut tokens) = (0.0, 0);
        while tokens < 1500 {
            let rows = controller.rows();
            let seconds = cost(rows) * dice.noise();
            let accepted = (0..rows - 1).take_while(|&place| dice.roll() < right(tokens + place, place)).count();
            match rows {
                1 => controller.plain(seconds),
                _ => drop(controller.cycle(rows - 1, accepted, seconds)),
            }
            time += seconds;
            tokens += accepted + 1;
        }
        time / (cost(1) * tokens as f64)
    }

    fn mean(cost: impl Fn(usize) -> f64 + Copy, right: impl Fn(usize, usize) -> f64 + Copy) -> (f64, f64) {
        let runs = (1..=20).map(|seed| run(&mut Controller::new(Speculate::Auto, 15), &mut Dice(seed), cost, right));
        let runs: Vec<f64> = runs.collect();
        (runs.iter().sum::<f64>() / 20.0, runs.iter().copied().fold(0.0, f64::max))
    }

    #[test]
    fn what_pays_is_found() {
        let resident = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
        let (mean, _) = mean(resident, |_, _| 0.82);
        // The best fixed width takes 0.37 of the time.
        assert!(mean < 0.45, "{mean}");
    }

    #[test]
    fn what_does_not_pay_costs_two_percent_at_most() {
        let resident = |rows: usize| 1.0 + 0.06 * (rows - 1) as f64 + if rows > 1 { 0.08 } else { 0.0 };
        let disk = |rows: usize| 0.1 + 0.9 * union(rows) + if rows > 1 { 0.03 } else { 0.0 };
        for (what, (mean, worst)) in [
            ("bad draft", mean(resident, |_, _| 0.15)),
            ("never right", mean(resident, |_, _| 0.0)),
            ("good draft, cold disk", mean(disk, |_, _| 0.82)),
            ("broken draft, cold disk", mean(disk, |_, _| 0.02)),
            ("right every 300 tokens", mean(resident, |token, _| f64::from(u8::from(token % 300 == 0)))),
        ] {
            assert!(mean < 1.02 && worst < 1.04, "{what}: {mean}, at worst {worst}");
        }
    }

    #[test]
    fn a_draft_that_turns_bad_is_left_and_one_that_turns_good_is_found() {
        let cost = |rows: usize| 0.6 + 0.05 * rows as f64 + 0.35 * union(rows) + if rows > 1 { 0.04 } else { 0.0 };
        let (mean, worst) = mean(cost, |token, _| if token / 300 % 2 == 1 { 0.93 } else { 0.25 });
        assert!(mean < 1.01 && worst < 1.03, "{mean}, at worst {worst}");
    }

    #[test]
    fn off_is_off_and_force_is_the_full_width() {
        assert_eq!(Controller::new(Speculate::Off, 8).rows(), 1);
        assert_eq!(Controller::new(Speculate::Force, 4).rows(), 5);
        assert_eq!(Controller::new(Speculate::Force, 99).rows(), 16);
        assert_eq!(Controller::new(Speculate::Auto, 0).rows(), 1);
    }
}
