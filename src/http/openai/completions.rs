//! `POST /v1/completions`: text or token ids in, text out, without a template.
//!
//! Several prompts are answered one after another, as choices of one answer; only the first of them can meet a full
//! queue. `n` choices to each prompt follow each other. `max_tokens` defaults to 16, as OpenAI has it. With `echo` and `logprobs` the prompt is scored, which is what
//! evaluation harnesses ask for; they add one token and leave its entry out again, so that token is generated even if
//! it ends the text.

use crate::http::{
    LoadedModel, ServerState,
    errors::ApiError,
    layers::{memory::MemoryPermit, request_log::RequestLog},
    models::WeakModel,
    openai::{
        chunks::{Envelope, FinishReason, ResponseMeta, TextChoice, Usage},
        types::{Common, CompletionRequest, Prompt},
    },
    output::{
        completion_logprobs::{self, Scores},
        generation::{Reader, Transcript, Turn},
    },
    request::{body, fields, sampling},
    sse::{self, Frames},
};
use crate::{
    chat::parser::Delta,
    engine::{Request, Sampling},
    error::EngineError,
};
use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use std::{sync::Arc, time::Duration};

const DEFAULT_MAX_TOKENS: usize = 16;

/// As many prompts as OpenAI takes.
const MAX_PROMPTS: usize = 2048;

pub async fn completions(
    State(state): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    state.ensure_ready()?;
    let (common, request, permit) = body::request::<CompletionRequest>(&state, body, fields::COMPLETIONS).await?;
    let lease = state.models.lease(common.model.as_deref()).await?;
    lease
        .respond(log.deadline, common.streams(), Frames::error, move |app| answer(app, log, common, request, permit))
        .await
}

async fn answer(
    app: Arc<LoadedModel>,
    log: Arc<RequestLog>,
    common: Common,
    request: CompletionRequest,
    permit: MemoryPermit,
) -> Result<Response, ApiError> {
    let job = Job::new(&app, log.clone(), &common, request, permit).await?;
    let first = job.submit(0)?;
    log.mark_generation();
    match common.streams() {
        true => Ok(job.stream(first, common.usage())),
        false => job.whole(first).await,
    }
}

/// A checked request.
struct Job {
    head: ResponseMeta,
    again: WeakModel,
    log: Arc<RequestLog>,
    prompts: Vec<Vec<u32>>,
    /// Choices for each prompt, which stand side by side.
    n: usize,
    max_tokens: usize,
    echo: bool,
    logprobs: Option<usize>,
    sampling: Sampling,
    stops: Vec<String>,
    /// The memory of the prompts, until the answer is sent.
    _permit: MemoryPermit,
    cache_prompt: bool,
    /// A stream says how far the prompts are.
    progress: bool,
}

impl Job {
    async fn new(
        app: &Arc<LoadedModel>,
        log: Arc<RequestLog>,
        common: &Common,
        request: CompletionRequest,
        mut permit: MemoryPermit,
    ) -> Result<Self, ApiError> {
        common.check(&app.card)?;
        let n = sampling::choices(common.n)?;
        if request.best_of.is_some_and(|best_of| usize::try_from(best_of) != Ok(n)) {
            return Err(ApiError::unsupported(
                "best_of",
                "best_of is not supported: each choice is one that was drawn.",
            ));
        }
        if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "suffix is not supported."));
        }
        let max_tokens = sampling::tokens("max_tokens", common.max_tokens, 0)?.unwrap_or(DEFAULT_MAX_TOKENS);
        let prompts = prompts(app, &mut permit, request.prompt).await?;
        let tokens: usize = prompts.iter().map(Vec::len).sum();
        permit.resize(prompts.len() * size_of::<Vec<u32>>() + tokens * 2 * size_of::<u32>() + common.bytes())?;
        let job = Self {
            head: ResponseMeta::new(app, "cmpl", "text_completion"),
            again: WeakModel::new(app),
            log,
            n,
            max_tokens,
            echo: request.echo.unwrap_or(false),
            logprobs: request.logprobs.map(|top| sampling::alternatives("logprobs", top)).transpose()?,
            sampling: common.sampling(&app.defaults, app.engine.vocab())?,
            stops: common.stops()?,
            prompts,
            cache_prompt: common.cache_prompt.unwrap_or(true),
            progress: common.return_progress.unwrap_or(false),
            _permit: permit,
        };
        for prompt in &job.prompts {
            sampling::room("prompt", prompt.len(), Some(max_tokens), app.engine.context())?;
        }
        Ok(job)
    }

    fn choices(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// The prompt of choice `index`.
    fn prompt(&self, index: usize) -> &[u32] {
        self.prompts.get(index / self.n).map_or(&[], Vec::as_slice)
    }

    /// Queues choice `index`. Choice `i` to a prompt is drawn with seed + `i`.
    fn submit(&self, index: usize) -> Result<Transcript, EngineError> {
        let app = self.again.model()?;
        let ids = self.prompt(index).to_vec();
        let mut sampling = self.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add((index % self.n) as u64));
        let max_tokens = self.max_tokens.min(app.engine.context().saturating_sub(ids.len()));
        let request = Request {
            boundaries: app.boundaries(&ids),
            cache_prompt: self.cache_prompt,
            logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            ignore_eos: self.echo && self.logprobs.is_some() && self.max_tokens == 1,
            ..Request::new(ids, max_tokens, sampling)
        };
        Transcript::submit(&app, &self.log, request, Reader::Plain, self.stops.clone())
    }

    /// The generation of a later prompt: it has waited in line already, so it waits for a place rather than give up.
    async fn submit_later(&self, index: usize) -> Result<Transcript, EngineError> {
        loop {
            match self.submit(index) {
                Err(EngineError::QueueFull) => tokio::time::sleep(Duration::from_millis(50)).await,
                submitted => return submitted,
            }
        }
    }

    /// One body.
    async fn whole(self, first: Transcript) -> Result<Response, ApiError> {
        let mut first = Some(first);
        let mut usage = Usage::default();
        let mut answers = Vec::with_capacity(self.choices());
        for index in 0..self.choices() {
            let mut transcript = match first.take() {
                Some(first) => first,
                None => self.submit_later(index).await?,
            };
            let (mut choice, mut text) = (Choice::new(&self, index), String::new());
            let told = |turn: Turn| {
                if turn.progress.is_none() {
                    choice.add(&turn, &mut text);
                }
            };
            let ending = transcript.tell(told).await?;
            self.add(&mut usage, ending.usage, index);
            let logprobs = choice.scores.as_mut().map(|scores| scores.take(Some(ending.reason)));
            answers.push((text, logprobs, ending.reason));
        }
        let choices: Vec<_> = answers
            .iter_mut()
            .enumerate()
            .map(|(index, (text, logprobs, end))| TextChoice {
                index,
                text,
                logprobs: logprobs.take(),
                finish_reason: Some(*end),
            })
            .collect();
        Ok(Json(self.head.envelope(&choices, Some(Some(usage)))).into_response())
    }

    /// One choice after the other, a chunk a turn that has text; then, if asked for, the usage.
    fn stream(mut self, first: Transcript, usage: bool) -> Response {
        sse::respond(move |frames| async move {
            self.log.begin_stream();
            let mut first = Some(first);
            let mut used = Usage::default();
            for index in 0..self.choices() {
                let submitted = match first.take() {
                    Some(first) => Ok(first),
                    None => self.submit_later(index).await,
                };
                if index + 1 == self.choices() {
                    self.again.release();
                }
                let outcome = match submitted {
                    Ok(transcript) => self.stream_one(&frames, index, transcript, usage).await,
                    Err(error) => Err(error),
                };
                match outcome {
                    Ok(usage) => self.add(&mut used, usage, index),
                    Err(error) => {
                        self.log.log_stream_error(&error);
                        return frames.error(&error.into());
                    }
                }
            }
            if usage {
                let end: Envelope<TextChoice> = self.head.envelope(&[], Some(Some(used)));
                frames.data(&end);
            }
            frames.done();
            self.log.end_stream();
        })
    }

    async fn stream_one(
        &self,
        frames: &sse::Frames,
        index: usize,
        mut transcript: Transcript,
        usage: bool,
    ) -> Result<Usage, EngineError> {
        let (mut choice, mut text) = (Choice::new(self, index), String::new());
        let send = |text: &str, choice: &mut Choice, end: Option<FinishReason>| {
            let logprobs = choice.scores.as_mut().map(|scores| scores.take(end));
            let choice = TextChoice { index, text, logprobs, finish_reason: end };
            frames.data(&self.head.envelope(&[choice], usage.then_some(None)));
        };
        let told = transcript.tell(|turn| {
            if let Some(progress) = turn.progress {
                if self.progress {
                    let none: Envelope<TextChoice> = self.head.envelope(&[], None);
                    frames.data(&Envelope { prompt_progress: Some(progress), ..none });
                }
                return;
            }
            choice.add(&turn, &mut text);
            if !text.is_empty() || turn.end.is_some() {
                send(&text, &mut choice, turn.end);
                text.clear();
            }
        });
        Ok(told.await?.usage)
    }

    /// Adds the usage of choice `index`. A prompt counts once.
    fn add(&self, sum: &mut Usage, usage: Usage, index: usize) {
        if index.is_multiple_of(self.n) {
            sum.prompt_tokens += usage.prompt_tokens;
            sum.prompt_tokens_details.cached_tokens += usage.prompt_tokens_details.cached_tokens;
        }
        sum.completion_tokens += usage.completion_tokens;
        sum.timings.add(usage.timings);
        sum.total_tokens = sum.prompt_tokens + sum.completion_tokens;
    }
}

/// One prompt's answer in the making.
struct Choice<'a> {
    job: &'a Job,
    index: usize,
    scores: Option<Scores<'a>>,
    begun: bool,
}

impl<'a> Choice<'a> {
    fn new(job: &'a Job, index: usize) -> Self {
        let scores = job.logprobs.map(|_| Scores::new(&job.head.tokenizer));
        Self { job, index, scores, begun: false }
    }

    /// Adds what a turn brought; the prompt comes first if it is to be echoed.
    fn add(&mut self, turn: &Turn, text: &mut String) {
        let before = text.len();
        if !self.begun && self.job.echo {
            let ids = self.job.prompt(self.index);
            *text += &completion_logprobs::text(&self.job.head.tokenizer, ids);
            if let (Some(scores), Some(prompt)) = (&mut self.scores, &turn.prompt) {
                for (&id, logprobs) in ids.iter().zip(prompt) {
                    scores.push(id, logprobs.as_ref());
                }
            }
        }
        self.begun = true;
        for delta in &turn.deltas {
            if let Delta::Content(more) = delta {
                *text += more;
            }
        }
        if let Some(scores) = &mut self.scores {
            scores.told(&text[before..]);
            for (id, logprobs) in &turn.scored {
                scores.push(*id, Some(logprobs));
            }
        }
    }
}

async fn prompts(app: &LoadedModel, permit: &mut MemoryPermit, prompt: Prompt) -> Result<Vec<Vec<u32>>, ApiError> {
    let vocab = app.engine.vocab();
    let count = match &prompt {
        Prompt::Texts(texts) => texts.len(),
        Prompt::Batch(batch) => batch.len(),
        Prompt::Text(_) | Prompt::Ids(_) => 1,
    };
    if count > MAX_PROMPTS {
        return Err(ApiError::invalid("prompt", format!("There are {count} prompts; {MAX_PROMPTS} are the most.")));
    }
    let mut prompts = Vec::with_capacity(count);
    match prompt {
        Prompt::Text(text) => prompts.push(app.encode(permit, text, "prompt").await?),
        Prompt::Texts(texts) => {
            for text in texts {
                prompts.push(app.encode(permit, text, "prompt").await?);
            }
        }
        Prompt::Ids(ids) => prompts.push(sampling::ids("prompt", &ids, vocab)?),
        Prompt::Batch(batch) => {
            for ids in batch {
                prompts.push(sampling::ids("prompt", &ids, vocab)?);
            }
        }
    }
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::invalid(
            "prompt",
            "The prompt is empty; there must be at least one token to go on from.",
        ));
    }
    Ok(prompts)
}
