//! A request that the scheduler works on: its sequence, and how far its prompt or its answer is.

use super::{
    answer::PartialAnswer,
    prompt_cache::SnapshotKind,
    queue::QueuedRequest,
    request::{Logprobs, Request},
    sequence::Sequence,
};
use crate::model::{MAX_VERIFY_ROWS, PAGE, SequenceState};
use std::time::Instant;

/// Rows that a decode step with a draft may write.
pub const DRAFT_ROWS: usize = 4 * MAX_VERIFY_ROWS;
/// Maximum number of tokens of an answer for which pages must be free when a request is admitted next to others. Most answers
/// are shorter than what clients allow, so longer ones take pages as they grow.
const RESERVED_ANSWER: usize = 256;

pub struct LiveRequest<S> {
    pub request: QueuedRequest,
    /// `None` before the first step, and after the sequence was dropped in favour of another one.
    pub sequence: Option<Sequence<S>>,
    pub stage: Stage,
    /// The tokens of a dropped sequence, which must be computed again before the answer continues.
    pub lost: Vec<u32>,
    /// [`clear_count`](super::prompt_cache::PromptCache::clear_count) when the request began.
    pub clear_count: u64,
    /// The step that evaluated its last token.
    pub last_step: u64,
    /// The next token must not share a pass with other sequences: one of them has failed.
    pub is_alone: bool,
}

pub enum Stage {
    New,
    Prefill(Prefill),
    Decode(Box<PartialAnswer>),
}

/// A prompt that is being evaluated.
pub struct Prefill {
    pub cached_tokens: usize,
    /// Where to take snapshots, ascending.
    pub snapshots: Vec<(usize, SnapshotKind)>,
    /// Log-probabilities of the prompt, if they are wanted.
    pub logprobs: Option<Vec<Option<Logprobs>>>,
    /// Start of the request's first step.
    pub started: Instant,
    /// Start of the first chunk.
    pub chunks_started: Instant,
}

/// The next work of a live request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A sequence to start from. Needs no pass.
    Begin,
    /// Its first token, from logits that are there. Needs no pass.
    Sample,
    /// This many rows of its prompt, or of a dropped sequence.
    Read(usize),
    /// One token.
    Decode,
}

impl<S: SequenceState> LiveRequest<S> {
    pub fn new(request: QueuedRequest) -> Self {
        Self {
            request,
            sequence: None,
            stage: Stage::New,
            lost: Vec::new(),
            clear_count: 0,
            last_step: 0,
            is_alone: false,
        }
    }

    /// Tokens in its sequence.
    pub fn len(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }

    pub fn work(&self) -> Work {
        let len = self.len();
        match &self.stage {
            Stage::New => Work::Begin,
            Stage::Prefill(_) => Work::Read(self.request.request.ids.len() - len),
            Stage::Decode(_) if len < self.lost.len() => Work::Read(self.lost.len() - len),
            Stage::Decode(answer) if answer.last.is_none() => Work::Sample,
            Stage::Decode(_) => Work::Decode,
        }
    }

    /// Its sequence and its answer, while that is generated.
    pub fn decoding(&mut self) -> Option<(&mut Sequence<S>, &mut PartialAnswer)> {
        match (&mut self.sequence, &mut self.stage) {
            (Some(sequence), Stage::Decode(answer)) => Some((sequence, answer)),
            _ => None,
        }
    }

    /// Drops the sequence. Its tokens are computed again when the request continues.
    pub fn drop_sequence(&mut self) {
        let Some(sequence) = self.sequence.take() else { return };
        match &mut self.stage {
            Stage::New => {}
            // The prompt continues from what the cache has of it. Log-probabilities need all of it.
            Stage::Prefill(prefill) => prefill.logprobs = prefill.logprobs.as_ref().map(|_| vec![None]),
            Stage::Decode(answer) => {
                if answer.last.is_some() {
                    answer.rows.clear();
                }
                if self.lost.len() < sequence.len() {
                    self.lost = sequence.tokens().to_vec();
                }
            }
        }
    }

    /// Pages that the next step needs beyond those that the sequence holds.
    pub fn missing_pages(&self, chunk: usize, decode_rows: usize) -> usize {
        // A sequence that starts from a snapshot copies its last page.
        let Some(sequence) = &self.sequence else { return 1 };
        let rows = match self.work() {
            Work::Read(rows) => rows.min(chunk),
            Work::Decode => decode_rows,
            Work::Begin | Work::Sample => 0,
        };
        sequence.state().missing_pages(rows)
    }

    /// Pages that the request holds or is expected to need.
    pub fn reserved_pages(&self) -> usize {
        reserved_pages(&self.request.request).max((self.len().max(self.lost.len()) + DRAFT_ROWS).div_ceil(PAGE))
    }
}

/// Pages for a prompt and the beginning of its answer.
pub fn reserved_pages(request: &Request) -> usize {
    (request.ids.len() + request.max_tokens.min(RESERVED_ANSWER)).div_ceil(PAGE)
}

/// True if a request may start from state of earlier ones. Log-probabilities of the prompt need every row.
pub fn may_reuse(request: &Request) -> bool {
    request.cache_prompt && request.prompt_logprobs.is_none()
}
