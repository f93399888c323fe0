//! `POST /v1/chat/completions`.
//!
//! Servers differ here: `max_tokens` defaults to the rest of the context and is cut to it; stop strings end the
//! content, not the reasoning; `logprobs` list the tokens of the content, not those of the reasoning.

use super::chunks::*;
use crate::http::{
    LoadedModel, ServerState,
    errors::ApiError,
    layers::{
        memory::{self, MemoryPermit},
        request_log::RequestLog,
    },
    openai::{
        choices::Choices,
        types::{ChatRequest, Common},
    },
    output::{
        completion_logprobs::token_text,
        generation::{Ending, Transcript, Turn},
        parts::{self, Part, Parts, Wire},
    },
    request::{
        body,
        continue_final::{self, Mark},
        fields,
        messages::{self, Chat},
        response_format, sampling,
        thinking::thinking,
    },
    sse::Frames,
};
use crate::{
    chat::{Template, Tokenizer, parser::Delta},
    engine::{Logprobs, Request},
};
use axum::{Extension, body::Body, extract::State, response::Response};
use std::{mem, sync::Arc};

pub async fn chat(
    State(state): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    body: Body,
) -> Result<Response, ApiError> {
    state.ensure_ready()?;
    let (common, request, permit) = body::request::<ChatRequest>(&state, body, fields::CHAT).await?;
    let lease = state.models.lease(common.model.as_deref()).await?;
    lease
        .respond(log.deadline, common.streams(), Frames::error, move |app| answer(app, log, common, request, permit))
        .await
}

async fn answer(
    app: Arc<LoadedModel>,
    log: Arc<RequestLog>,
    common: Common,
    request: ChatRequest,
    permit: MemoryPermit,
) -> Result<Response, ApiError> {
    let deprecated = request.functions.is_some();
    let mut choices = choices(&app, &common, request, permit).await?;
    let first = choices.first(&app, &log)?;
    log.mark_generation();
    let mut answer = Answer {
        head: ResponseMeta::new(&app, "chatcmpl", "chat.completion"),
        index: 0,
        pending: Vec::new(),
        begun: false,
        usage: common.usage(),
        progress: common.return_progress.unwrap_or(false),
        deprecated,
    };
    if common.streams() {
        answer.head.object = "chat.completion.chunk";
        return Ok(match choices.count {
            1 => parts::stream(first, answer, log),
            _ => choices.stream(&app, first, answer, log),
        });
    }
    choices.whole(&app, first, answer, &log).await
}

/// Checks the request and queues it. Every other wire format's conversations come this way.
pub async fn submit(
    app: &Arc<LoadedModel>,
    log: &Arc<RequestLog>,
    common: &Common,
    request: ChatRequest,
    permit: MemoryPermit,
) -> Result<Transcript, ApiError> {
    let transcript = choices(app, common, request, permit).await?.first(app, log)?;
    log.mark_generation();
    Ok(transcript)
}

/// Checks the request.
async fn choices(
    app: &Arc<LoadedModel>,
    common: &Common,
    mut request: ChatRequest,
    mut permit: MemoryPermit,
) -> Result<Choices, ApiError> {
    common.check(&app.card)?;
    let sampling = common.sampling(&app.defaults, app.engine.vocab())?;
    let stops = common.stops()?;
    let (param, limit) = match request.max_completion_tokens {
        None => ("max_tokens", common.max_tokens),
        limit => ("max_completion_tokens", limit),
    };
    let max_tokens = sampling::tokens(param, limit, 1)?;
    let logprobs = logprobs(&request)?;
    let deprecated = request.functions.is_some();
    messages::functions(&mut request)?;
    let budget = thinking(&mut request)?;
    let asked = response_format::form(&request)?;
    if asked.is_some() && continue_final::asked(&request)? {
        let text = "An answer that must have a form begins anew; it cannot go on from the last message.";
        return Err(ApiError::invalid("messages", text));
    }
    // An answer to `functions` has room for one call.
    let parallel_tool_calls = request.parallel_tool_calls.unwrap_or(true) && !deprecated;
    let (prompt, Chat { tools, open, .. }) = app.render(&mut permit, conversation(request)?).await?;
    let in_reasoning = open.map_or_else(|| Template::opens_in_reasoning(&prompt), |mark| mark.in_reasoning);
    let ids = app.encode(&mut permit, prompt, "messages").await?;
    permit.resize(ids.len() * 2 * size_of::<u32>() + memory::rendered(&tools) + common.bytes())?;
    let max_tokens = sampling::room("messages", ids.len(), max_tokens, app.engine.context())?;
    let constraint =
        response_format::constraint(app, &permit, asked, !tools.is_empty(), (in_reasoning, budget)).await?;
    let request = Request {
        boundaries: app.boundaries(&ids),
        cache_prompt: common.cache_prompt.unwrap_or(true),
        logprobs,
        constraint,
        ..Request::new(ids, max_tokens, sampling)
    };
    let count = sampling::choices(common.n)?;
    Ok(Choices { request, tools, in_reasoning, parallel_tool_calls, stops, count, permit: Some(permit) })
}

/// The conversation of a request, for its template.
pub fn conversation(request: ChatRequest) -> Result<Chat, ApiError> {
    let goes_on = continue_final::asked(&request)?;
    let mut kwargs = request.chat_template_kwargs.unwrap_or_default();
    if let Some(thinking) = request.enable_thinking {
        kwargs.entry("enable_thinking").or_insert(thinking.into());
    }
    let mut messages = messages::messages(request.messages)?;
    Ok(Chat {
        open: if goes_on { Some(Mark::put(&mut messages)?) } else { None },
        messages,
        tools: messages::tools(request.tools, request.tool_choice.as_ref())?,
        kwargs,
        add_generation_prompt: !goes_on,
    })
}

/// The number of alternatives to list with each token; `None` without log-probabilities.
fn logprobs(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    let wanted = request.logprobs.unwrap_or(false);
    match request.top_logprobs {
        Some(top) if wanted => Ok(Some(sampling::alternatives("top_logprobs", top)?)),
        Some(_) => Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true.")),
        None => Ok(wanted.then_some(0)),
    }
}

/// An answer being written.
pub struct Answer {
    pub head: ResponseMeta,
    /// The choice that is being written.
    pub index: usize,
    /// Log-probabilities of tokens whose text has not been sent yet.
    pending: Vec<TokenLogprob>,
    /// A stream's first chunk has been sent.
    pub begun: bool,
    /// A stream ends with its usage.
    usage: bool,
    /// A stream says how far the prompt is.
    progress: bool,
    /// The request said `functions`, so the answer says `function_call`.
    deprecated: bool,
}

/// A chunk a delta; then the one with the `finish_reason`, then, if asked for, the one with the usage.
impl Wire for Answer {
    fn turn(&mut self, out: &Frames, turn: &Turn) {
        if let Some(progress) = turn.progress {
            if self.progress {
                let prompt_progress = Some(progress);
                out.data(&Envelope { prompt_progress, ..self.head.envelope::<ChatChunk>(&[], None) });
            }
            return;
        }
        if !mem::replace(&mut self.begun, true) {
            let role = ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() };
            self.chunk(out, role, None);
        }
        self.score(turn);
        for delta in &turn.deltas {
            self.chunk(out, self.wire(delta), None);
        }
    }

    fn end(&mut self, out: &Frames, ending: &Ending) {
        self.finish(out, ending.reason);
        self.close(out, ending.usage);
    }

    fn error(&mut self, out: &Frames, error: &ApiError) {
        out.error(error);
    }
}

impl Answer {
    /// The choice is complete.
    pub fn finish(&mut self, out: &Frames, reason: FinishReason) {
        self.chunk(out, ChatDelta::default(), Some(self.reason(reason)));
    }

    fn reason(&self, reason: FinishReason) -> FinishReason {
        match reason {
            FinishReason::ToolCalls if self.deprecated => FinishReason::FunctionCall,
            other => other,
        }
    }

    /// The stream is.
    pub fn close(&mut self, out: &Frames, usage: Usage) {
        if self.usage {
            out.data(&self.head.envelope::<ChatChunk>(&[], Some(Some(usage))));
        }
        out.done();
    }

    /// One choice of a body, and what it used.
    pub async fn choice(&mut self, transcript: &mut Transcript) -> Result<(ChatChoice, Usage), ApiError> {
        let mut parts = Parts::default();
        let ending = transcript.tell(|turn| {
            self.score(&turn);
            parts.add(&turn.deltas);
        });
        let ending = ending.await?;
        let (mut content, mut reasoning, mut tool_calls) = (String::new(), String::new(), Vec::new());
        for part in parts.0 {
            match part {
                Part::Reasoning(text) => reasoning += &text,
                Part::Text(text) => content += &text,
                Part::Call { id, name, arguments } => {
                    tool_calls.push(ToolCall { id, kind: "function", function: Function { name, arguments } });
                }
            }
        }
        let function_call = tool_calls.pop_if(|_| self.deprecated).map(|call: ToolCall| call.function);
        let called = !tool_calls.is_empty() || function_call.is_some();
        let message = Message {
            role: "assistant",
            content: (!called || !content.is_empty()).then_some(content),
            refusal: None,
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            tool_calls,
            function_call,
        };
        let logprobs = self.scores();
        Ok((
            ChatChoice { index: self.index, message, logprobs, finish_reason: self.reason(ending.reason) },
            ending.usage,
        ))
    }

    fn chunk(&mut self, out: &Frames, delta: ChatDelta, end: Option<FinishReason>) {
        let logprobs = self.scores();
        let choice = ChatChunk { index: self.index, delta, logprobs, finish_reason: end };
        out.data(&self.head.envelope(&[choice], self.usage.then_some(None)));
    }

    fn score(&mut self, turn: &Turn) {
        for (id, logprobs) in &turn.scored {
            self.pending.push(scored(&self.head.tokenizer, *id, logprobs));
        }
    }

    fn scores(&mut self) -> Option<ChatLogprobs> {
        let content = mem::take(&mut self.pending);
        (!content.is_empty()).then_some(ChatLogprobs { content, refusal: None })
    }

    fn wire<'a>(&self, delta: &'a Delta) -> ChatDelta<'a> {
        match delta {
            Delta::Reasoning(text) => ChatDelta { reasoning_content: Some(text), ..ChatDelta::default() },
            Delta::Content(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
            Delta::ToolCall { index, id, name } => {
                let function = FunctionDelta { name: Some(name), arguments: "" };
                self.call(ToolCallDelta { index: *index, id: Some(id), kind: Some("function"), function })
            }
            Delta::Arguments { index, json } => {
                let function = FunctionDelta { name: None, arguments: json };
                self.call(ToolCallDelta { index: *index, id: None, kind: None, function })
            }
        }
    }

    fn call<'a>(&self, call: ToolCallDelta<'a>) -> ChatDelta<'a> {
        match self.deprecated {
            true => ChatDelta { function_call: Some(call.function), ..ChatDelta::default() },
            false => ChatDelta { tool_calls: Some([call]), ..ChatDelta::default() },
        }
    }
}

fn scored(tokenizer: &Tokenizer, id: u32, logprobs: &Logprobs) -> TokenLogprob {
    let entry = |id, logprob| {
        let (token, bytes) = token_text(tokenizer, id);
        Scored { token, logprob, bytes }
    };
    TokenLogprob {
        token: entry(id, logprobs.logprob),
        top_logprobs: logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect(),
    }
}
