//! Speculation: a draft proposes several tokens, one pass of the model verifies them, and those that the sampler would have
//! drawn anyway are kept. Each row is sampled as a plain step would sample it, keyed by the seed and the token's place, so the
//! answer has the same bytes with and without, at any temperature; the first row whose token is not the proposed one ends the
//! cycle, and that token is itself the answer's next.

mod controller;
mod lookup;

use controller::Controller;
pub use controller::Speculate;
use lookup::Lookup;

use super::{Session, Timings};
use crate::{
    error::ModelError,
    metrics::Metrics,
    model::{Logits, Model, Rows},
};
use std::{sync::Arc, time::Instant};

/// Where drafts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Draft {
    Off,
    /// Runs of the prompt and the answer that occurred before.
    #[default]
    Lookup,
}

/// The engine's drafts, and what they have been worth.
pub(super) struct Speculation {
    draft: Draft,
    controller: Controller,
    lookup: Lookup,
    metrics: Arc<Metrics>,
}

/// Rows of logits that wait to be drawn from: those of one pass.
pub(super) struct Step {
    logits: Logits,
    /// The row that is drawn from next.
    row: usize,
    /// What each row but the last was followed by in the draft.
    drafted: Vec<u32>,
    /// When its pass began; `None` for a prompt's.
    begun: Option<Instant>,
}

impl Step {
    /// The last row of a prompt's logits.
    pub fn first(logits: Logits) -> Self {
        let row = logits.rows().saturating_sub(1);
        Self { logits, row, drafted: Vec::new(), begun: None }
    }

    /// What the next token is drawn from.
    pub fn row(&self) -> Option<&[f32]> {
        (self.row < self.logits.rows()).then(|| self.logits.row(self.row))
    }

    /// `id` was drawn from the present row; whether the next row is what comes behind it.
    fn accepts(&mut self, id: u32) -> bool {
        let right = self.drafted.get(self.row) == Some(&id);
        self.row += usize::from(right);
        right
    }
}

impl Speculation {
    pub fn new(draft: Draft, setting: Speculate, drafts: usize, metrics: Arc<Metrics>) -> Self {
        let setting = if draft == Draft::Off { Speculate::Off } else { setting };
        Self { draft, controller: Controller::new(setting, drafts), lookup: Lookup::default(), metrics }
    }

    /// An answer to `prompt` begins.
    pub fn start(&mut self, prompt: &[u32]) {
        if self.draft == Draft::Lookup {
            self.lookup.start(prompt);
        }
    }

    /// `id` was drawn from `step` and told: `step` goes on with the row behind it, of the same pass or a new one. `room` is how many tokens may
    /// still come.
    pub fn advance<M: Model>(
        &mut self,
        session: &mut Session<M::State>,
        model: &mut M,
        step: &mut Step,
        id: u32,
        (room, timings): (usize, &mut Timings),
    ) -> Result<(), ModelError> {
        if self.draft == Draft::Lookup {
            self.lookup.push(id);
        }
        if step.accepts(id) {
            session.accept(id);
            return Ok(());
        }
        self.settle(session, model, step, timings)?;
        let begun = Some(Instant::now());
        let rows = self.controller.rows().min(room).min(model.context() - session.len());
        // Until the pass has succeeded, the step is one that is over.
        let mut drafted = std::mem::take(&mut step.drafted);
        (step.row, step.begun) = (step.logits.rows(), None);
        drafted.clear();
        if rows > 1 {
            self.lookup.propose(rows - 1, &mut drafted);
        }
        let logits = match drafted.is_empty() {
            true => session.extend(model, &[id], Rows::Last, &[], &mut Vec::new())?,
            false => session.verify(model, id, &drafted)?,
        };
        *step = Step { logits, row: 0, drafted, begun };
        Ok(())
    }

    /// The pass of `step` is done with: what it evaluated beyond the answer is taken back, and counted.
    pub fn settle<M: Model>(
        &mut self,
        session: &mut Session<M::State>,
        model: &mut M,
        step: &Step,
        timings: &mut Timings,
    ) -> Result<(), ModelError> {
        let (drafted, accepted) = (step.drafted.len(), step.row);
        session.settle(model)?;
        let Some(seconds) = step.begun.map(|begun| begun.elapsed().as_secs_f64()) else { return Ok(()) };
        if drafted == 0 {
            self.controller.plain(seconds);
            return Ok(());
        }
        let saved = self.controller.cycle(drafted, accepted, seconds);
        timings.drafted_tokens += drafted;
        timings.accepted_tokens += accepted;
        timings.saved_seconds += saved;
        let metrics = &self.metrics;
        metrics.draft_cycles_lookup.inc();
        metrics.draft_tokens_accepted.inc_by(accepted as u64);
        metrics.draft_tokens_rejected.inc_by((drafted - accepted) as u64);
        if saved > 0.0 {
            metrics.draft_seconds_saved.inc_by(saved);
        } else {
            metrics.draft_seconds_lost.inc_by(-saved);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
