//! The engine: one thread that owns the model. A [`Handle`] queues [`Request`]s, first in first out; each is answered by
//! [`Event`]s. Dropping the receiver is the cancellation: the engine notices within one token.

pub mod cache;
mod constraint;
mod handle;
pub mod mock;
mod sampler;
mod scheduler;
mod session;
mod speculation;

pub use cache::{Status as PromptCacheStatus, Storage, forget_all as forget_prompts};
pub use constraint::{Allowed, Constraint};
pub use handle::{Handle, Options, Worker, spawn, spawn_with};
pub use sampler::{Sampler, argmax};
use scheduler::Scheduler;
pub use session::Session;
pub use speculation::{Companion, DRAFT_ROOM, Dflash, Draft, Kind, Lookup, Mtp, Outlook, Sequence, Speculate};

use crate::error::EngineError;
use std::time::{Duration, Instant};

/// Parameters of drawing the next token from the logits.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the likeliest token, of several the one with the lowest id.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: usize,
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Added to the logits before anything else.
    pub logit_bias: Vec<(u32, f32)>,
    /// `None` draws a fresh seed.
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
    /// The likeliest token, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

/// One generation, in tokens.
#[derive(Debug, Clone)]
pub struct Request {
    pub ids: Vec<u32>,
    /// Most tokens to generate; 0 evaluates the prompt only.
    pub max_tokens: usize,
    pub sampling: Sampling,
    /// Log-probabilities of each generated token, with this many alternatives.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's own tokens (for `echo`), with this many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Go on past end-of-sequence tokens (benchmarks). A constrained answer ends with one all the same.
    pub ignore_eos: bool,
    /// The form that the answer is held to.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The places where other prompts may depart from this one, ascending.
    pub boundaries: Vec<Boundary>,
    /// Go on from what earlier requests left, and leave something for later ones.
    pub cache_prompt: bool,
    /// When its time is up, in line or under way.
    pub deadline: Option<Instant>,
}

impl Request {
    /// A free answer to `ids`, up to an end-of-sequence token, with nothing told beside it.
    pub fn new(ids: Vec<u32>, max_tokens: usize, sampling: Sampling) -> Self {
        Self {
            ids,
            max_tokens,
            sampling,
            logprobs: None,
            prompt_logprobs: None,
            ignore_eos: false,
            constraint: None,
            boundaries: Vec::new(),
            cache_prompt: true,
            deadline: None,
        }
    }
}

/// The end of a message in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// Tokens up to here.
    pub at: usize,
    pub departure: Departure,
}

/// The kind of message that ends at a [`Boundary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// The system prompt and the tools.
    System,
    /// A question: what a person asks, not what a tool answers.
    Query,
    /// Any other message.
    Message,
}

/// The log-probability of a token and of the likeliest ones at its position, before temperature and penalties.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token was drawn (it is not sent as a [`Event::Token`]).
    Stop,
    /// `max_tokens` or the context's end.
    Length,
}

/// An event of a request. The last one is `Done` or `Failed`, unless the receiver went away.
#[derive(Debug)]
pub enum Event {
    /// The prompt is being evaluated; this many of its tokens were already known.
    Started {
        cached_tokens: usize,
        queued: Duration,
    },
    /// This many of the prompt's tokens have been evaluated or were known, since it began this many seconds ago. Sent
    /// after every chunk.
    Prefilled {
        tokens: usize,
        seconds: f64,
    },
    /// One entry a prompt token; the first has no logprob (nothing precedes it). Sent before any `Token`.
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

/// The times of one request, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timings {
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
    /// Tokens that a draft proposed, and those of them that were right.
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    /// For each place in a draft: how often it was tried, all before it being right, and how often it was right.
    pub places: [[u32; 2]; PLACES],
    /// Time saved by speculation; below zero if it lost.
    pub saved_seconds: f64,
}

/// Places in a draft.
pub const PLACES: usize = 15;

pub type Events = tokio::sync::mpsc::UnboundedReceiver<Event>;

/// Blocks until the answer is over: its tokens, and how it ended.
pub fn hear(mut events: Events) -> (Vec<u32>, Result<(Finish, Timings), EngineError>) {
    let mut told = Vec::new();
    loop {
        match events.blocking_recv() {
            Some(Event::Token { id, .. }) => told.push(id),
            Some(Event::Done { finish, timings }) => return (told, Ok((finish, timings))),
            Some(Event::Failed(error)) => return (told, Err(error)),
            Some(Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_)) => {}
            None => return (told, Err(EngineError::Stopped)),
        }
    }
}
