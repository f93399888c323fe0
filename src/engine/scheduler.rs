//! The engine's thread: takes one request after another out of the line and works on it step by step, a chunk of the
//! prompt or one token at a time. Between two steps it looks whether anyone still listens, whether the request's time is
//! up, and whether the server wants to go. A chunk can take seconds: for somebody else in line, one that nobody waits for is
//! given up between two layers.
//!
//! ```text
//! next() -> sync -> chunk, chunk, ... -> [Prompt] -> draw, Token, step, draw, Token, ... -> Done -> keep
//!                 ^check               ^check                     ^check
//! ```
//!
//! An error or a panic of the model ends the request it happened in, and its session; the next request starts afresh.

use super::{
    Allowed, Draft, Event, Finish, Logprobs, Options, Request, Sampler, Session, Timings,
    cache::{
        Place,
        places::{self, Kind},
    },
    constraint::Ahead,
    handle::{Job, Over, RequestQueue},
    sampler::logprobs,
    speculation::{Drawn, Speculation, Step},
};
use crate::{
    error::{EngineError, ModelError},
    model::{Logits, Model, PassHooks, Rows, SequenceState, VERIFY_ROWS},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

/// Prompt rows whose logits are held at once when the prompt's own log-probabilities are wanted: at a vocabulary of
/// 248,320 this is 32 MB. The cuts of a prompt do not change its logits.
const PROMPT_ROWS: usize = 32;
/// Rows that a step of an answer may write, a draft's and its verify's among them.
const AHEAD: usize = 4 * VERIFY_ROWS;

/// The thread's own things: nobody else sees the model.
pub(super) struct Scheduler<M: Model> {
    model: M,
    options: Options,
    line: Arc<RequestQueue>,
    /// The last request's session, for one that goes on where it ended.
    session: Option<Session<M::State>>,
    /// The number of times the cache had been emptied when the session was left.
    emptied: u64,
    speculation: Speculation<M>,
}

impl<M: Model> Scheduler<M> {
    pub fn new(mut model: M, draft: Box<dyn Draft<M>>, options: Options, line: Arc<RequestQueue>) -> Self {
        let speculation = Speculation::new(&mut model, draft, &options, line.metrics.clone());
        Self { model, options, line, session: None, emptied: 0, speculation }
    }

    /// Works until the line is closed and empty.
    pub fn run(mut self) {
        let line = self.line.clone();
        let _stop = Stop(&line);
        while let Some(job) = line.next(&mut || self.model.fit_memory()) {
            // The model may be left in the middle of something, but a session that saw the panic is never used again,
            // and whatever else a forward pass holds is written before it is read.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.answer(&job)));
            if !matches!(outcome, Ok(Ok(_))) {
                self.recover();
            }
            // Before the last event: whoever reads that may count on the next request finding the engine free.
            line.leave();
            let event = match outcome {
                Ok(Ok((finish, timings))) => Event::Done { finish, timings },
                Ok(Err(Over::Gone | Over::GivenUp)) => continue,
                Ok(Err(Over::Failed(error))) => Event::Failed(error),
                Err(panic) => Event::Failed(EngineError::Panicked(words(&*panic))),
            };
            if let Event::Failed(error) = &event {
                tracing::warn!(%error, "a request failed");
            }
            let done = matches!(event, Event::Done { .. });
            let _ = job.events.send(event);
            if done && job.request.cache_prompt {
                self.keep();
            }
        }
    }

    /// Sees to it that the next request finds a device, whatever the last one ended by.
    fn recover(&mut self) {
        match self.model.recover() {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!("the GPU was given up: the CPU computes from here on");
                self.line.metrics.set_device("cpu");
                self.line.metrics.gpu_lost.set(1);
                self.session = None;
                self.line.cache.share_pages(self.model.info().pages);
            }
            Err(error) => tracing::error!(%error, "the GPU was given up, and the CPU cannot go on"),
        }
    }

    /// Takes a checkpoint at the end of an answer, when nobody waits for it any more.
    fn keep(&mut self) {
        let (model, cache) = (&self.model, &self.line.cache);
        let Some(session) = &mut self.session else { return };
        let need = || cache.size().bytes(session.len(), session.state().shared_positions());
        if !cache.make_room(session.tokens(), Kind::Answer, &need) {
            return;
        }
        match session.snapshot(model) {
            Ok(snapshot) => cache.insert(session.tokens(), Kind::Answer, snapshot, self.emptied),
            Err(error) => {
                tracing::warn!(%error, "no checkpoint at the end of this answer");
                // The device may be in the middle of something: the next request meets none of it.
                self.session = None;
                self.recover();
            }
        }
    }

    fn answer(&mut self, job: &Job) -> Result<(Finish, Timings), Over> {
        self.line.check(job)?;
        let started = Instant::now();
        let queued = started - job.arrived;
        let metrics = self.line.metrics.clone();
        metrics.queue_seconds.observe(queued.as_secs_f64());

        let mut session = self.resume(&job.request)?;
        self.speculation.start(&mut self.model, session.goes_on());
        let cached_tokens = session.len();
        metrics.prompt_tokens_cached.inc_by(cached_tokens as u64);
        let _ = job.events.send(Event::Started { cached_tokens, queued });

        let outcome = self.prefill(job, &mut session).and_then(|logits| {
            let prefilled = Instant::now();
            metrics.prefill_seconds.observe((prefilled - started).as_secs_f64());
            let mut timings = Timings {
                prompt_tokens: job.request.ids.len(),
                cached_tokens,
                prompt_seconds: (prefilled - started).as_secs_f64(),
                ..Timings::default()
            };
            let finish = self.decode(job, &mut session, logits, &mut timings)?;
            timings.decode_seconds = prefilled.elapsed().as_secs_f64();
            metrics.decode_seconds.observe(timings.decode_seconds);
            Ok((finish, timings))
        });
        // A client that left, or ran out of time, did so between two steps: the state is sound.
        if matches!(&outcome, Ok(_) | Err(Over::Gone | Over::Failed(EngineError::TimedOut | EngineError::Draining))) {
            self.session = Some(session).filter(|_| job.request.cache_prompt);
        }
        outcome
    }

    /// The session to begin a prompt with. It is out of `self` while it is worked on: whatever goes wrong, it is gone.
    fn resume(&mut self, request: &Request) -> Result<Session<M::State>, ModelError> {
        let cache = self.line.cache.clone();
        let emptied = std::mem::replace(&mut self.emptied, cache.emptied());
        let wanted = request.cache_prompt && request.prompt_logprobs.is_none();
        let previous = self.session.take().filter(|_| wanted && emptied == self.emptied);
        let mut hit = &self.line.metrics.prompt_cache_hits_session;
        let session = Session::sync(previous, &self.model, &request.ids, |beyond| {
            // Behind the last whole page a sequence has one of its own.
            cache.leave_pages(1);
            let (snapshot, place) = if wanted { cache.deepest(&request.ids, beyond) } else { None }?;
            hit = match place {
                Place::Memory => &self.line.metrics.prompt_cache_hits_memory,
                Place::Disk => &self.line.metrics.prompt_cache_hits_disk,
            };
            Some(snapshot)
        })?;
        if session.is_empty() {
            self.line.metrics.prompt_cache_misses.inc();
        } else {
            hit.inc();
            self.line.metrics.prompt_cache_hit_tokens.observe(session.len() as f64);
        }
        Ok(session)
    }

    /// The places between `from` and `to` at which there is room for a checkpoint.
    fn admit(
        &self,
        places: &[(usize, Kind)],
        session: &Session<M::State>,
        ids: &[u32],
        to: usize,
    ) -> Vec<(usize, Kind)> {
        let cache = &self.line.cache;
        let mut wanted: Vec<_> = places.iter().copied().filter(|&(at, _)| session.len() < at && at <= to).collect();
        wanted.sort_unstable_by_key(|&(_, kind)| kind);
        let mut admitted: Vec<(usize, Kind)> = Vec::new();
        for (at, kind) in wanted {
            let need = || {
                let mut shared = session.state().shared_positions();
                let mut all: Vec<usize> = admitted.iter().map(|&(at, _)| at).chain([at]).collect();
                all.sort_unstable();
                let bytes = |at| {
                    let before = shared;
                    shared = shared.max(at);
                    cache.size().bytes(at, before)
                };
                all.into_iter().map(bytes).sum()
            };
            if cache.make_room(&ids[..at], kind, &need) {
                admitted.push((at, kind));
            }
        }
        admitted.sort_unstable();
        admitted
    }

    /// Evaluates what the session does not know of the prompt; returns the logits after its last token.
    fn prefill(&mut self, job: &Job, session: &mut Session<M::State>) -> Result<Logits, Over> {
        let Request { ids, prompt_logprobs: wanted, max_tokens, boundaries, cache_prompt, .. } = &job.request;
        let (line, cache) = (self.line.clone(), self.line.cache.clone());
        let share = if *cache_prompt { cache.share() } else { 0 };
        let places = places::choose(boundaries, session.len(), ids.len(), share);
        let chunk = self.model.info().chunk.max(1);
        let chunk = if wanted.is_some() { chunk.min(PROMPT_ROWS) } else { chunk };
        // Nothing precedes the first token.
        let mut prompt: Vec<Option<Logprobs>> = vec![None];
        let mut last = Logits::default();
        let started = Instant::now();
        while session.len() < ids.len() {
            let (from, end) = (session.len(), ids.len());
            // A row on its own would be computed as an answer's are, which may be more exact.
            let to = if end == from + chunk + 1 && chunk > 1 { end - 2 } else { end.min(from + chunk) };
            let rows = match wanted {
                Some(_) => Rows::All,
                None if to == ids.len() && *max_tokens > 0 => Rows::Last,
                None => Rows::None,
            };
            let marks = self.admit(&places, session, ids, to);
            let at: Vec<usize> = marks.iter().map(|mark| mark.0).collect();
            self.model.fit_memory();
            cache.leave_pages(session.state().missing_pages(to - from));
            let begin = Instant::now();
            let keep_going = || !line.unwanted(job);
            let mut hooks = PassHooks { snapshot_at: &at, keep_going: Some(&keep_going), ..PassHooks::default() };
            last = session.extend(&mut self.model, &ids[from..to], rows, &mut hooks)?;
            self.speculation.prompted(&mut self.model, session, to - from, begin.elapsed());
            for ((at, kind), snapshot) in marks.into_iter().zip(hooks.snapshots) {
                cache.insert(&ids[..at], kind, snapshot, self.emptied);
            }
            cache.computed(to - from, begin.elapsed());
            self.line.metrics.prompt_tokens_computed.inc_by((to - from) as u64);
            if let Some(top) = *wanted {
                // The row of a token tells of the token after it.
                let next = &ids[from + 1..ids.len().min(to + 1)];
                prompt.extend(
                    next.iter()
                        .enumerate()
                        .map(|(row, &id)| Some(logprobs(last.row(row), id, top, self.options.usable_vocab))),
                );
            }
            self.line.check(job)?;
            let seconds = started.elapsed().as_secs_f64();
            let _ = job.events.send(Event::Prefilled { tokens: to, seconds });
        }
        if wanted.is_some() {
            let _ = job.events.send(Event::Prompt(prompt));
        }
        Ok(last)
    }

    /// Draws, tells and evaluates one token after another; returns why it ended. The session has then seen what was told, less
    /// the last token.
    fn decode(
        &mut self,
        job: &Job,
        session: &mut Session<M::State>,
        logits: Logits,
        timings: &mut Timings,
    ) -> Result<Finish, Over> {
        let mut step = Step::first(logits);
        let outcome = self.draw(job, session, &mut step, timings);
        self.speculation.settle(session, &mut self.model, &step, timings)?;
        outcome
    }

    fn draw(
        &mut self,
        job: &Job,
        session: &mut Session<M::State>,
        step: &mut Step,
        timings: &mut Timings,
    ) -> Result<Finish, Over> {
        let Request { ids, max_tokens, logprobs: wanted, ignore_eos, sampling, constraint, .. } = &job.request;
        let ahead = constraint.clone().map(Ahead::start).transpose()?;
        let metrics = self.line.metrics.clone();
        let usable = self.options.usable_vocab;
        let mut sampler = Sampler::new(sampling.clone(), ids, usable);
        let mut told_at = None::<Instant>;
        while timings.generated_tokens < *max_tokens {
            let row = step.row().ok_or(EngineError::NoLogits)?;
            let allowed = ahead.as_ref().map_or(Ok(Allowed::Any), Ahead::allowed)?;
            let id = sampler.draw(row, &allowed).ok_or(EngineError::NoLogits)?;
            if self.options.eos.contains(&id) && (ahead.is_some() || !ignore_eos) {
                step.ends(id);
                return Ok(Finish::Stop);
            }
            let logprobs = wanted.map(|top| logprobs(row, id, top, usable));
            if job.events.send(Event::Token { id, logprobs }).is_err() {
                return Err(Over::Gone);
            }
            let now = Instant::now();
            match told_at.replace(now) {
                None => metrics.time_to_first_token_seconds.observe((now - job.arrived).as_secs_f64()),
                Some(before) => metrics.inter_token_seconds.observe((now - before).as_secs_f64()),
            }
            metrics.generated_tokens.inc();
            timings.generated_tokens += 1;
            let room = *max_tokens - timings.generated_tokens;
            if room == 0 || session.len() == self.model.info().context {
                return Ok(Finish::Length);
            }
            self.line.check(job)?;
            self.model.fit_memory();
            self.line.cache.leave_pages(session.state().missing_pages(AHEAD));
            if let Some(ahead) = &ahead {
                ahead.drew(id);
            }
            let drawn = Drawn { id, sampler: &sampler, ahead: ahead.as_ref(), room };
            self.speculation.advance(session, &mut self.model, step, &drawn, timings)?;
        }
        Ok(Finish::Length)
    }
}

/// Tells those in line when the thread ends, even by a panic.
struct Stop<'a>(&'a RequestQueue);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
        self.0.cache.close();
    }
}

/// A panic's message.
fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

#[cfg(test)]
mod tests;
