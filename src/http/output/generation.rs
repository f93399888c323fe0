//! One generation: turns engine events into updates with text deltas.
//!
//! Each token is decoded to text, the text is parsed into reasoning, content and tool calls, and the content is cut at
//! the first stop string. Stop strings apply to the content only, because reasoning often contains blank lines and
//! similar strings that clients use as `stop`.

use crate::http::{
    ApiError,
    layers::{RequestLog, memory},
    models::LoadedModel,
    output::{AnswerTimings, FinishReason, PromptProgress, PromptTokensDetails, Usage, chat_logprobs::ContentLogprobs},
};
use moestro_chat::{
    Decoder, StopStrings,
    parser::{Delta, Parser},
};
use moestro_engine::{Event, Events, Finish, Logprobs, Request, error::EngineError};
use moestro_model::error::ModelError;
use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// The effect of one engine event, or of silence, on the answer.
pub enum Update {
    /// The engine has been silent for [`Generation::idle_interval`].
    Idle,
    /// More of the prompt has been evaluated.
    Progress(PromptProgress),
    Output(Output),
}

impl Update {
    /// Memory of the update while it waits for an earlier choice.
    pub fn waiting_bytes(&self) -> usize {
        match self {
            Self::Output(output) => memory::waiting_bytes(
                output.deltas.iter().map(|delta| delta.text().len()).sum(),
                output.listed_tokens(),
            ),
            Self::Idle | Self::Progress(_) => memory::waiting_bytes(0, 0),
        }
    }
}

/// Generated output of one token, or of a whole answer that was collected with [`Output::append`].
#[derive(Debug, Default)]
pub struct Output {
    pub deltas: Vec<Delta>,
    /// Tokens with log-probabilities. For a chat, these are the tokens of the content in `deltas`. For a completion,
    /// this is the generated token, whose text may follow in a later output.
    pub logprobs: Vec<(u32, Logprobs)>,
    /// Log-probabilities of the prompt, if requested. The entry of the first token is `None`.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    /// `Some` only in the last output of an answer.
    pub finish: Option<FinishReason>,
}

impl Output {
    /// Number of tokens that the log-probabilities list: each token and its alternatives.
    pub fn listed_tokens(&self) -> usize {
        let generated = self.logprobs.iter().map(|(_, logprobs)| logprobs);
        let prompt = self.prompt_logprobs.iter().flatten().flatten();
        generated.chain(prompt).map(|logprobs| 1 + logprobs.top.len()).sum()
    }

    /// Memory of the text until the whole answer is sent.
    pub fn text_bytes(&self) -> usize {
        let joins = |delta: &Delta| matches!(delta, Delta::Reasoning(_) | Delta::Content(_) | Delta::Arguments { .. });
        let text = self.deltas.iter().map(|delta| delta.text().len()).sum();
        memory::answer_bytes(text, self.deltas.iter().filter(|delta| !joins(delta)).count())
    }

    /// Appends a later output of the same answer. Joins adjacent text of the same kind.
    pub fn append(&mut self, later: Self) {
        later.deltas.into_iter().for_each(|delta| delta.push_to(&mut self.deltas));
        self.logprobs.extend(later.logprobs);
        self.prompt_logprobs = self.prompt_logprobs.take().or(later.prompt_logprobs);
        self.finish = later.finish;
    }
}

/// The deltas of a whole answer, joined.
#[derive(Default)]
pub struct AnswerText {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<AnswerCall>,
}

/// A call of an answer. The arguments are JSON text, which is invalid if the token limit cut the call.
pub struct AnswerCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl AnswerText {
    pub fn new(deltas: Vec<Delta>) -> Self {
        let mut answer = Self::default();
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => answer.reasoning += &text,
                Delta::Content(text) => answer.content += &text,
                Delta::ToolCall { id, name, .. } => {
                    answer.calls.push(AnswerCall { id, name, arguments: String::new() });
                }
                Delta::Arguments { json, .. } => {
                    if let Some(call) = answer.calls.last_mut() {
                        call.arguments += &json;
                    }
                }
            }
        }
        answer
    }
}

/// The end of an answer.
#[derive(Debug)]
pub struct Finished {
    pub reason: FinishReason,
    /// The stop string that ended the answer.
    pub stop: Option<String>,
    pub usage: Usage,
}

/// Interpretation of the generated text.
pub enum TextReader {
    /// The text is plain text.
    Plain,
    /// The text is an assistant message with reasoning and tool calls.
    Chat { parser: Box<Parser>, in_reasoning: bool, parallel_tool_calls: bool },
}

/// A generation in progress. Dropping a `Generation` cancels its request: the engine stops within one token.
pub struct Generation {
    events: Events,
    /// [`Request::is_complete`] of the request: true if the answer has ended at a stop string or after a single call.
    /// Only the engine's last event is then awaited, for its timings.
    is_complete: Arc<AtomicBool>,
    decoder: Decoder,
    reader: TextReader,
    stop: StopStrings,
    /// Token ids of `<think>` and `</think>`, used to count reasoning tokens.
    think: [Option<u32>; 2],
    in_reasoning: bool,
    /// Number of reasoning tokens after the last token whose text is known to be reasoning. If these tokens turn out to
    /// start a tool call, they are not reasoning tokens.
    unread_reasoning: usize,
    has_call: bool,
    content_logprobs: ContentLogprobs,
    /// Number of bytes of content sent so far.
    sent: usize,
    usage: Usage,
    /// Time at which the latest chunk of the prompt was evaluated.
    prefilled: Option<Instant>,
    /// Outcome that the metrics count. The initial value is "cancelled", because a generation that is dropped before
    /// its end was cancelled by the client.
    outcome: &'static str,
    log: Arc<RequestLog>,
}

impl Generation {
    /// Queues `request`. Fails if the queue is full.
    pub fn submit(
        model: &LoadedModel,
        log: &Arc<RequestLog>,
        request: Request,
        reader: TextReader,
        stops: Vec<String>,
    ) -> Result<Self, EngineError> {
        let prompt_tokens = request.ids.len();
        let is_complete = Arc::default();
        let request = Request { deadline: log.deadline, is_complete: Arc::clone(&is_complete), ..request };
        let events = model.engine.submit(request)?;
        Ok(Self {
            events,
            is_complete,
            decoder: Decoder::new(model.tokenizer.clone()),
            stop: StopStrings::new(stops),
            think: ["<think>", "</think>"].map(|token| model.tokenizer.id(token)),
            in_reasoning: matches!(reader, TextReader::Chat { in_reasoning: true, .. }),
            reader,
            unread_reasoning: 0,
            has_call: false,
            content_logprobs: ContentLogprobs::default(),
            sent: 0,
            usage: Usage { prompt_tokens, ..Usage::default() },
            prefilled: None,
            outcome: "cancelled",
            log: log.clone(),
        })
    }

    pub fn prompt_tokens(&self) -> usize {
        self.usage.prompt_tokens
    }

    /// Interval of [`Update::Idle`] while the request waits in the queue or its prompt is evaluated.
    pub fn idle_interval(&self) -> Duration {
        self.log.event_interval
    }

    /// Passes every update to `sink` as it arrives, until the answer ends or `sink` fails. This is the only loop over
    /// engine events.
    pub async fn run(&mut self, mut sink: impl FnMut(Update) -> Result<(), ApiError>) -> Result<Finished, ApiError> {
        loop {
            let update = self.next().await.inspect_err(|_| self.outcome = "error")?;
            let finish = if let Update::Output(output) = &update { output.finish } else { None };
            sink(update).inspect_err(|_| self.outcome = "error")?;
            if let Some(reason) = finish {
                self.outcome = reason.as_str();
                return Ok(Finished { reason, stop: self.stop.found().map(str::to_owned), usage: self.usage() });
            }
        }
    }

    /// Tokens and time used so far.
    pub fn usage(&self) -> Usage {
        let mut usage = self.usage;
        usage.timings.predicted_n = usage.completion_tokens;
        usage.timings.predicted_ms = self.prefilled.map_or(0.0, |end| end.elapsed().as_secs_f64() * 1e3);
        let mut total = Usage::default();
        total.add(usage, false);
        total
    }

    /// Reports how much of the prompt has been evaluated.
    fn progress(&self, processed: usize, seconds: f64) -> Update {
        Update::Progress(PromptProgress {
            total: self.usage.prompt_tokens,
            cache: self.usage.prompt_tokens_details.cached_tokens,
            processed,
            time_ms: (seconds * 1e3) as u64,
        })
    }

    async fn next(&mut self) -> Result<Update, EngineError> {
        let mut output = Output::default();
        let Ok(event) = timeout(self.idle_interval(), self.events.recv()).await else { return Ok(Update::Idle) };
        let is_complete = self.is_complete.load(Relaxed);
        match event.ok_or(EngineError::Stopped)? {
            Event::Started { cached_tokens, .. } => {
                self.usage.prompt_tokens_details = PromptTokensDetails { cached_tokens };
                self.usage.timings.cache_n = cached_tokens;
                return Ok(self.progress(cached_tokens, 0.0));
            }
            Event::Prefilled { tokens, seconds } => {
                self.usage.timings.prompt_n = tokens.saturating_sub(self.usage.timings.cache_n);
                self.usage.timings.prompt_ms = seconds * 1e3;
                self.prefilled = Some(Instant::now());
                return Ok(self.progress(tokens, seconds));
            }
            Event::Prompt(logprobs) => output.prompt_logprobs = Some(logprobs),
            // The engine generated this token before it noticed that the answer is complete.
            Event::Token { .. } if is_complete => {}
            Event::Token { id, logprobs } => {
                self.count(id);
                let text = self.decoder.push(id);
                if let Some(logprobs) = logprobs {
                    self.content_logprobs.push_token(id, logprobs);
                }
                if !text.is_empty() && self.parse(&text, &mut output.deltas) {
                    self.is_complete.store(true, Relaxed);
                }
            }
            Event::Done { finish, timings } => {
                self.usage.timings = AnswerTimings {
                    drafted_tokens: timings.drafted_tokens,
                    accepted_tokens: timings.accepted_tokens,
                    saved_seconds: timings.saved_seconds,
                    decode_passes: timings.decode_passes,
                    decoding_sequences: timings.decoding_sequences,
                    ..self.usage.timings
                };
                self.log.storage_health.record(None);
                let rest = self.decoder.finish();
                let is_truncated = finish == Finish::Length;
                let is_stopped = is_complete
                    || self.parse(&rest, &mut output.deltas)
                    || self.finish(is_truncated, &mut output.deltas);
                output.finish = Some(self.reason(if is_stopped { Finish::Stop } else { finish }));
            }
            Event::Failed(_) if is_complete => output.finish = Some(self.reason(Finish::Stop)),
            Event::Failed(error) => {
                if let EngineError::Model(ModelError::Store(error)) = &error {
                    self.log.storage_health.record(Some(error));
                }
                return Err(error);
            }
        }
        output.logprobs.extend(self.content_logprobs.take_sent(self.sent));
        if output.finish == Some(FinishReason::Length) && matches!(self.reader, TextReader::Plain) {
            // An evaluation harness expects an entry for the last token, even if the token has no text.
            output.logprobs.extend(self.content_logprobs.take_open());
        }
        Ok(Update::Output(output))
    }

    /// Counts a generated token. If the token belongs to the reasoning, counts it as a reasoning token, too.
    fn count(&mut self, id: u32) {
        self.usage.completion_tokens += 1;
        self.log.mark_token();
        if matches!(self.reader, TextReader::Plain) {
            return;
        }
        let [open, close] = self.think;
        self.in_reasoning |= Some(id) == open;
        self.usage.completion_tokens_details.reasoning_tokens += usize::from(self.in_reasoning);
        self.unread_reasoning += usize::from(self.in_reasoning);
        self.in_reasoning &= Some(id) != close;
    }

    /// Parses more generated text and appends the result to `deltas`. Returns true if the answer ends here.
    fn parse(&mut self, text: &str, deltas: &mut Vec<Delta>) -> bool {
        let span = self.content_logprobs.push_text(text.len());
        let parsed = match &mut self.reader {
            TextReader::Plain => {
                self.content_logprobs.push_content(span);
                vec![Delta::Content(text.to_owned())]
            }
            TextReader::Chat { parser, .. } => parser.push(text),
        };
        self.push_until_stop(parsed, deltas)
    }

    /// Releases all text that is held back. `is_truncated` is true if the token limit ended the answer. Returns true if
    /// the text contains a stop string.
    fn finish(&mut self, is_truncated: bool, deltas: &mut Vec<Delta>) -> bool {
        let parsed = match &mut self.reader {
            TextReader::Plain => Vec::new(),
            TextReader::Chat { parser, .. } => parser.finish(is_truncated),
        };
        if self.push_until_stop(parsed, deltas) {
            return true;
        }
        self.release(deltas);
        false
    }

    /// Appends deltas up to the first stop string, or up to the second call if only one call is allowed. Returns true
    /// if the answer ends there.
    fn push_until_stop(&mut self, parsed: Vec<Delta>, deltas: &mut Vec<Delta>) -> bool {
        if let TextReader::Chat { parser, .. } = &mut self.reader {
            parser.spans().into_iter().for_each(|span| self.content_logprobs.push_content(span));
        }
        for delta in parsed {
            match delta {
                Delta::Content(text) => {
                    let checked = self.stop.push(&text);
                    self.send(checked.text, deltas);
                    if checked.stopped {
                        return true;
                    }
                }
                Delta::ToolCall { index, .. } if index > 0 && self.is_single_call() => return true,
                delta => {
                    match &delta {
                        Delta::Reasoning(_) => self.unread_reasoning = 0,
                        Delta::ToolCall { .. } => {
                            self.has_call = true;
                            if mem::take(&mut self.in_reasoning) {
                                // The call ends the reasoning without a `</think>`.
                                let reasoning = &mut self.usage.completion_tokens_details.reasoning_tokens;
                                *reasoning = reasoning.saturating_sub(self.unread_reasoning);
                            }
                        }
                        Delta::Content(_) | Delta::Arguments { .. } => {}
                    }
                    // The content ends here, so the start of a stop string at its end cannot become a whole stop
                    // string.
                    self.release(deltas);
                    deltas.push(delta);
                }
            }
        }
        false
    }

    fn release(&mut self, deltas: &mut Vec<Delta>) {
        let text = self.stop.finish();
        self.send(text, deltas);
    }

    fn send(&mut self, text: String, deltas: &mut Vec<Delta>) {
        self.sent += text.len();
        if !text.is_empty() {
            deltas.push(Delta::Content(text));
        }
    }

    fn is_single_call(&self) -> bool {
        matches!(self.reader, TextReader::Chat { parallel_tool_calls: false, .. })
    }

    fn reason(&self, finish: Finish) -> FinishReason {
        match finish {
            Finish::Length => FinishReason::Length,
            Finish::Stop if self.has_call => FinishReason::ToolCalls,
            Finish::Stop => FinishReason::Stop,
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // A request that runs out of time is dropped before the engine reports its timeout.
        let outcome = if self.outcome == "cancelled" && self.log.is_late() { "error" } else { self.outcome };
        self.log.add_tokens(0, self.usage.completion_tokens);
        self.log.add_cached_tokens(self.usage.prompt_tokens_details.cached_tokens);
        self.log.metrics.record_answer(outcome, self.usage.prompt_tokens, self.usage.completion_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_outputs_join_adjacent_text() {
        let arguments = |json: &str| Delta::Arguments { index: 0, json: json.into() };
        let call = Delta::ToolCall { index: 0, id: "1".into(), name: "f".into() };
        let mut whole = Output::default();
        for deltas in [
            vec![Delta::Reasoning("a".into()), Delta::Reasoning("b".into()), Delta::Content("c".into())],
            vec![Delta::Content("d".into()), call.clone(), arguments("{\"x\"")],
            vec![arguments(":"), Delta::Content("stray".into()), arguments("1}")],
        ] {
            whole.append(Output { deltas, ..Output::default() });
        }
        let [reasoning, content] = [Delta::Reasoning("ab".into()), Delta::Content("cd".into())];
        let stray = Delta::Content("stray".into());
        assert_eq!(whole.deltas, [reasoning, content, call, arguments("{\"x\":"), stray, arguments("1}")]);
    }
}
