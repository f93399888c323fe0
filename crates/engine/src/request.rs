//! Requests to the engine, and the events that answer them.

use super::{
    cache_salt::{CacheSalt, CachedPrompt},
    constraint::Constraint,
    fair_share::ClientId,
};
use crate::error::EngineError;
use moestro_model::model::PlacedImage;
use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// Sampling parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 selects the most likely token (greedy). Among equally likely tokens, the lowest id is selected.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 disables top-k.
    pub top_k: usize,
    pub min_p: f32,
    /// 1 disables the repetition penalty.
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Token ids, each with a value that is added to the token's logit before any other step.
    pub logit_bias: Vec<(u32, f32)>,
    /// `None` uses a random seed.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl Sampling {
    /// Always selects the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// A request to generate an answer. Prompt and answer are token ids.
#[derive(Debug, Clone)]
pub struct Request {
    pub ids: Vec<u32>,
    /// The images of the prompt, in order. `ids` has one placeholder id per image token.
    pub images: Vec<PlacedImage>,
    /// Maximum number of tokens to generate. If 0, the engine only evaluates the prompt.
    pub max_tokens: usize,
    pub sampling: Sampling,
    /// Return the log-probability of each generated token, with this many alternatives.
    pub logprobs: Option<usize>,
    /// Return the log-probabilities of the prompt's tokens (for `echo`), with this many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Continue after end-of-sequence tokens (for benchmarks). Has no effect on constrained answers.
    pub ignore_eos: bool,
    /// Restricts which tokens the answer may contain.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Ends of the prompt's messages, ascending. Later prompts are likely to diverge from this prompt at one of these
    /// positions.
    pub boundaries: Vec<Boundary>,
    /// Reuse state from earlier requests, and keep state for later requests.
    pub cache_prompt: bool,
    /// Requests with different salts share no cached state.
    pub cache_salt: Option<CacheSalt>,
    /// Waiting requests of several clients take turns.
    pub client: ClientId,
    /// Memory that the request holds while it waits, see [`Options::max_queue_bytes`](super::Options::max_queue_bytes).
    pub waiting_bytes: usize,
    /// The request fails with `TimedOut` at this time, whether it is queued or running.
    pub deadline: Option<Instant>,
    /// Set to true to end the answer after the current step with [`Finish::Stop`], for example at a stop string. Clones
    /// of a request share this flag.
    pub is_complete: Arc<AtomicBool>,
}

impl Request {
    /// A request for an unconstrained answer to `ids`, without log-probabilities.
    pub fn new(ids: Vec<u32>, max_tokens: usize, sampling: Sampling) -> Self {
        Self {
            ids,
            images: Vec::new(),
            max_tokens,
            sampling,
            logprobs: None,
            prompt_logprobs: None,
            ignore_eos: false,
            constraint: None,
            boundaries: Vec::new(),
            cache_prompt: true,
            cache_salt: None,
            client: ClientId::default(),
            waiting_bytes: 0,
            deadline: None,
            is_complete: Arc::default(),
        }
    }

    /// The parts of this request by which the prompt cache identifies its prompt.
    pub fn cached_prompt(&self) -> CachedPrompt<'_> {
        CachedPrompt { ids: &self.ids, images: &self.images, salt: self.cache_salt }
    }

    /// True if the request may resume from cached state. A request for log-probabilities of the prompt may not, because
    /// they need the logits of every row.
    pub(super) fn may_reuse(&self) -> bool {
        self.cache_prompt && self.prompt_logprobs.is_none()
    }

    /// True if `other` may continue from the state of this request after `len` tokens.
    pub(super) fn shares_prefix(&self, other: &Request, len: usize) -> bool {
        let own = self.cached_prompt();
        let keys = other.cached_prompt().keys();
        self.cache_prompt
            && other.may_reuse()
            && own.has_whole_keys(len)
            && own.keys().get(..len).is_some_and(|own| len < keys.len() && keys.starts_with(own))
    }
}

/// The end of a message in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// Number of prompt tokens up to the end of the message.
    pub at: usize,
    pub kind: BoundaryKind,
}

/// The kind of message that ends at a [`Boundary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundaryKind {
    /// The system prompt and the tool definitions.
    System,
    /// A question from a person, not the result of a tool.
    Query,
    /// Any other message.
    Message,
}

/// The log-probability of a token, and the log-probabilities of the most likely tokens at its position, before
/// temperature and penalties.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

/// The reason why an answer is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token was sampled, or [`Request::is_complete`] was set. An end-of-sequence token is not sent
    /// as an [`Event::Token`].
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
}

/// An event of a request. The last event is `Done` or `Failed`, unless the receiver was dropped.
#[derive(Debug)]
pub enum Event {
    /// The engine starts to evaluate the prompt. `cached_tokens` of its tokens are cached and need no computation.
    Started {
        cached_tokens: usize,
        queued: Duration,
    },
    /// `tokens` tokens of the prompt are evaluated or cached, `seconds` after the evaluation began. Sent after every
    /// chunk.
    Prefilled {
        tokens: usize,
        seconds: f64,
    },
    /// Log-probabilities of the prompt, one entry per token. The entry of the first token is `None`, since no token
    /// precedes it. Sent before the first `Token`.
    Prompt(Vec<Option<Logprobs>>),
    Token {
        id: u32,
        logprobs: Option<Logprobs>,
    },
    Done {
        finish: Finish,
        timings: Timings,
    },
    Failed(EngineError),
}

/// Token counts and times of one request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timings {
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
    /// Sum of the numbers of decoding sequences (including this one) in each decode pass of this answer.
    pub decoding_sequences: usize,
    /// Number of decode passes of this answer.
    pub decode_passes: usize,
    /// Number of tokens that drafts have proposed.
    pub drafted_tokens: usize,
    /// Number of drafted tokens that the sampler has accepted.
    pub accepted_tokens: usize,
    /// For each position in a draft: how often the position was verified while all earlier positions were accepted, and
    /// how often its token was accepted.
    pub draft_positions: [[u32; 2]; MAX_DRAFT_POSITIONS],
    /// Time that speculation saved. Negative if speculation made the answer slower.
    pub saved_seconds: f64,
}

impl Timings {
    /// Records a decode pass. `decoding` is the number of decoding sequences, including this one.
    pub fn record_pass(&mut self, decoding: usize) {
        self.decode_passes += 1;
        self.decoding_sequences += decoding;
    }
}

/// Maximum number of tokens in a draft.
pub const MAX_DRAFT_POSITIONS: usize = 15;

pub type Events = tokio::sync::mpsc::UnboundedReceiver<Event>;

/// Blocks until the request ends. Returns the generated tokens and the outcome.
pub fn collect(mut events: Events) -> (Vec<u32>, Result<(Finish, Timings), EngineError>) {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv() {
            Some(Event::Token { id, .. }) => tokens.push(id),
            Some(Event::Done { finish, timings }) => return (tokens, Ok((finish, timings))),
            Some(Event::Failed(error)) => return (tokens, Err(error)),
            Some(Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_)) => {}
            None => return (tokens, Err(EngineError::Stopped)),
        }
    }
}
