//! [`GenerationRequest`]: the request of a client, in the same type for every API.

use crate::http::{
    ApiError,
    openai::{ChatRequest, CommonFields, CompletionPrompt, CompletionRequest},
    request::{
        EndMarker, ImagePart, RequestedFormat, Thinking, continue_final, messages, response_format,
        sampling_params as params, tools,
    },
};
use serde_json::{Map, Value};

/// Default of `max_tokens` in `/v1/completions`, as in OpenAI's API.
const DEFAULT_COMPLETION_TOKENS: usize = 16;

/// Pairs of a field name in chat completions and the field's name in the client's API. Errors use the second name, see
/// [`ApiError::renamed`].
pub type FieldNames = &'static [(&'static str, &'static str)];

/// A checked request. The sampling parameters, the context length and the grammar depend on the model, so they are
/// checked in [`GenerationRequest::prepare`].
#[derive(Debug)]
pub struct GenerationRequest {
    pub prompt: PromptInput,
    pub common: CommonFields,
    /// Number of choices per prompt.
    pub n: usize,
    /// Maximum number of tokens of the answer. `None` means up to the end of the context.
    pub max_tokens: Option<usize>,
    pub stops: Vec<String>,
    /// Number of alternatives to list with each token.
    pub logprobs: Option<usize>,
    /// True if the prompt is part of the answer.
    pub echo: bool,
    pub format: Option<RequestedFormat>,
    /// Maximum number of tokens of reasoning.
    pub thinking_budget: Option<usize>,
    pub parallel_tool_calls: bool,
    pub names: FieldNames,
}

#[derive(Debug)]
pub enum PromptInput {
    Chat(ChatPrompt),
    Text(CompletionPrompt),
}

/// A conversation that is ready for the chat template.
#[derive(Debug)]
pub struct ChatPrompt {
    pub messages: Vec<Value>,
    /// The images that the messages refer to.
    pub images: Vec<ImagePart>,
    pub tools: Vec<Value>,
    /// True if `tool_choice` is `none`: the prompt has the tools, but the model may not call tools.
    pub forbids_calls: bool,
    /// Other variables of the template.
    pub kwargs: Map<String, Value>,
    /// Value of `enable_thinking` if neither the request nor the server sets it. If this is `None`, the template
    /// decides.
    pub default_thinking: Option<bool>,
    /// True if the prompt ends with the start of a new assistant message.
    pub add_generation_prompt: bool,
    /// Marker at the end of the last message, if the answer continues that message.
    pub end_marker: Option<EndMarker>,
}

impl GenerationRequest {
    /// Checks a chat request. `names` are the names of fields in the client's API.
    pub fn from_chat(common: CommonFields, request: ChatRequest, names: FieldNames) -> Result<Self, ApiError> {
        Self::checked_chat(common, request, names).map_err(|error| error.renamed(names))
    }

    fn checked_chat(common: CommonFields, mut request: ChatRequest, names: FieldNames) -> Result<Self, ApiError> {
        common.check()?;
        let (param, limit) = match request.max_completion_tokens {
            None => ("max_tokens", common.max_tokens),
            limit => ("max_completion_tokens", limit),
        };
        let max_tokens = params::token_limit(param, limit, 1)?;
        let logprobs = chat_logprobs(&request)?;
        // A `function_call` can contain only one call.
        let parallel_tool_calls = request.parallel_tool_calls.unwrap_or(true) && request.functions.is_none();
        tools::replace_functions(&mut request)?;
        let Thinking { enabled, budget } = Thinking::of(&request)?;
        request.enable_thinking = enabled;
        let format = response_format::requested(&request)?;
        if format.is_some() && continue_final::is_requested(&request)? {
            let text = "An answer with a response format or a tool choice must be a new message: remove \
                        continue_final_message, or the format.";
            return Err(ApiError::invalid("messages", text));
        }
        Ok(Self {
            n: params::choice_count(common.n)?,
            stops: common.stops()?,
            common,
            max_tokens,
            logprobs,
            echo: false,
            format,
            thinking_budget: budget,
            parallel_tool_calls,
            names,
            prompt: PromptInput::Chat(ChatPrompt::from_chat(request)?),
        })
    }

    pub fn from_completion(common: CommonFields, request: CompletionRequest) -> Result<Self, ApiError> {
        common.check()?;
        let n = params::choice_count(common.n)?;
        if request.best_of.is_some_and(|best_of| usize::try_from(best_of) != Ok(n)) {
            let text = "best_of is not supported: the server returns every choice that it generates.";
            return Err(ApiError::unsupported("best_of", text));
        }
        if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "suffix is not supported: the model does not fill gaps."));
        }
        let max_tokens = match common.max_tokens {
            None => Some(DEFAULT_COMPLETION_TOKENS),
            limit => params::token_limit("max_tokens", limit, 0)?,
        };
        Ok(Self {
            prompt: PromptInput::Text(request.prompt),
            n,
            max_tokens,
            stops: common.stops()?,
            logprobs: request.logprobs.map(|top| params::alternatives("logprobs", top)).transpose()?,
            common,
            echo: request.echo.unwrap_or(false),
            format: None,
            thinking_budget: None,
            parallel_tool_calls: true,
            names: &[],
        })
    }

    pub fn model(&self) -> Option<&str> {
        self.common.model.as_deref()
    }

    pub fn streams(&self) -> bool {
        self.common.streams()
    }
}

impl ChatPrompt {
    /// Creates the conversation of a chat request.
    pub fn from_chat(request: ChatRequest) -> Result<Self, ApiError> {
        let continues = continue_final::is_requested(&request)?;
        let mut kwargs = request.chat_template_kwargs.unwrap_or_default();
        if let Some(thinking) = request.enable_thinking.filter(|_| !request.thinking_is_default) {
            kwargs.entry("enable_thinking").or_insert(thinking.into());
        }
        let (mut messages, images) = messages::checked(request.messages, request.images)?;
        Ok(Self {
            end_marker: if continues { Some(EndMarker::insert(&mut messages)?) } else { None },
            messages,
            images,
            tools: tools::checked(request.tools)?,
            forbids_calls: request.tool_choice.is_some_and(|choice| choice == "none"),
            kwargs,
            default_thinking: request.enable_thinking.filter(|_| request.thinking_is_default),
            add_generation_prompt: !continues,
        })
    }

    /// Sets `enable_thinking` to the server's setting, or else to `default_thinking`, if the request does not set it.
    pub fn apply_server_thinking(&mut self, server: Option<bool>) {
        if let Some(thinking) = server.or(self.default_thinking) {
            self.kwargs.entry("enable_thinking").or_insert(thinking.into());
        }
    }
}

/// The number of alternatives to list with each token. `None` if the request asks for no log-probabilities.
fn chat_logprobs(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    let is_requested = request.logprobs.unwrap_or(false);
    match request.top_logprobs {
        Some(top) if is_requested => Ok(Some(params::alternatives("top_logprobs", top)?)),
        Some(_) => Err(ApiError::wrong_value("top_logprobs", "is only allowed if logprobs is true.")),
        None => Ok(is_requested.then_some(0)),
    }
}
