//! [`Speculator`] runs the decode steps of a sequence, with drafts if they save time.

use super::{
    acceptance_monitor::AcceptanceMonitor,
    controller::{DraftPolicy, SpeculationController},
    draft::{Draft, DraftKind, DraftRequest, TokenHistory},
    draft_sampler::DraftSampler,
};
use crate::{
    constraint::MaskWorker,
    request::Timings,
    sampler::{RowOutput, Sampler},
    sequence::Sequence,
};
use moestro_base::metrics::Metrics;
use moestro_model::{
    error::ModelError,
    model::{Logits, Model, NextToken, PassHooks, Rows},
};
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// The engine's draft, and the measurements that decide when to use it.
pub struct Speculator<M> {
    /// `None` if speculation is off or the draft has failed.
    draft: Option<Box<dyn Draft<M>>>,
    /// True if the draft uses hidden rows.
    uses_hidden_rows: bool,
    /// True if forward passes currently copy hidden rows.
    copies_hidden_rows: bool,
    /// Buffer for hidden rows.
    hidden: Vec<f32>,
    controller: SpeculationController,
    monitor: AcceptanceMonitor,
    /// True if a draft must stay enabled even if its tokens are rarely accepted.
    is_forced: bool,
    /// A copy of the answer's sampler, for drafts.
    sampler: Option<Sampler>,
    /// Id of the sequence that the draft follows. `None` if the last pass had rows of several sequences.
    followed: Option<u64>,
    metrics: Arc<Metrics>,
    /// Clock that times the steps. Tests replace it.
    now: fn() -> Instant,
}

/// The rows of logits of one forward pass, from which tokens are sampled one after another.
pub struct PendingRows {
    logits: Logits,
    /// The likeliest token of each row, if the pass has computed no logits.
    likeliest: Vec<u32>,
    /// The rows of `logits` or `likeliest` that belong to the sequence.
    rows: Range<usize>,
    /// Index of the row to sample next, counted from the start of `rows`.
    current: usize,
    /// The drafted tokens: one after each row except the last.
    drafted: Vec<u32>,
    /// True if the draft contained the token that ended the answer.
    drafted_end: bool,
    /// True if the answer has another token than the draft at the current row.
    is_rejected: bool,
    /// Start of the decode step, including the draft. `None` if the pass is not a decode step.
    begun: Option<Instant>,
    /// The part of the step's time that the draft took.
    drafting: Duration,
}

impl PendingRows {
    /// The last row of `logits`, from a pass without drafts.
    pub fn last_of(logits: Logits) -> Self {
        let last = logits.rows().saturating_sub(1);
        Self::row_of(logits, last)
    }

    /// Row `row` of `logits`, which a pass of several sequences has computed.
    pub fn row_of(logits: Logits, row: usize) -> Self {
        let rows = row..logits.rows().min(row + 1);
        let drafting = Duration::ZERO;
        let [drafted_end, is_rejected] = [false; 2];
        let (likeliest, drafted) = Default::default();
        Self { logits, likeliest, rows, current: 0, drafted, drafted_end, is_rejected, begun: None, drafting }
    }

    /// Number of rows in the pass that belong to the sequence.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The row from which to sample the next token.
    pub fn current(&self) -> Option<RowOutput<'_>> {
        let row = self.rows.start + self.current;
        let of_row = || self.likeliest.get(row).map(|id| RowOutput::Likeliest(*id));
        self.rows.contains(&row).then(|| of_row().unwrap_or_else(|| RowOutput::Logits(self.logits.row(row))))
    }

    /// Records that `id`, which was sampled from the current row, ends the answer.
    pub fn end_answer(&mut self, id: u32) {
        self.drafted_end = self.compare(id);
    }

    /// True if the draft has `id` at the current row.
    fn compare(&mut self, id: u32) -> bool {
        let drafted = self.drafted.get(self.current);
        self.is_rejected = drafted.is_some_and(|drafted| *drafted != id);
        drafted == Some(&id)
    }

    /// Numbers of drafted and of accepted tokens. Tokens that were drafted after the end of the answer do not count.
    fn counts(&self) -> [usize; 2] {
        let accepted = self.current + usize::from(self.drafted_end);
        [if self.is_rejected { self.drafted.len() } else { accepted }, accepted]
    }

    /// Discards the remaining rows.
    pub fn clear(&mut self) {
        self.drafted.clear();
        self.likeliest.clear();
        (self.logits, self.current, self.begun) = (Logits::default(), self.rows.len(), None);
    }

    /// Advances to the next row if the draft has `id`, the token sampled from the current row, at this position.
    fn accept(&mut self, id: u32) -> bool {
        let is_drafted = self.compare(id);
        self.current += usize::from(is_drafted);
        is_drafted
    }
}

/// A token that was sampled and sent, and the context for the next token.
pub struct SampledToken<'a> {
    pub id: u32,
    pub sampler: &'a Sampler,
    pub masks: Option<&'a MaskWorker>,
    /// True if the answer needs the logits of its tokens.
    pub needs_logits: bool,
    /// Maximum number of tokens that may follow in the answer.
    pub remaining: usize,
    /// False while several sequences decode. Drafts would then cost more time than they save, and the next pass will
    /// have rows of the others.
    pub is_alone: bool,
}

impl<M: Model> Speculator<M> {
    pub fn new(
        model: &mut M,
        draft: Box<dyn Draft<M>>,
        mode: DraftPolicy,
        draft_tokens: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        let mut speculator = Self {
            draft: Some(draft).filter(|_| mode != DraftPolicy::Off),
            uses_hidden_rows: false,
            copies_hidden_rows: false,
            hidden: Vec::new(),
            controller: SpeculationController::new(mode, draft_tokens),
            monitor: AcceptanceMonitor::default(),
            is_forced: mode == DraftPolicy::Force,
            sampler: None,
            followed: None,
            metrics,
            now: Instant::now,
        };
        let taps = speculator.draft.as_ref().map(|draft| draft.taps()).filter(|taps| !taps.layers.is_empty());
        if let Some(taps) = taps {
            match model.set_taps(&taps) {
                Ok(()) => (speculator.uses_hidden_rows, speculator.copies_hidden_rows) = (true, true),
                Err(error) => speculator.disable_draft(&error),
            }
        }
        speculator
    }

    /// Called when a request begins.
    pub fn start(&mut self, model: &mut M) {
        self.sampler = None;
        self.update_hidden_rows(model);
    }

    /// Makes the draft follow `sequence`, or no sequence. Must be called before each pass. If the sequence changes,
    /// calls [`Draft::start`].
    pub fn follow(&mut self, sequence: Option<&Sequence<M::State>>) {
        let id = sequence.map(Sequence::id);
        if self.followed != id {
            self.followed = id;
            self.sampler = None;
            if let Some(draft) = self.draft.as_mut().filter(|_| id.is_some()) {
                draft.start();
            }
        }
    }

    /// Turns copying of hidden rows on if the draft uses hidden rows and may run soon, and off otherwise.
    fn update_hidden_rows(&mut self, model: &mut M) {
        let copies = self.uses_hidden_rows && self.controller.wants_hidden_rows();
        if copies != std::mem::replace(&mut self.copies_hidden_rows, copies) {
            model.enable_taps(copies);
        }
    }

    /// Records that the model has evaluated `rows` tokens of a prompt, which took the time `took`.
    pub fn prompt_evaluated(&mut self, model: &mut M, sequence: &Sequence<M::State>, rows: usize, took: Duration) {
        let begun = (self.now)();
        self.observe(model, sequence, rows);
        self.controller.record_prompt(took.as_secs_f64(), ((self.now)() - begun).as_secs_f64());
    }

    /// Passes the first `rows` hidden rows of the last forward pass to the draft. These rows belong to the last tokens
    /// of `sequence`.
    fn observe(&mut self, model: &mut M, sequence: &Sequence<M::State>, rows: usize) {
        let Some(draft) = self.draft.as_mut().filter(|_| self.uses_hidden_rows && self.copies_hidden_rows) else {
            return;
        };
        match model.tapped_rows(rows, &mut self.hidden) {
            Ok(()) => draft.observe(sequence.len(), &self.hidden),
            Err(error) => self.disable_draft(&error),
        }
    }

    /// If the draft contained `id`, advances `rows` to the next row of the same pass and returns true. Otherwise
    /// settles the pass, discards its rows and returns false, because the token needs a new pass.
    pub fn accept(
        &mut self,
        sequence: &mut Sequence<M::State>,
        model: &mut M,
        rows: &mut PendingRows,
        id: u32,
        timings: &mut Timings,
    ) -> Result<bool, ModelError> {
        if rows.accept(id) {
            sequence.accept(id);
            return Ok(true);
        }
        self.settle(sequence, model, rows, timings)?;
        rows.clear();
        Ok(false)
    }

    /// Advances `rows` to the logits after `token`: to the next row of the same pass if the draft contained the token,
    /// and otherwise to the first row of a new pass.
    pub fn advance(
        &mut self,
        sequence: &mut Sequence<M::State>,
        model: &mut M,
        rows: &mut PendingRows,
        token: &SampledToken<'_>,
        timings: &mut Timings,
    ) -> Result<(), ModelError> {
        let id = token.id;
        if self.accept(sequence, model, rows, id, timings)? {
            return Ok(());
        }
        if !token.is_alone {
            self.follow(None);
            let logits = sequence.extend(model, &[id], Rows::Last, &mut PassHooks::default())?;
            *rows = PendingRows::last_of(logits);
            return Ok(());
        }
        self.follow(Some(sequence));
        let begun = (self.now)();
        let state = self.controller.state_name();
        let info = model.info();
        // The model accepts at most as many rows as a chunk of a prompt has.
        let room = token.remaining.min(info.context - sequence.len()).min(info.chunk);
        let width = if sequence.ahead().is_some() { 1 } else { self.controller.next_rows().min(room) };
        if state != self.controller.state_name() {
            self.metrics.draft_states.with_label_values(&[self.controller.state_name()]).inc();
        }
        self.update_hidden_rows(model);
        let mut drafted = std::mem::take(&mut rows.drafted);
        let mut drafting = Duration::ZERO;
        if width > 1 {
            self.propose(sequence, model, token, width - 1, &mut drafted);
            drafting = (self.now)() - begun;
        }
        self.metrics.draft_width.set(drafted.len() as i64 + 1);
        let (logits, likeliest) = if drafted.is_empty() {
            let mut hooks = PassHooks { next: self.next_token(token), ..PassHooks::default() };
            (sequence.extend(model, &[id], Rows::Last, &mut hooks)?, Vec::new())
        } else {
            let needs_logits = token.needs_logits || token.masks.is_some();
            let likeliest_below = token.sampler.likeliest_below().filter(|_| !needs_logits);
            sequence.verify(model, id, &drafted, likeliest_below)?
        };
        let own = 0..drafted.len() + 1;
        let begun = Some(begun);
        let [drafted_end, is_rejected] = [false; 2];
        *rows = PendingRows {
            logits,
            likeliest,
            rows: own,
            current: 0,
            drafted,
            drafted_end,
            is_rejected,
            begun,
            drafting,
        };
        Ok(())
    }

    /// How the token after a plain step will be chosen. `None` if it is unknown, or if the step of that token may need a
    /// draft.
    fn next_token(&self, token: &SampledToken<'_>) -> Option<NextToken> {
        let continues = token.remaining > 1 && token.masks.is_none();
        let is_plain = self.draft.is_none() || self.controller.next_is_plain(self.uses_hidden_rows);
        token.sampler.next_token().filter(|_| continues && is_plain && !self.copies_hidden_rows)
    }

    fn propose(
        &mut self,
        sequence: &mut Sequence<M::State>,
        model: &mut M,
        token: &SampledToken<'_>,
        max: usize,
        out: &mut Vec<u32>,
    ) {
        let Some(draft) = &mut self.draft else { return };
        let sampler = self.sampler.get_or_insert_with(|| token.sampler.clone());
        sampler.catch_up(token.sampler);
        let sampler = DraftSampler::new(sampler, token.masks);
        let (evaluated, state) = sequence.parts();
        let history = TokenHistory { evaluated, last: token.id };
        let done = draft.propose(model, state, DraftRequest { history, max, sampler, out: &mut *out });
        out.truncate(max);
        if let Err(error) = done {
            out.clear();
            self.disable_draft(&error);
        }
    }

    /// Settles the pass of `rows`: removes rejected tokens from the sequence, and records times and accepted tokens.
    pub fn settle(
        &mut self,
        sequence: &mut Sequence<M::State>,
        model: &mut M,
        rows: &PendingRows,
        timings: &mut Timings,
    ) -> Result<(), ModelError> {
        let drafted = rows.drafted.len();
        let accepted = rows.current;
        sequence.settle()?;
        // If another sequence had a pass after this one, the time and the hidden rows do not belong to this pass.
        let Some(begun) = rows.begun.filter(|_| self.followed == Some(sequence.id())) else { return Ok(()) };
        let seconds = ((self.now)() - begun).as_secs_f64();
        self.observe(model, sequence, accepted + 1);
        let total = ((self.now)() - begun).as_secs_f64();
        let drafting = rows.drafting.as_secs_f64();
        if drafted == 0 {
            self.controller.record_plain(seconds - drafting, total - seconds + drafting);
            return Ok(());
        }
        let saved = self.controller.record_cycle(drafted, accepted, total, drafting);
        let [drafted, accepted] = rows.counts();
        timings.drafted_tokens += drafted;
        timings.accepted_tokens += accepted;
        for (position, [tried, right]) in timings.draft_positions.iter_mut().enumerate().take(drafted.min(accepted + 1))
        {
            *tried += 1;
            *right += u32::from(position < accepted);
        }
        timings.saved_seconds += saved;
        let kind = self.draft.as_ref().map_or(DraftKind::Lookup, |draft| draft.kind());
        self.metrics.record_draft(kind.name(), accepted, drafted - accepted, saved);
        self.check_acceptance(kind, accepted);
        Ok(())
    }

    /// Disables a draft whose tokens are almost never accepted. Lookup drafts are exempt, since they cost no time when
    /// they find no earlier occurrence.
    fn check_acceptance(&mut self, kind: DraftKind, accepted: usize) {
        if kind == DraftKind::Lookup || !self.monitor.record(accepted) {
            return;
        }
        tracing::warn!(
            draft = kind.name(),
            disabled = !self.is_forced,
            "almost no drafted token is accepted; the draft may be for another model, read other layers, or use another norm \
             convention; answers are not affected"
        );
        if !self.is_forced {
            self.draft = None;
            self.uses_hidden_rows = false;
        }
    }

    fn disable_draft(&mut self, error: &ModelError) {
        tracing::warn!(%error, "draft failed; continuing without drafts");
        self.draft = None;
        self.uses_hidden_rows = false;
    }
}

#[cfg(test)]
#[path = "speculator_tests.rs"]
mod tests;
