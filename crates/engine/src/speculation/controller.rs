//! Decides from measured times whether to speculate, and how many rows to verify.
//!
//! Wrong decisions cost at most 2 % of the total time plus one probe.
//!
//! ```text
//! CALIBRATE (8 plain steps) -> PLAIN <-> PROBE (3 cycles) -> SPECULATE
//!                                ^                              |  gain below 1, or the loss budget is used up
//!                                +------------------------------+
//! ```
//!
//! A *cycle* drafts `n - 1` tokens and verifies `n` rows. `n` is the *width* of the cycle. Let `a[j]` be the share of
//! drafts whose position `j` was accepted, given that all earlier positions were accepted. The mean number of tokens
//! from a cycle is `E(n) = 1 + sum over r < n of (a[1] * .. * a[r])`. A plain step takes the time `t1` and a cycle
//! takes the time `t(n)`. Both include expert reads. A cycle saves time if `gain(n) = E(n) * t1 / t(n)` is above 1. For
//! a width that was never tried, `t(n)` is estimated from its neighbours.
//!
//! The balance of seconds saved includes all costs of speculation: cycles, slower steps after them, and copying hidden
//! rows for a draft. Hidden rows are therefore copied only shortly before a probe. A probe starts only if half of the
//! allowed loss covers its expected cost and the cost of the previous probe. The other half is for costs that are not
//! measured.

/// Widths to try: number of rows per verify, including the row of the last sampled token.
const WIDTHS: [usize; 8] = [2, 3, 4, 5, 6, 8, 12, 16];
/// Largest loss from speculation, as a share of the total decoding time.
const MAX_LOSS: f64 = 0.02;
/// Largest loss from probes, as a share of the total decoding time.
const MAX_PROBE_LOSS: f64 = 0.01;
/// Minimum gain of a probe to start speculation.
const MIN_START_GAIN: f64 = 1.05;
/// Number of plain steps to measure before the first decision, and at each later recalibration.
const CALIBRATION_STEPS: u32 = 8;
/// Initial counts of accepted and verified drafts per position: optimistic enough to start a probe.
const PRIOR: [f64; 2] = [1.4, 2.0];
/// Number of cycles per probe. In the first cycle the draft evaluates the whole sequence, so only the time of the
/// verify counts.
const PROBE_CYCLES: u32 = 3;
/// A probe ends early if two cycles have less than this gain, or if the first cycle would have less gain even without
/// the draft's time.
const HOPELESS_GAIN: f64 = 0.75;
/// Number of plain steps after a cycle whose extra time counts as a cost of the cycle. The cycle may have evicted the
/// cached experts that these steps need.
const AFTERMATH_STEPS: u32 = 8;
/// Copying of hidden rows starts this many tokens before a probe, so that the draft has context.
const OBSERVE_LEAD: u64 = 64;
/// Estimated cost of an additional row, as a share of a plain step.
const ROW_COST: f64 = 0.15;
/// Minimum and maximum number of tokens between two probes.
const BACKOFF: [u64; 2] = [32, 2048];
/// Number of cycles after which plain steps are measured again.
const RECALIBRATE_CYCLES: u32 = 64;
/// Number of cycles after which a neighbouring width is tried.
const NEIGHBOUR_CYCLES: u32 = 16;

/// When to use drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DraftPolicy {
    /// Use drafts while they save time.
    #[default]
    Auto,
    Off,
    /// Always use drafts with the maximum number of rows. For tests and measurements.
    Force,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ControllerState {
    /// Measures plain steps. Then continues to speculate if `speculating`, otherwise continues with plain steps.
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

/// Decides how many rows each step has. The caller passes measured times, so the controller needs no clock and no
/// model.
#[derive(Debug, Clone)]
pub struct SpeculationController {
    mode: DraftPolicy,
    /// Maximum number of rows per verify.
    max_rows: usize,
    state: ControllerState,
    /// Mean seconds of a plain step, without the first two steps after each cycle.
    plain_seconds: Option<f64>,
    /// `plain_seconds` before the last cycle.
    plain_before_cycle: Option<f64>,
    steps_since_cycle: u32,
    /// Mean seconds of a cycle, by index into [`WIDTHS`].
    cycle_seconds: [Option<f64>; WIDTHS.len()],
    /// Duration of the last cycle in seconds, without drafting.
    verify_seconds: f64,
    /// By position in a draft: weighted counts of accepted and verified drafts. Older cycles have less weight.
    acceptance: [[f64; 2]; 15],
    /// Balance of seconds saved. Negative if speculation has cost time.
    saved: f64,
    /// Total seconds of steps and cycles.
    total: f64,
    /// `saved` when the last probe started, until the probe's cost is known.
    saved_before_probe: Option<f64>,
    /// Number of seconds that the last failed probe cost.
    last_probe_cost: f64,
    /// Number of tokens so far.
    tokens: u64,
    /// Value of `tokens` at which the next probe may start.
    next_probe: u64,
    /// Number of tokens between the last probe and the next one.
    backoff: u64,
    /// True if the last neighbouring width that was tried was the wider one. The direction alternates.
    try_wider: bool,
}

impl SpeculationController {
    /// A controller for drafts of at most `drafts` tokens.
    pub fn new(mode: DraftPolicy, drafts: usize) -> Self {
        Self {
            mode,
            max_rows: (drafts + 1).clamp(1, WIDTHS[WIDTHS.len() - 1]),
            state: ControllerState::Calibrate { left: CALIBRATION_STEPS, speculating: false },
            plain_seconds: None,
            plain_before_cycle: None,
            steps_since_cycle: 0,
            cycle_seconds: [None; WIDTHS.len()],
            verify_seconds: 0.0,
            acceptance: [PRIOR; 15],
            saved: 0.0,
            total: 0.0,
            saved_before_probe: None,
            last_probe_cost: 0.0,
            tokens: 0,
            next_probe: 16,
            backoff: BACKOFF[0],
            try_wider: false,
        }
    }

    /// Number of rows in the next step. 1 means a plain step.
    pub fn next_rows(&mut self) -> usize {
        match self.mode {
            DraftPolicy::Off => return 1,
            DraftPolicy::Force => return self.max_rows,
            DraftPolicy::Auto if self.max_rows < 2 => return 1,
            DraftPolicy::Auto => {}
        }
        if let ControllerState::Calibrate { left: 0, speculating } = self.state {
            self.state = if speculating { ControllerState::Speculating { cycles: 1 } } else { ControllerState::Plain };
        }
        let state = self.state;
        match state {
            ControllerState::Calibrate { .. } => 1,
            ControllerState::Plain => self.start_probe(),
            ControllerState::Probe { left, rows } if left == 0 || self.is_hopeless(left, rows) => {
                match self.best_width(true) {
                    Some((gain, rows)) if gain > MIN_START_GAIN => {
                        self.state = ControllerState::Speculating { cycles: 0 };
                        self.saved_before_probe = None;
                        self.last_probe_cost = 0.0;
                        self.backoff = BACKOFF[0];
                        rows
                    }
                    _ => self.stop(2 * self.backoff),
                }
            }
            ControllerState::Probe { rows, .. } => rows,
            ControllerState::Speculating { cycles } => match self.best_width(true) {
                Some((gain, rows)) if gain >= 1.0 && self.budget(MAX_LOSS) >= 0.0 => {
                    if cycles > 0 && cycles.is_multiple_of(RECALIBRATE_CYCLES) {
                        self.state = ControllerState::Calibrate { left: CALIBRATION_STEPS, speculating: true };
                        return 1;
                    }
                    if cycles > 0 && cycles.is_multiple_of(NEIGHBOUR_CYCLES) {
                        self.neighbour_width(rows)
                    } else {
                        rows
                    }
                }
                _ => self.stop(2 * BACKOFF[0]),
            },
        }
    }

    /// True if the step after the current plain step is certainly plain, and, if drafts use hidden rows, needs none.
    pub fn next_is_plain(&self, uses_hidden_rows: bool) -> bool {
        let lead = if uses_hidden_rows { OBSERVE_LEAD } else { 0 };
        match (self.mode, self.state) {
            (DraftPolicy::Off, _) => true,
            (DraftPolicy::Force, _) => false,
            (DraftPolicy::Auto, _) if self.max_rows < 2 => true,
            (DraftPolicy::Auto, ControllerState::Calibrate { left, .. }) => left > 1 && !uses_hidden_rows,
            (DraftPolicy::Auto, ControllerState::Plain) => self.tokens + 1 + lead < self.next_probe,
            (DraftPolicy::Auto, _) => false,
        }
    }

    /// Name of the state in metrics.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            ControllerState::Calibrate { .. } => "calibrate",
            ControllerState::Plain => "plain",
            ControllerState::Probe { .. } => "probe",
            ControllerState::Speculating { .. } => "speculate",
        }
    }

    /// True if hidden rows should be copied for the draft, because the draft may be used soon.
    pub fn wants_hidden_rows(&self) -> bool {
        match self.mode {
            DraftPolicy::Off => false,
            DraftPolicy::Force => true,
            DraftPolicy::Auto => {
                self.state != ControllerState::Plain
                    || self.tokens + OBSERVE_LEAD >= self.next_probe && self.budget(MAX_PROBE_LOSS) > 0.0
            }
        }
    }

    /// Records the time of a prompt's chunk (`seconds`), and the time spent on its hidden rows (`observing`). Of
    /// `observing`, only the part above [`MAX_LOSS`] times `seconds` counts as a cost.
    pub fn record_prompt(&mut self, seconds: f64, observing: f64) {
        self.saved -= (observing - MAX_LOSS * seconds).max(0.0);
    }

    /// Records the time of a plain step (`seconds`), and the time spent on its hidden rows (`observing`).
    pub fn record_plain(&mut self, seconds: f64, observing: f64) {
        self.total += seconds + observing;
        self.saved -= observing;
        self.tokens += 1;
        self.steps_since_cycle += 1;
        // Limits outliers, which are caused by other programs.
        let excess = |mean: f64| seconds.min(3.0 * mean) - mean;
        // Slower steps after a cycle count as a cost of the cycle.
        if let Some(mean) = self.plain_before_cycle.filter(|_| self.steps_since_cycle <= AFTERMATH_STEPS) {
            self.saved -= excess(mean);
        }
        if self.steps_since_cycle > 2 {
            self.plain_seconds = Some(self.plain_seconds.map_or(seconds, |mean| mean + 0.1 * excess(mean)));
        }
        if let Some(saved) = self
            .saved_before_probe
            .take_if(|_| self.state == ControllerState::Plain && self.steps_since_cycle >= AFTERMATH_STEPS)
        {
            self.last_probe_cost = saved - self.saved;
        }
        if let ControllerState::Calibrate { left, .. } = &mut self.state {
            *left = left.saturating_sub(1);
        }
    }

    /// Records a cycle: the numbers of drafted and accepted tokens, the `seconds` of the whole cycle, and the seconds
    /// of `drafting`. Returns the seconds saved, which are negative for a loss.
    pub fn record_cycle(&mut self, drafted: usize, accepted: usize, seconds: f64, drafting: f64) -> f64 {
        let committed = accepted as u64 + 1;
        self.total += seconds;
        self.tokens += committed;
        (self.steps_since_cycle, self.plain_before_cycle, self.verify_seconds) =
            (0, self.plain_seconds, seconds - drafting);
        let saved = self.plain_seconds.map_or(0.0, |plain| committed as f64 * plain - seconds);
        self.saved += saved;
        let first = matches!(self.state, ControllerState::Probe { left: PROBE_CYCLES, .. });
        if let Some(index) = WIDTHS.iter().position(|&rows| rows > drafted).filter(|_| !first) {
            let mean = &mut self.cycle_seconds[index];
            *mean = Some(mean.map_or(seconds, |mean| mean + 0.2 * (seconds - mean)));
        }
        for (position, [right, tried]) in self.acceptance.iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            *right = *right * 0.95 + f64::from(u8::from(position < accepted));
            *tried = *tried * 0.95 + 1.0;
        }
        match &mut self.state {
            ControllerState::Probe { left, .. } => *left = left.saturating_sub(1),
            ControllerState::Speculating { cycles } => *cycles += 1,
            ControllerState::Calibrate { .. } | ControllerState::Plain => {}
        }
        saved
    }

    /// Mean number of tokens of a cycle with this number of rows: `E(rows)`.
    fn expected_tokens(&self, rows: usize) -> f64 {
        let mut all = 1.0;
        self.acceptance.iter().take(rows - 1).fold(1.0, |sum, [right, tried]| {
            all *= right / tried;
            sum + all
        })
    }

    /// Seconds of a cycle with width `WIDTHS[index]`, measured or estimated from neighbouring widths.
    fn estimate_seconds(&self, index: usize) -> Option<f64> {
        if let Some(measured) = self.cycle_seconds[index] {
            return Some(measured);
        }
        let plain = self.plain_seconds?;
        let tried = |index: usize| Some((WIDTHS[index], self.cycle_seconds[index]?));
        let (rows, seconds) = (0..index).rev().find_map(tried).unwrap_or((1, plain));
        let row = match (index + 1..WIDTHS.len()).find_map(tried) {
            Some((wider, dearer)) => (dearer - seconds).max(0.0) / (wider - rows) as f64,
            None => ROW_COST * plain,
        };
        Some(seconds + row * (WIDTHS[index] - rows) as f64)
    }

    /// The best gain and its width. Considers only measured widths if `measured` is true, otherwise all widths.
    fn best_width(&self, measured: bool) -> Option<(f64, usize)> {
        let plain = self.plain_seconds?;
        let widths = WIDTHS
            .iter()
            .enumerate()
            .filter(|&(index, &rows)| rows <= self.max_rows && (!measured || self.cycle_seconds[index].is_some()));
        widths
            .filter_map(|(index, &rows)| {
                Some((self.expected_tokens(rows) * plain / self.estimate_seconds(index)?, rows))
            })
            .max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Starts a probe if the next probe is due, the probe's expected gain is at least 1, and the budget covers its
    /// cost.
    fn start_probe(&mut self) -> usize {
        if self.tokens < self.next_probe {
            return 1;
        }
        let (Some(plain), Some((gain, rows))) = (self.plain_seconds, self.best_width(false)) else { return 1 };
        let index = WIDTHS.iter().position(|&width| width == rows).unwrap_or(0);
        let cost = self.estimate_seconds(index).map_or(f64::INFINITY, |seconds| 2.0 * (seconds - plain));
        let missing = cost.max(self.last_probe_cost) - self.budget(MAX_PROBE_LOSS);
        if gain < 1.0 || missing > 0.0 {
            if gain < 1.0 {
                // Moves old measurements towards the prior, since texts and cache contents change.
                self.backoff = (2 * self.backoff).min(BACKOFF[1]);
                self.acceptance.iter_mut().for_each(|[right, tried]| {
                    *right = 0.75 * *right + 0.25 * PRIOR[0];
                    *tried = 0.75 * *tried + 0.25 * PRIOR[1];
                });
                for (seconds, rows) in self.cycle_seconds.iter_mut().zip(WIDTHS) {
                    let prior = plain * (1.0 + ROW_COST * (rows - 1) as f64);
                    *seconds = seconds.map(|seconds| 0.75 * seconds + 0.25 * prior);
                }
            }
            // Wait until the budget, which grows with every plain step, is large enough.
            let tokens = missing.max(0.0) / (MAX_PROBE_LOSS * plain);
            self.next_probe = self.tokens + self.backoff.max(tokens.min(BACKOFF[1] as f64) as u64);
            return 1;
        }
        self.state = ControllerState::Probe { left: PROBE_CYCLES, rows };
        self.saved_before_probe = Some(self.saved);
        rows
    }

    /// Number of seconds that may be lost now: the balance plus `share` of the time that plain decoding would have
    /// taken so far.
    fn budget(&self, share: f64) -> f64 {
        self.saved + share * (self.total + self.saved)
    }

    /// True if the first or second cycle of a probe already shows that speculation does not save time.
    fn is_hopeless(&mut self, left: u32, rows: usize) -> bool {
        match PROBE_CYCLES - left {
            1 => {
                let gain =
                    self.plain_seconds.map_or(0.0, |plain| self.expected_tokens(rows) * plain / self.verify_seconds);
                if let Some(index) = WIDTHS.iter().position(|&width| width == rows).filter(|_| gain < HOPELESS_GAIN) {
                    // Store a lower bound of the cycle's time: the time without the draft.
                    self.cycle_seconds[index].get_or_insert(self.verify_seconds);
                }
                gain < HOPELESS_GAIN
            }
            2 => self.best_width(true).is_none_or(|(gain, _)| gain < HOPELESS_GAIN),
            _ => false,
        }
    }

    /// Stops speculating for at least `tokens` tokens. Returns 1, the number of rows of a plain step.
    fn stop(&mut self, tokens: u64) -> usize {
        self.backoff = tokens.min(BACKOFF[1]);
        self.next_probe = self.tokens + self.backoff;
        self.state = ControllerState::Plain;
        1
    }

    /// The next wider width or the next narrower width, alternately.
    fn neighbour_width(&mut self, rows: usize) -> usize {
        self.try_wider = !self.try_wider;
        let index = WIDTHS.iter().position(|&width| width == rows).unwrap_or(0);
        let other = if self.try_wider { index + 1 } else { index.saturating_sub(1) };
        WIDTHS.get(other).copied().filter(|&width| width <= self.max_rows).unwrap_or(rows)
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
