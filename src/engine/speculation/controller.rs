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
//! has not been tried is taken to cost a little more than the nearest narrower one, or to lie between the two beside it.
//!
//! The ledger has everything that plain decoding would not have spent: cycles, steps that are slower behind them, and hidden
//! rows that are copied for a draft. So nothing is copied either, as long as no probe is near. A probe begins when the ledger
//! could bear what the last one cost, and half of what may be lost would still be there: for what no ledger sees.

/// Widths that are tried: rows of a verify, the token that is certain among them.
const WIDTHS: [usize; 8] = [2, 3, 4, 5, 6, 8, 12, 16];
/// The share of the time that may be lost, and the part of it that may be lost to probes.
const ALLOWANCE: f64 = 0.02;
const PROBES: f64 = 0.01;
/// The gain from which on speculating is worth going on with.
const MARGIN: f64 = 1.05;
/// Plain steps before the first decision, and to measure a plain step anew.
const CALIBRATION: u32 = 8;
/// Right and tried in each place, before anything is known: hopeful enough to be tried.
const HOPE: [f64; 2] = [1.4, 2.0];
/// Cycles of a probe. In the first the draft reads what it has missed, so only the verify's time is a measure.
const PROBE: u32 = 3;
/// A probe is over when two cycles gained no more than this, or the first would not have with a draft that takes no time.
const HOPELESS: f64 = 0.75;
/// Plain steps behind a cycle that are held against those before it: caches are turning over.
const BEHIND: u32 = 8;
/// Tokens before a probe from which on the draft follows the model: enough to know where it is.
const LEAD: u64 = 64;
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
    /// Seconds of a plain step; of the first two after a cycle nothing is learned. And what they were before that.
    plain: Option<f64>,
    before: Option<f64>,
    fresh: u32,
    /// Seconds of a cycle, by the index of its width; of the last one without its draft.
    cycles: [Option<f64>; WIDTHS.len()],
    verify: f64,
    /// Accepted and tried, by place, older cycles counting less.
    accepted: [[f64; 2]; 15],
    /// Seconds saved and seconds in all.
    saved: f64,
    total: f64,
    /// What had been saved when a probe began, until it is known what it cost; and what the last one cost.
    probed: Option<f64>,
    dear: f64,
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
            before: None,
            fresh: 0,
            cycles: [None; WIDTHS.len()],
            verify: 0.0,
            accepted: [HOPE; 15],
            saved: 0.0,
            total: 0.0,
            probed: None,
            dear: 0.0,
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
        let mode = self.mode;
        match mode {
            Mode::Calibrate { .. } => 1,
            Mode::Plain => self.probe(),
            Mode::Probe { left, rows } if left == 0 || self.is_hopeless(left, rows) => match self.best(true) {
                Some((gain, rows)) if gain > MARGIN => {
                    self.mode = Mode::Speculating { cycles: 0 };
                    (self.probed, self.dear) = (None, 0.0);
                    self.backoff = BACKOFF[0];
                    rows
                }
                _ => self.rest(2 * self.backoff),
            },
            Mode::Probe { rows, .. } => rows,
            Mode::Speculating { cycles } => match self.best(true) {
                Some((gain, rows)) if gain >= 1.0 && self.allowed(ALLOWANCE) >= 0.0 => {
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

    /// The name of the mode, as metrics have it.
    pub fn state(&self) -> &'static str {
        match self.mode {
            Mode::Calibrate { .. } => "calibrate",
            Mode::Plain => "plain",
            Mode::Probe { .. } => "probe",
            Mode::Speculating { .. } => "speculate",
        }
    }

    /// True if a draft should follow the model: it may be asked soon.
    pub fn follows(&self) -> bool {
        match self.setting {
            Speculate::Off => false,
            Speculate::Force => true,
            Speculate::Auto => {
                self.mode != Mode::Plain || self.tokens + LEAD >= self.next_probe && self.allowed(PROBES) > 0.0
            }
        }
    }

    /// A part of a prompt took so long, and following it for a draft that much more: free as far as the prompt's time allows.
    pub fn prompted(&mut self, seconds: f64, following: f64) {
        self.saved -= (following - ALLOWANCE * seconds).max(0.0);
    }

    /// A plain step took so long, and following it for a draft that much more.
    pub fn plain(&mut self, seconds: f64, following: f64) {
        self.total += seconds + following;
        self.saved -= following;
        self.tokens += 1;
        self.fresh += 1;
        // A step that waited for something else is no measure.
        let beyond = |mean: f64| seconds.min(3.0 * mean) - mean;
        // The first behind a cycle pay for it.
        if let Some(mean) = self.before.filter(|_| self.fresh <= BEHIND) {
            self.saved -= beyond(mean);
        }
        if self.fresh > 2 {
            self.plain = Some(self.plain.map_or(seconds, |mean| mean + 0.1 * beyond(mean)));
        }
        if let Some(saved) = self.probed.take_if(|_| self.mode == Mode::Plain && self.fresh >= BEHIND) {
            self.dear = saved - self.saved;
        }
        if let Mode::Calibrate { left, .. } = &mut self.mode {
            *left = left.saturating_sub(1);
        }
    }

    /// A cycle verified `drafted` tokens, of which the first `accepted` were right, in so long, of which `drafting` until they
    /// were drafted. Returns the seconds that it saved, or, below zero, lost.
    pub fn cycle(&mut self, drafted: usize, accepted: usize, seconds: f64, drafting: f64) -> f64 {
        let committed = accepted as u64 + 1;
        self.total += seconds;
        self.tokens += committed;
        (self.fresh, self.before, self.verify) = (0, self.plain, seconds - drafting);
        let saved = self.plain.map_or(0.0, |plain| committed as f64 * plain - seconds);
        self.saved += saved;
        let first = matches!(self.mode, Mode::Probe { left: PROBE, .. });
        if let Some(index) = WIDTHS.iter().position(|&rows| rows > drafted).filter(|_| !first) {
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
        let tried = |index: usize| Some((WIDTHS[index], self.cycles[index]?));
        let (rows, seconds) = (0..index).rev().find_map(tried).unwrap_or((1, plain));
        let row = match (index + 1..WIDTHS.len()).find_map(tried) {
            Some((wider, dearer)) => (dearer - seconds).max(0.0) / (wider - rows) as f64,
            None => ROW * plain,
        };
        Some(seconds + row * (WIDTHS[index] - rows) as f64)
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
        let missing = cost.max(self.dear) - self.allowed(PROBES);
        if gain < 1.0 || missing > 0.0 {
            if gain < 1.0 {
                // Old counts fade, and old times: texts change, and caches.
                self.backoff = (2 * self.backoff).min(BACKOFF[1]);
                self.accepted.iter_mut().for_each(|[right, tried]| {
                    (*right, *tried) = (0.75 * *right + 0.25 * HOPE[0], 0.75 * *tried + 0.25 * HOPE[1]);
                });
                for (seconds, rows) in self.cycles.iter_mut().zip(WIDTHS) {
                    let hope = plain * (1.0 + ROW * (rows - 1) as f64);
                    *seconds = seconds.map(|seconds| 0.75 * seconds + 0.25 * hope);
                }
            }
            // Plain steps earn what is missing.
            let tokens = missing.max(0.0) / (PROBES * plain);
            self.next_probe = self.tokens + self.backoff.max(tokens.min(BACKOFF[1] as f64) as u64);
            return 1;
        }
        self.mode = Mode::Probe { left: PROBE, rows };
        self.probed = Some(self.saved);
        rows
    }

    /// Seconds that may be lost now: a share of what plain decoding would have taken so far.
    fn allowed(&self, share: f64) -> f64 {
        self.saved + share * (self.total + self.saved)
    }

    /// One or two cycles of a probe are enough to see that it does not pay, if they cost so much.
    fn is_hopeless(&mut self, left: u32, rows: usize) -> bool {
        match PROBE - left {
            1 => {
                let gain = self.plain.map_or(0.0, |plain| self.expected(rows) * plain / self.verify);
                if let Some(index) = WIDTHS.iter().position(|&width| width == rows).filter(|_| gain < HOPELESS) {
                    // It takes as long at least.
                    self.cycles[index].get_or_insert(self.verify);
                }
                gain < HOPELESS
            }
            2 => self.best(true).is_none_or(|(gain, _)| gain < HOPELESS),
            _ => false,
        }
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
mod tests;
