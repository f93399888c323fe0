//! Choices: the answers to one request. Choices are written one after another. They are generated at the same time if
//! the engine runs several requests at a time.
//!
//! A chat has one prompt, and a completion request may have several prompts. Each prompt gets `n` choices, and choice
//! `i` of a prompt is drawn with seed + `i`. If the queue is full, the first choice fails. Later choices wait, because
//! the request has already waited in the queue, and are queued again if the queue gives them up.

use crate::http::{
    layers::{MemoryPermit, RequestLog},
    models::LoadedModel,
    output::{
        choice_task::ChoiceTask,
        generation::{Generation, TextReader},
    },
    request::boundaries,
};
use moestro_chat::{grammar::ExactCalls, parser::Parser};
use moestro_engine::{Request, error::EngineError};
use serde_json::Value;
use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    time::Duration,
};

/// Delay before a later choice tries a full queue again.
const QUEUE_RETRY: Duration = Duration::from_millis(50);

/// Parameters for parsing an assistant message.
pub struct ChatParams {
    pub tools: Vec<Value>,
    /// True if the prompt ends inside the reasoning.
    pub in_reasoning: bool,
    /// The calls that a grammar constrains.
    pub exact_calls: ExactCalls,
    pub parallel_tool_calls: bool,
}

impl ChatParams {
    fn parser(&self) -> Parser {
        Parser::new(self.in_reasoning, &self.tools).with_exact_calls(self.exact_calls)
    }
}

/// A checked request for one or more answers.
pub struct Choices {
    /// A weak reference does not keep the model in memory. If the client reads too slowly, the host may unload the
    /// model between two generations. Empty after the last generation has started.
    pub model: Weak<LoadedModel>,
    pub log: Arc<RequestLog>,
    /// Token ids of the prompts. Shared with the renderer, which may echo the prompts.
    pub prompts: Arc<Vec<Vec<u32>>>,
    /// Number of choices per prompt.
    pub n: usize,
    /// The engine request of every choice, without its tokens. `max_tokens` is not limited to the context yet.
    pub request: Request,
    /// `None` for a plain completion.
    pub chat: Option<ChatParams>,
    pub stops: Vec<String>,
    /// True if streams report prompt progress.
    pub reports_progress: bool,
    /// Tasks of later choices that have already been queued, in order.
    pub started: VecDeque<ChoiceTask>,
    /// Number of choices whose prompt tokens the log has counted. A choice that is queued again is counted once.
    pub logged: usize,
    /// Memory of the request, held until the last answer is complete.
    pub permit: Arc<MemoryPermit>,
}

impl Choices {
    pub fn len(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// True if choice `index` has the same prompt as the choice before it.
    pub fn has_previous_prompt(&self, index: usize) -> bool {
        !index.is_multiple_of(self.n)
    }

    fn model(&self) -> Result<Arc<LoadedModel>, EngineError> {
        self.model.upgrade().ok_or(EngineError::Unloaded)
    }

    /// Queues choice `index`. A single choice releases the model.
    pub fn submit(&mut self, index: usize) -> Result<Generation, EngineError> {
        let model = self.model()?;
        let generation = self.submit_to(&model, index)?;
        if index >= self.logged {
            self.log.add_tokens(generation.prompt_tokens(), 0);
            self.logged = index + 1;
        }
        if self.len() == 1 {
            self.release_model();
        }
        Ok(generation)
    }

    /// Called when no choice has to be queued any more.
    pub fn release_model(&mut self) {
        self.model = Weak::new();
        self.request.constraint = None;
    }

    /// Queues the choices after `current` that the engine can run at the same time, until the queue is full.
    pub fn submit_next(&mut self, current: usize) -> Result<(), EngineError> {
        loop {
            let next = current + 1 + self.started.len();
            if next >= self.len() || self.started.len() + 1 >= self.model()?.engine.parallel() {
                return Ok(());
            }
            match self.submit(next) {
                Ok(generation) => self.started.push_back(ChoiceTask::spawn(generation, self.permit.clone())),
                Err(EngineError::QueueFull { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns choice `index`, which follows the current choice. If the choice is not queued yet, queues it, and waits
    /// while the queue is full.
    pub async fn next(&mut self, index: usize) -> Result<ChoiceTask, EngineError> {
        if let Some(task) = self.started.pop_front() {
            return Ok(task);
        }
        loop {
            match self.submit(index) {
                Err(EngineError::QueueFull { .. }) => tokio::time::sleep(QUEUE_RETRY).await,
                submitted => return Ok(ChoiceTask::spawn(submitted?, self.permit.clone())),
            }
        }
    }

    fn submit_to(&self, model: &LoadedModel, index: usize) -> Result<Generation, EngineError> {
        let ids = self.prompts.get(index / self.n).cloned().unwrap_or_default();
        let mut request = Request {
            boundaries: boundaries(&model.tokenizer, &ids),
            max_tokens: self.request.max_tokens.min(model.engine.context().saturating_sub(ids.len())),
            ids,
            ..self.request.clone()
        };
        let seed = &mut request.sampling.seed;
        *seed = seed.map(|seed| seed.wrapping_add((index % self.n) as u64));
        let reader = match &self.chat {
            None => TextReader::Plain,
            Some(chat) => TextReader::Chat {
                parser: Box::new(chat.parser()),
                in_reasoning: chat.in_reasoning,
                parallel_tool_calls: chat.parallel_tool_calls,
            },
        };
        Generation::submit(model, &self.log, request, reader, self.stops.clone())
    }
}
