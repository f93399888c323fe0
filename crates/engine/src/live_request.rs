//! An admitted request: its sequence, and the progress of its prompt or answer.

use super::{
    abort::Abort,
    answer::{PartialAnswer, StepOutput, TokenRules},
    cache_salt::CachedPrompt,
    prompt_cache::SnapshotKind,
    queue::SubmittedRequest,
    request::{Logprobs, Request},
    sequence::Sequence,
};
use moestro_base::metrics::Metrics;
use moestro_model::model::{MAX_VERIFY_ROWS, PAGE, SequenceState};
use std::{ops::Range, time::Instant};

/// Maximum number of positions that a decode step with drafts may write.
pub const DRAFT_ROWS: usize = 4 * MAX_VERIFY_ROWS;
/// Maximum number of answer tokens for which pages must be free when a request is admitted while other requests run.
/// Most answers are shorter than `max_tokens`, so reserving pages for `max_tokens` would admit too few requests.
const RESERVED_ANSWER: usize = 256;
/// Maximum number of rows per chunk if the request asks for the prompt's log-probabilities, which need the logits of
/// every row. With a vocabulary of 248,320, the logits of 32 rows take 32 MB. The chunk size does not change the
/// logits.
const PROMPT_LOGIT_ROWS: usize = 32;
/// Minimum number of tokens that an additional snapshot must save a request that waits for it. A snapshot copies a state
/// of up to about 100 MB.
const MIN_SHARED: usize = 64;

pub struct LiveRequest<S> {
    pub submitted: SubmittedRequest,
    /// `None` before the first step, and after the sequence was dropped (preempted, or its pass failed).
    pub sequence: Option<Sequence<S>>,
    pub stage: Stage,
    /// Tokens of a dropped sequence, which must be recomputed before the answer continues.
    pub dropped_tokens: Vec<u32>,
    /// Value of [`clear_count`](super::prompt_cache::PromptCache::clear_count) when the request began.
    pub clear_count: u64,
    /// Number of the scheduler step in which this request decoded last.
    pub last_step: u64,
    /// The next pass must contain only this sequence, because its last pass with other sequences failed.
    pub must_run_alone: bool,
    /// The request has not begun and waits for the snapshot of another request.
    pub waits_for_prefix: bool,
    /// Position of the first snapshot that other requests wait for.
    pub awaited: Option<usize>,
    /// True after the system has ended GPU work of this request because it delayed the screen. The request continues
    /// once.
    pub has_delayed_screen: bool,
}

pub enum Stage {
    New,
    Prefill(Prefill),
    Decode(Box<PartialAnswer>),
}

/// Progress of a prompt's evaluation.
pub struct Prefill {
    pub cached_tokens: usize,
    /// Positions at which to take snapshots, ascending.
    pub snapshots: Vec<(usize, SnapshotKind)>,
    /// Log-probabilities of the prompt, if the request asks for them.
    pub logprobs: Option<Vec<Option<Logprobs>>>,
    /// Start of the request's first step.
    pub started: Instant,
    /// Start of the first chunk.
    pub chunks_started: Instant,
}

/// The next work of a live request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Find a sequence to start from. Needs no forward pass.
    Begin,
    /// Sample the first token from the logits of the prompt. Needs no forward pass.
    Sample,
    /// Evaluate this many tokens of the prompt, or of a dropped sequence.
    Prefill(usize),
    /// Evaluate the last token and sample the next one.
    Decode,
}

impl<S: SequenceState> LiveRequest<S> {
    pub fn new(submitted: SubmittedRequest) -> Self {
        Self {
            submitted,
            sequence: None,
            stage: Stage::New,
            dropped_tokens: Vec::new(),
            clear_count: 0,
            last_step: 0,
            must_run_alone: false,
            waits_for_prefix: false,
            awaited: None,
            has_delayed_screen: false,
        }
    }

    /// Number of tokens in the sequence.
    pub fn len(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }

    pub fn work(&self) -> Work {
        let len = self.len();
        match &self.stage {
            Stage::New => Work::Begin,
            Stage::Prefill(_) => Work::Prefill(self.submitted.request.ids.len() - len),
            Stage::Decode(_) if len < self.dropped_tokens.len() => Work::Prefill(self.dropped_tokens.len() - len),
            Stage::Decode(answer) if answer.last.is_none() => Work::Sample,
            Stage::Decode(_) => Work::Decode,
        }
    }

    /// True if the model has evaluated a token of the sequence ahead, so that a pass may be in flight.
    pub fn is_ahead(&self) -> bool {
        self.sequence.as_ref().is_some_and(|sequence| sequence.ahead().is_some())
    }

    /// The sequence and the answer, if the request is in the decode stage.
    pub fn decoding(&mut self) -> Option<(&mut Sequence<S>, &mut PartialAnswer)> {
        match (&mut self.sequence, &mut self.stage) {
            (Some(sequence), Stage::Decode(answer)) => Some((sequence, answer)),
            _ => None,
        }
    }

    /// The tokens to evaluate before the answer can continue: the prompt, or the tokens of a dropped sequence.
    pub fn tokens_to_evaluate(&self) -> CachedPrompt<'_> {
        let prompt = self.submitted.request.cached_prompt();
        let ids = if self.dropped_tokens.is_empty() { prompt.ids } else { &self.dropped_tokens };
        CachedPrompt { ids, ..prompt }
    }

    /// Positions of the tokens that the next chunk evaluates. `max` is the maximum number of rows. A dropped sequence
    /// is split into chunks such that its state gets the same bytes as before. `exact_chunks` is
    /// [`ModelInfo::exact_chunks`](moestro_model::model::ModelInfo::exact_chunks).
    pub fn next_chunk(&self, max: usize, exact_chunks: bool) -> Range<usize> {
        let from = self.len();
        let prompt = self.submitted.request.ids.len();
        let max = match &self.stage {
            Stage::Prefill(prefill) if prefill.logprobs.is_some() => max.min(PROMPT_LOGIT_ROWS),
            _ => max,
        };
        let to = match from < prompt {
            true => prompt.min(from + max),
            // If the model rounds differently in a pass of several rows, each token of the answer needs a separate
            // pass, as before.
            false if !exact_chunks => from + 1,
            false => self.dropped_tokens.len().min(from + max),
        };
        from..to
    }

    /// Position of the longest snapshot that this request can take of a prefix of `prompt`, if waiting for that snapshot
    /// is sooner than computing the prefix. The first `cached` tokens of `prompt` are cached. If `may_add` is false, the
    /// request takes only the snapshots that it has chosen for itself.
    pub fn coming_snapshot(&self, prompt: CachedPrompt<'_>, cached: usize, may_add: bool) -> Option<usize> {
        let (Stage::Prefill(prefill), Some(sequence)) = (&self.stage, &self.sequence) else { return None };
        let own = self.submitted.request.cached_prompt();
        let keys = prompt.keys();
        let own_keys = own.keys();
        let same = keys.iter().zip(own_keys.iter()).take_while(|(one, other)| one == other).count();
        // The last token of a prompt must be evaluated to get its logits.
        let common = same.min(keys.len() - 1);
        let is_coming = |at: usize| sequence.len() < at && at <= common;
        let chosen = prefill.snapshots.iter().map(|&(at, _)| at).rfind(|&at| is_coming(at));
        let is_longer = common >= chosen.unwrap_or(0).max(cached) + MIN_SHARED;
        let has_whole_keys = own.has_whole_keys(common) && prompt.has_whole_keys(common);
        let may_add = may_add && self.submitted.request.cache_prompt && has_whole_keys && is_coming(common);
        let at = if is_longer && may_add { common } else { chosen? };
        // If both requests computed the prefix, they would share the time, so it would take twice as long.
        (at > cached && at - sequence.len() <= 2 * (at - cached)).then_some(at)
    }

    /// Takes a snapshot at position `at`, because another request waits for it.
    pub fn expect_snapshot(&mut self, at: usize) {
        let Stage::Prefill(prefill) = &mut self.stage else { return };
        if let Err(index) = prefill.snapshots.binary_search_by_key(&at, |&(at, _)| at) {
            prefill.snapshots.insert(index, (at, SnapshotKind::System));
        }
        self.awaited = Some(self.awaited.map_or(at, |first| first.min(at)));
    }

    /// True if the logits from which to sample the next token are known.
    pub fn has_logits(&self) -> bool {
        matches!(&self.stage, Stage::Decode(answer) if answer.rows.current().is_some())
    }

    /// Samples the next token. `context` is the maximum number of tokens in a sequence.
    pub fn sample(&mut self, context: usize, rules: &TokenRules, metrics: &Metrics) -> Result<StepOutput, Abort> {
        let is_full = self.len() == context;
        let Stage::Decode(answer) = &mut self.stage else { return Ok(StepOutput::default()) };
        answer.sample(&self.submitted, is_full, rules, metrics)
    }

    /// Takes the sequence out of a request that has ended, if later requests may reuse the sequence.
    pub fn take_reusable_sequence(&mut self) -> Option<Sequence<S>> {
        let is_whole = |sequence: &Sequence<S>| sequence.len() >= self.dropped_tokens.len();
        self.sequence.take().filter(is_whole).filter(|_| self.submitted.request.cache_prompt)
    }

    /// Drops the sequence. The sequence's tokens are recomputed when the request continues.
    pub fn drop_sequence(&mut self) {
        let Some(sequence) = self.sequence.take() else { return };
        match &mut self.stage {
            Stage::New => {}
            // The prompt resumes from a cached prefix. The log-probabilities start again from the first token.
            Stage::Prefill(prefill) => prefill.logprobs = prefill.logprobs.as_ref().map(|_| vec![None]),
            Stage::Decode(answer) => {
                if answer.last.is_some() {
                    answer.rows.clear();
                }
                if self.dropped_tokens.len() < sequence.len() {
                    self.dropped_tokens = sequence.tokens().to_vec();
                }
            }
        }
    }

    /// Number of pages that the next step must allocate.
    pub fn missing_pages(&self, chunk: usize, decode_rows: usize) -> usize {
        // A sequence that starts from a snapshot allocates a copy of the snapshot's last page.
        let Some(sequence) = &self.sequence else { return 1 };
        let rows = match self.work() {
            Work::Prefill(rows) => rows.min(chunk),
            Work::Decode => decode_rows,
            Work::Begin | Work::Sample => 0,
        };
        sequence.state().missing_pages(rows)
    }

    /// Number of pages that the request holds or is expected to need.
    pub fn reserved_pages(&self) -> usize {
        reserved_pages(&self.submitted.request)
            .max((self.len().max(self.dropped_tokens.len()) + DRAFT_ROWS).div_ceil(PAGE))
    }
}

/// Number of pages for a prompt and the first [`RESERVED_ANSWER`] tokens of its answer.
pub fn reserved_pages(request: &Request) -> usize {
    (request.ids.len() + request.max_tokens.min(RESERVED_ANSWER)).div_ceil(PAGE)
}
