//! Speculation: a draft proposes several tokens, one pass of the model verifies them, and those that the sampler would have
//! drawn anyway are kept. Each row is sampled as a plain step would sample it, keyed by the seed and the token's place, so the
//! answer has the same bytes with and without, at any temperature; the first row whose token is not the proposed one ends the
//! cycle, and that token is itself the answer's next.

mod companion;
mod controller;
mod dflash;
mod draft;
mod fit;
mod lookup;
mod mtp;
mod outlook;
mod trail;

pub use companion::{Companion, ROOM as DRAFT_ROOM};
use controller::Controller;
pub use controller::Speculate;
pub use dflash::Dflash;
pub use draft::{Draft, Kind, Sequence};
use fit::Fit;
pub use lookup::Lookup;
pub use mtp::Mtp;
pub use outlook::Outlook;
use trail::Trail;

use super::{Options, Sampler, Session, Timings, constraint::Ahead};
use crate::{
    error::ModelError,
    metrics::Metrics,
    model::{Logits, Model, PassHooks, Rows},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The engine's draft, and what it has been worth.
pub(super) struct Speculation<M> {
    /// `None` if there is none, if it is not wanted, or if it failed.
    draft: Option<Box<dyn Draft<M>>>,
    /// The draft follows hidden rows; passes leave them now; and room for them.
    follows: bool,
    leaves: bool,
    hidden: Vec<f32>,
    controller: Controller,
    fit: Fit,
    /// A draft that does not fit is kept all the same.
    forced: bool,
    /// The sampler's copy that runs ahead.
    sampler: Option<Sampler>,
    metrics: Arc<Metrics>,
    /// The clock that decides whether it pays.
    now: fn() -> Instant,
}

/// Rows of logits that wait to be drawn from: those of one pass.
pub(super) struct Step {
    logits: Logits,
    /// The row that is drawn from next.
    row: usize,
    /// The drafted token behind each row but the last.
    drafted: Vec<u32>,
    /// The draft also had the token that ended the answer, which is not told.
    ended: bool,
    /// When its pass began; `None` for a prompt's. And how long the draft took of it.
    begun: Option<Instant>,
    drafting: Duration,
}

impl Step {
    /// The last row of a prompt's logits.
    pub fn first(logits: Logits) -> Self {
        let row = logits.rows().saturating_sub(1);
        Self { logits, row, drafted: Vec::new(), ended: false, begun: None, drafting: Duration::ZERO }
    }

    /// The logits that the next token is drawn from.
    pub fn row(&self) -> Option<&[f32]> {
        (self.row < self.logits.rows()).then(|| self.logits.row(self.row))
    }

    /// `id` was drawn from the present row and ends the answer.
    pub fn ends(&mut self, id: u32) {
        self.ended = self.drafted.get(self.row) == Some(&id);
    }

    /// `id` was drawn from the present row; true if the draft had it, so that the next row comes behind it.
    fn accepts(&mut self, id: u32) -> bool {
        let right = self.drafted.get(self.row) == Some(&id);
        self.row += usize::from(right);
        right
    }
}

/// A token that was drawn and told, and the means of drawing the next one.
pub(super) struct Drawn<'a> {
    pub id: u32,
    pub sampler: &'a Sampler,
    pub ahead: Option<&'a Ahead>,
    /// The number of tokens that may still come.
    pub room: usize,
}

impl<M: Model> Speculation<M> {
    pub fn new(model: &mut M, draft: Box<dyn Draft<M>>, options: &Options, metrics: Arc<Metrics>) -> Self {
        let mut speculation = Self {
            draft: Some(draft).filter(|_| options.speculate != Speculate::Off),
            follows: false,
            leaves: false,
            hidden: Vec::new(),
            controller: Controller::new(options.speculate, options.draft_tokens),
            fit: Fit::default(),
            forced: options.speculate == Speculate::Force,
            sampler: None,
            metrics,
            now: Instant::now,
        };
        if let Some(taps) = speculation.draft.as_ref().map(|draft| draft.taps()).filter(|taps| !taps.layers.is_empty())
        {
            match model.set_taps(&taps) {
                Ok(()) => (speculation.follows, speculation.leaves) = (true, true),
                Err(error) => speculation.give_up(&error),
            }
        }
        speculation
    }

    /// An answer begins; `on` if its sequence goes on from the last one's.
    pub fn start(&mut self, model: &mut M, on: bool) {
        self.sampler = None;
        self.listen(model);
        if let Some(draft) = self.draft.as_mut().filter(|_| !on) {
            draft.start();
        }
    }

    /// Lets passes leave hidden rows, if the draft follows any and may be asked soon.
    fn listen(&mut self, model: &mut M) {
        let leaves = self.follows && self.controller.follows();
        if leaves != std::mem::replace(&mut self.leaves, leaves) {
            model.enable_taps(leaves);
        }
    }

    /// A part of a prompt, `rows` tokens, took the model so long.
    pub fn prompted(&mut self, model: &mut M, session: &Session<M::State>, rows: usize, took: Duration) {
        let begun = (self.now)();
        self.follow(model, session, rows);
        self.controller.prompted(took.as_secs_f64(), ((self.now)() - begun).as_secs_f64());
    }

    /// The model's last pass made `session` what it is; its first `rows` rows are part of it.
    fn follow(&mut self, model: &mut M, session: &Session<M::State>, rows: usize) {
        let Some(draft) = self.draft.as_mut().filter(|_| self.follows && self.leaves) else { return };
        match model.tapped_rows(rows, &mut self.hidden) {
            Ok(()) => draft.follow(session.len(), &self.hidden),
            Err(error) => self.give_up(&error),
        }
    }

    /// `drawn` came from `step`, which goes on with the row behind it, of the same pass or a new one.
    pub fn advance(
        &mut self,
        session: &mut Session<M::State>,
        model: &mut M,
        step: &mut Step,
        drawn: &Drawn<'_>,
        timings: &mut Timings,
    ) -> Result<(), ModelError> {
        let id = drawn.id;
        if step.accepts(id) {
            session.accept(id);
            return Ok(());
        }
        self.settle(session, model, step, timings)?;
        let begun = (self.now)();
        let state = self.controller.state();
        let rows = self.controller.rows().min(drawn.room).min(model.info().context - session.len());
        if state != self.controller.state() {
            self.metrics.draft_states.with_label_values(&[self.controller.state()]).inc();
        }
        self.listen(model);
        // Until the pass has succeeded, the step is one that is over.
        let mut drafted = std::mem::take(&mut step.drafted);
        (step.row, step.begun) = (step.logits.rows(), None);
        drafted.clear();
        let mut drafting = Duration::ZERO;
        if rows > 1 {
            self.propose(session, model, drawn, rows - 1, &mut drafted);
            drafting = (self.now)() - begun;
        }
        self.metrics.draft_width.set(drafted.len() as i64 + 1);
        let logits = match drafted.is_empty() {
            true => session.extend(model, &[id], Rows::Last, &mut PassHooks::default())?,
            false => session.verify(model, id, &drafted)?,
        };
        *step = Step { logits, row: 0, drafted, ended: false, begun: Some(begun), drafting };
        Ok(())
    }

    fn propose(
        &mut self,
        session: &mut Session<M::State>,
        model: &mut M,
        drawn: &Drawn<'_>,
        most: usize,
        out: &mut Vec<u32>,
    ) {
        let Some(draft) = &mut self.draft else { return };
        let sampler = self.sampler.get_or_insert_with(|| drawn.sampler.clone());
        sampler.catch_up(drawn.sampler);
        let mut outlook = Outlook::new(sampler, drawn.ahead);
        let (seen, state) = session.parts();
        let sequence = Sequence { seen, last: drawn.id };
        let done = draft.propose(model, state, sequence, most, &mut outlook, out);
        out.truncate(most);
        if let Err(error) = done {
            out.clear();
            self.give_up(&error);
        }
    }

    /// The pass of `step` is done with: what it evaluated beyond the answer is taken back, and counted.
    pub fn settle(
        &mut self,
        session: &mut Session<M::State>,
        model: &mut M,
        step: &Step,
        timings: &mut Timings,
    ) -> Result<(), ModelError> {
        let (drafted, accepted) = (step.drafted.len(), step.row);
        session.settle()?;
        let Some(begun) = step.begun else { return Ok(()) };
        let seconds = ((self.now)() - begun).as_secs_f64();
        self.follow(model, session, accepted + 1);
        let all = ((self.now)() - begun).as_secs_f64();
        let drafting = step.drafting.as_secs_f64();
        if drafted == 0 {
            self.controller.plain(seconds - drafting, all - seconds + drafting);
            return Ok(());
        }
        let saved = self.controller.cycle(drafted, accepted, all, drafting);
        timings.drafted_tokens += drafted;
        let accepted = accepted + usize::from(step.ended);
        timings.accepted_tokens += accepted;
        for (place, [tried, right]) in timings.places.iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            (*tried, *right) = (*tried + 1, *right + u32::from(place < accepted));
        }
        timings.saved_seconds += saved;
        let kind = self.draft.as_ref().map_or(Kind::Lookup, |draft| draft.kind());
        self.metrics.record_draft(kind.name(), accepted, drafted - accepted, saved);
        self.judge(kind, accepted);
        Ok(())
    }

    /// Switches off a draft whose tokens are hardly ever right. Looking up may be of no use for long: it costs nothing then.
    fn judge(&mut self, kind: Kind, accepted: usize) {
        if kind == Kind::Lookup || !self.fit.fails(accepted) {
            return;
        }
        tracing::warn!(
            draft = kind.name(),
            off = !self.forced,
            "hardly any of the drafted tokens are what the model says: the draft seems to be for another model, for other \
             layers of it, or to have norms of another convention; answers are not affected"
        );
        if !self.forced {
            (self.draft, self.follows) = (None, false);
        }
    }

    /// The draft is of no use any more; answers go on without.
    fn give_up(&mut self, error: &ModelError) {
        tracing::warn!(%error, "the draft failed and is not used any more");
        (self.draft, self.follows) = (None, false);
    }
}

#[cfg(test)]
mod tests;
