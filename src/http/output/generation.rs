//! One generation as it is told to a client: `Event -> Turn`. A token becomes text, the text is sorted into reasoning,
//! content and tool calls, and the content is cut at the first stop string.
//!
//! Stop strings are looked for in the content alone: a model that thinks writes blank lines and whatever else it likes
//! before it answers, and a `stop` of the client's must not end that.

use crate::http::{
    LoadedModel,
    layers::{memory::MemoryPermit, request_log::RequestLog},
    openai::chunks::{CompletionDetails, FinishReason, Progress, PromptDetails, Timings, Usage},
    output::chat_logprobs::Scored,
};
use crate::{
    chat::{
        Decoder, StopStrings,
        parser::{Delta, Parser},
    },
    engine::{Event, Events, Finish, Logprobs, Request},
    error::{EngineError, ModelError},
};
use std::sync::Arc;

/// The output of one event.
#[derive(Debug, Default)]
pub struct Turn {
    pub deltas: Vec<Delta>,
    /// Tokens whose log-probabilities were asked for: in a chat those of the content that is given, else the token that
    /// was generated, whose text may come with a later turn.
    pub scored: Vec<(u32, Logprobs)>,
    /// The log-probabilities of the prompt, if they were asked for.
    pub prompt: Option<Vec<Option<Logprobs>>>,
    /// The prompt is this far, and nothing else happened.
    pub progress: Option<Progress>,
    /// This is the last turn.
    pub end: Option<FinishReason>,
}

/// The end of an answer.
#[derive(Debug)]
pub struct Ending {
    pub reason: FinishReason,
    /// The stop string that ended it, if one did.
    pub stop: Option<String>,
    pub usage: Usage,
}

/// The way in which a generation's text is read.
pub enum Reader {
    /// As plain text.
    Plain,
    /// As an assistant's turn.
    Chat { parser: Parser, in_reasoning: bool, parallel_tool_calls: bool },
}

/// A generation under way. Dropping it cancels it: the engine stops within one token, or never begins.
pub struct Transcript {
    events: Events,
    decoder: Decoder,
    reader: Reader,
    stop: StopStrings,
    /// The ids of `<think>` and `</think>`, by which reasoning tokens are counted.
    think: [Option<u32>; 2],
    in_reasoning: bool,
    called: bool,
    scored: Scored,
    /// Bytes of content given so far.
    given: usize,
    usage: Usage,
    /// The answer's outcome, in the metrics' words: a client left, unless something else happens first.
    ended: &'static str,
    log: Arc<RequestLog>,
    /// The memory of the request, until the answer is told.
    _permit: Option<MemoryPermit>,
}

impl Transcript {
    /// Queues `request`.
    pub fn submit(
        app: &LoadedModel,
        log: &Arc<RequestLog>,
        request: Request,
        reader: Reader,
        stops: Vec<String>,
    ) -> Result<Self, EngineError> {
        let prompt_tokens = request.ids.len();
        let events = app.engine.submit(Request { deadline: log.deadline, ..request })?;
        log.add_tokens(prompt_tokens, 0);
        Ok(Self {
            events,
            decoder: Decoder::new(app.tokenizer.clone()),
            stop: StopStrings::new(stops),
            think: ["<think>", "</think>"].map(|token| app.tokenizer.id(token)),
            in_reasoning: matches!(reader, Reader::Chat { in_reasoning: true, .. }),
            reader,
            called: false,
            scored: Scored::default(),
            given: 0,
            usage: Usage { prompt_tokens, ..Usage::default() },
            ended: "cancelled",
            log: log.clone(),
            _permit: None,
        })
    }

    /// Keeps `share` as long as it lives.
    pub fn holding(mut self, permit: MemoryPermit) -> Self {
        self._permit = Some(permit);
        self
    }

    /// The next thing to tell. After a turn with an `end`, or an error, there is none.
    async fn next(&mut self) -> Result<Turn, EngineError> {
        loop {
            let mut turn = Turn::default();
            match self.events.recv().await.ok_or(EngineError::Stopped)? {
                Event::Started { cached_tokens, .. } => {
                    self.usage.prompt_tokens_details = PromptDetails { cached_tokens };
                    continue;
                }
                Event::Prefilled { tokens, seconds } => {
                    turn.progress = Some(Progress {
                        total: self.usage.prompt_tokens,
                        cache: self.usage.prompt_tokens_details.cached_tokens,
                        processed: tokens,
                        time_ms: (seconds * 1e3) as u64,
                    });
                }
                Event::Prompt(logprobs) => turn.prompt = Some(logprobs),
                Event::Token { id, logprobs } => {
                    self.count(id);
                    let text = self.decoder.push(id);
                    match logprobs {
                        Some(logprobs) if matches!(self.reader, Reader::Plain) => turn.scored.push((id, logprobs)),
                        Some(logprobs) => self.scored.token(id, logprobs),
                        None => {}
                    }
                    if !text.is_empty() && self.read(&text, &mut turn.deltas) {
                        // Nobody will hear what follows, so it is not generated.
                        self.events.close();
                        turn.end = Some(self.reason(Finish::Stop));
                    }
                }
                Event::Done { finish, timings } => {
                    let crate::engine::Timings { drafted_tokens, accepted_tokens, saved_seconds, .. } = timings;
                    self.usage.timings = Timings { drafted_tokens, accepted_tokens, saved_seconds };
                    self.log.record_storage(None);
                    let rest = self.decoder.finish();
                    let cut = finish == Finish::Length;
                    let hit = self.read(&rest, &mut turn.deltas) || self.finish(cut, &mut turn.deltas);
                    turn.end = Some(self.reason(if hit { Finish::Stop } else { finish }));
                }
                Event::Failed(error) => {
                    if let EngineError::Model(ModelError::Store(error)) = &error {
                        self.log.record_storage(Some(error));
                    }
                    return Err(error);
                }
            }
            turn.scored.extend(self.scored.given(self.given));
            return Ok(turn);
        }
    }

    /// Gives every turn to `sink`, as it comes, and says how the answer ended. This is the only loop over a transcript.
    pub async fn tell(&mut self, mut sink: impl FnMut(Turn)) -> Result<Ending, EngineError> {
        loop {
            let turn = self.next().await.inspect_err(|_| self.ended = "error")?;
            let end = turn.end;
            sink(turn);
            if let Some(reason) = end {
                self.ended = reason.word();
                return Ok(Ending { reason, stop: self.stop.found().map(str::to_owned), usage: self.usage() });
            }
        }
    }

    /// Tokens used so far.
    pub fn usage(&self) -> Usage {
        Usage { total_tokens: self.usage.prompt_tokens + self.usage.completion_tokens, ..self.usage }
    }

    fn count(&mut self, id: u32) {
        self.usage.completion_tokens += 1;
        if matches!(self.reader, Reader::Plain) {
            return;
        }
        let [open, close] = self.think;
        self.in_reasoning |= Some(id) == open;
        let CompletionDetails { reasoning_tokens } = &mut self.usage.completion_tokens_details;
        *reasoning_tokens += usize::from(self.in_reasoning);
        self.in_reasoning &= Some(id) != close;
    }

    /// Reads on; true if a stop string was met.
    fn read(&mut self, text: &str, deltas: &mut Vec<Delta>) -> bool {
        let read = match &mut self.reader {
            Reader::Plain => vec![Delta::Content(text.to_owned())],
            Reader::Chat { parser, .. } => parser.push(text),
        };
        self.scored.text(text.len());
        self.cut(read, deltas)
    }

    /// Gives up what was held back; true if it held a stop string.
    fn finish(&mut self, cut: bool, deltas: &mut Vec<Delta>) -> bool {
        let read = match &mut self.reader {
            Reader::Plain => Vec::new(),
            Reader::Chat { parser, .. } => parser.finish(cut),
        };
        if self.cut(read, deltas) {
            return true;
        }
        self.release(deltas);
        false
    }

    fn cut(&mut self, read: Vec<Delta>, deltas: &mut Vec<Delta>) -> bool {
        if let Reader::Chat { parser, .. } = &mut self.reader {
            parser.spans().into_iter().for_each(|span| self.scored.content(span));
        }
        for delta in read {
            match delta {
                Delta::Content(text) => {
                    let held = self.stop.push(&text);
                    self.give(held.text, deltas);
                    if held.stopped {
                        return true;
                    }
                }
                Delta::ToolCall { index, .. } if index > 0 && self.single_call() => return true,
                delta => {
                    self.called |= matches!(delta, Delta::ToolCall { .. });
                    // The content is over: what could have become a stop string will not.
                    self.release(deltas);
                    deltas.push(delta);
                }
            }
        }
        false
    }

    fn release(&mut self, deltas: &mut Vec<Delta>) {
        let held = self.stop.finish();
        self.give(held, deltas);
    }

    fn give(&mut self, text: String, deltas: &mut Vec<Delta>) {
        self.given += text.len();
        if !text.is_empty() {
            deltas.push(Delta::Content(text));
        }
    }

    fn single_call(&self) -> bool {
        matches!(self.reader, Reader::Chat { parallel_tool_calls: false, .. })
    }

    fn reason(&self, finish: Finish) -> FinishReason {
        match finish {
            Finish::Length => FinishReason::Length,
            Finish::Stop if self.called => FinishReason::ToolCalls,
            Finish::Stop => FinishReason::Stop,
        }
    }
}

impl Drop for Transcript {
    fn drop(&mut self) {
        // Whoever waits for it may have given it up before the engine did.
        let ended = if self.ended == "cancelled" && self.log.is_late() { "error" } else { self.ended };
        self.log.add_tokens(0, self.usage.completion_tokens);
        self.log.record_answer(ended, self.usage.prompt_tokens, self.usage.completion_tokens);
    }
}
