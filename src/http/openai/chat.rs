//! `POST /v1/chat/completions`.
//!
//! Decisions where servers differ: `max_tokens` defaults to the rest of the context and is limited to it. Stop strings
//! end the content but not the reasoning. `logprobs` lists the tokens of the content but not of the reasoning.

use crate::http::{
    ApiError,
    generate::Generator,
    models::LoadedModel,
    openai::{
        ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatRequest, CommonFields, ContentToken, FunctionDelta,
        ResponseMeta, TokenLogprob, ToolCallDelta,
    },
    output::{
        self, AnswerCall, AnswerText, Choices, FinishReason, Finished, Output, PromptProgress, Renderer, Usage,
        token_text,
    },
    request::{
        ChatPrompt, GenerationRequest, ParsedValues, PromptInput, RequestedFormat, Thinking, body, continue_final,
        fields, messages, response_format, sampling_params as params,
        tools::{self, ToolChoice},
    },
    sse::Frames,
};
use axum::{body::Body, response::Response};
use moestro_chat::{Tokenizer, parser::Delta};
use moestro_engine::Logprobs;
use serde_json::json;
use std::{mem, sync::Arc};

pub async fn chat(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (common, request, permit) =
        body::request::<CommonFields, ChatRequest>(&server.state, body, fields::CHAT, ParsedValues::Kept).await?;
    let streams = common.streams();
    let includes_usage = common.includes_usage();
    let uses_functions = request.functions.is_some();
    let request = body::translate(&permit, move || request.into_generation(common)).await?;
    let object = if streams { "chat.completion.chunk" } else { "chat.completion" };
    let renderer = ChatRenderer {
        meta: ResponseMeta::new("chatcmpl", object, includes_usage),
        tokenizer: None,
        current: None,
        logprobs: Vec::new(),
        uses_functions,
    };
    server.generate(request, permit, renderer).await
}

impl ChatRequest {
    /// Checks and translates the request.
    fn into_generation(mut self, common: CommonFields) -> Result<GenerationRequest, ApiError> {
        common.check()?;
        let (param, limit) = match self.max_completion_tokens {
            None => ("max_tokens", common.max_tokens),
            limit => ("max_completion_tokens", limit),
        };
        let max_tokens = params::token_limit(param, limit, 1)?;
        let logprobs = self.alternatives()?;
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        // A `function_call` can contain only one call.
        let parallel_tool_calls = parallel && self.functions.is_none();
        tools::replace_functions(&mut self)?;
        let Thinking { enabled, budget } = Thinking::of(&self)?;
        let content = response_format::requested(&self)?;
        let tools = self.tools.take().unwrap_or_default();
        let n = params::choice_count(common.n)?;
        let stops = common.stops("stop")?;
        let continues = continue_final::is_requested(&self)?;
        let mut prompt = ChatPrompt::new(messages::read(self.messages)?, continues, tools, tools::chat_path)?;
        let choice = ToolChoice::parse(self.tool_choice.as_ref(), &prompt.tools)?;
        let format = RequestedFormat::new(content, &prompt.tools, &choice, parallel, tools::chat_path);
        if format.is_some() {
            continue_final::check_new_message(continues)?;
        }
        prompt.forbids_calls = choice == ToolChoice::None;
        prompt.kwargs = self.chat_template_kwargs.unwrap_or_default();
        prompt.set_thinking(enabled);
        Ok(GenerationRequest {
            n,
            max_tokens,
            logprobs,
            format,
            thinking_budget: budget,
            parallel_tool_calls,
            ..GenerationRequest::new(common, stops, PromptInput::Chat(prompt))
        })
    }

    /// The number of alternatives to list with each token. `None` if the request asks for no log-probabilities.
    fn alternatives(&self) -> Result<Option<usize>, ApiError> {
        let is_requested = self.logprobs.unwrap_or(false);
        match self.top_logprobs {
            Some(top) if is_requested => Ok(Some(params::alternatives("top_logprobs", top)?)),
            Some(_) => Err(ApiError::wrong_value("top_logprobs", "is only allowed if logprobs is true.")),
            None => Ok(is_requested.then_some(0)),
        }
    }
}

/// Writes one chunk per delta, one chunk with the `finish_reason` per choice, and one chunk with the usage if
/// requested.
struct ChatRenderer {
    meta: ResponseMeta,
    /// Set when the model is known. A reference to the model instead of the tokenizer would keep the model in memory
    /// while a client reads slowly.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Index of the choice whose first chunk has been sent.
    current: Option<usize>,
    /// Log-probabilities of tokens whose text has not been sent yet.
    logprobs: Vec<ContentToken>,
    /// True if the request used `functions`. The answer then uses `function_call`.
    uses_functions: bool,
}

impl Renderer for ChatRenderer {
    fn prepare(&mut self, model: &LoadedModel, _: &Choices) {
        self.meta.model.clone_from(&model.card.id);
        self.tokenizer = Some(model.tokenizer.clone());
    }

    fn progress(&mut self, frames: &Frames, progress: PromptProgress) {
        self.meta.write_progress(frames, progress);
    }

    fn output(&mut self, frames: &Frames, choice: usize, output: &Output) {
        if self.current.replace(choice) != Some(choice) {
            let role = ChatDelta { role: Some("assistant"), content: Some(""), ..ChatDelta::default() };
            self.chunk(frames, choice, role, None);
        }
        self.push_logprobs(output);
        for delta in &output.deltas {
            self.chunk(frames, choice, self.delta(delta), None);
        }
    }

    fn finish(&mut self, frames: &Frames, choice: usize, finished: &Finished) {
        self.chunk(frames, choice, ChatDelta::default(), Some(self.reason(finished.reason)));
    }

    fn end(&mut self, frames: &Frames, usage: Usage) {
        self.meta.write_end(frames, usage);
    }

    fn body(mut self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response {
        let choices = answers.into_iter().enumerate();
        let choices: Vec<_> =
            choices.map(|(index, (output, finished))| self.choice(index, output, &finished)).collect();
        output::json(&self.meta.body(&choices, usage))
    }
}

impl ChatRenderer {
    /// Creates one choice of a body.
    fn choice(&mut self, index: usize, output: Output, finished: &Finished) -> ChatChoice {
        self.push_logprobs(&output);
        let AnswerText { reasoning, content, calls } = AnswerText::new(output.deltas);
        let content = (calls.is_empty() || !content.is_empty()).then_some(content);
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        let function = |call: &AnswerCall| json!({"name": call.name, "arguments": call.arguments});
        let tool_call = |call: &AnswerCall| json!({"id": call.id, "type": "function", "function": function(call)});
        match calls.last() {
            Some(call) if self.uses_functions => message["function_call"] = function(call),
            Some(_) => message["tool_calls"] = calls.iter().map(tool_call).collect(),
            None => {}
        }
        ChatChoice { index, message, logprobs: self.take_logprobs(), finish_reason: self.reason(finished.reason) }
    }

    fn chunk(&mut self, frames: &Frames, index: usize, delta: ChatDelta, finish_reason: Option<FinishReason>) {
        let logprobs = self.take_logprobs();
        frames.data(&self.meta.chunk(&[ChatChunkChoice { index, delta, logprobs, finish_reason }]));
    }

    fn reason(&self, reason: FinishReason) -> FinishReason {
        match reason {
            FinishReason::ToolCalls if self.uses_functions => FinishReason::FunctionCall,
            other => other,
        }
    }

    fn push_logprobs(&mut self, output: &Output) {
        let Some(tokenizer) = &self.tokenizer else { return };
        let tokens = output.logprobs.iter().map(|(id, logprobs)| content_token(tokenizer, *id, logprobs));
        self.logprobs.extend(tokens);
    }

    fn take_logprobs(&mut self) -> Option<ChatLogprobs> {
        let content = mem::take(&mut self.logprobs);
        (!content.is_empty()).then_some(ChatLogprobs { content, refusal: None })
    }

    fn delta<'a>(&self, delta: &'a Delta) -> ChatDelta<'a> {
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
        if self.uses_functions {
            ChatDelta { function_call: Some(call.function), ..ChatDelta::default() }
        } else {
            ChatDelta { tool_calls: Some([call]), ..ChatDelta::default() }
        }
    }
}

/// A token of the content with its alternatives. The Responses API writes the same objects.
pub fn content_token(tokenizer: &Tokenizer, id: u32, logprobs: &Logprobs) -> ContentToken {
    let entry = |id, logprob| {
        let (token, bytes) = token_text(tokenizer, id);
        TokenLogprob { token, logprob, bytes }
    };
    ContentToken {
        token: entry(id, logprobs.logprob),
        top_logprobs: logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect(),
    }
}
