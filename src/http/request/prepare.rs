//! Prepares a request for a model: prompt, sampling, token limit and grammar.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, RequestLog, memory, value_bytes},
    models::LoadedModel,
    output::{ChatParams, Choices},
    request::{
        ChatPrompt, EncodedChat, GenerationRequest, ImageUrls, PromptInput, RequestedFormat, response_format,
        sampling_params as params,
    },
};
use moestro_chat::{Message, grammar::ExactCalls};
use moestro_engine::{CacheSalt, Request};
use std::{collections::VecDeque, mem, sync::Arc};

/// Number of tokens for the answer that must fit after a prompt with the tools of an earlier request.
const SUMMARY_TOKENS: usize = 2048;

/// Logit bias of a token that must not be sampled.
const FORBIDDEN: f32 = -1e9;

impl GenerationRequest {
    /// Checks the fields that depend on the model, renders and tokenizes the prompt, and compiles the grammar. `context` is
    /// `None` if the tokens of the prompt are only counted: its length is not checked then.
    pub async fn prepare(
        self,
        model: &Arc<LoadedModel>,
        urls: &Arc<ImageUrls>,
        log: &Arc<RequestLog>,
        mut permit: MemoryPermit,
        context: Option<usize>,
    ) -> Result<Choices, ApiError> {
        let Self { common, max_tokens, parallel_tool_calls, .. } = self;
        let mut sampling = common.sampling(&model.defaults, model.engine.vocab())?;
        let limits = &model.limits;
        // An error names the smaller limit, because clients shorten the conversation to it.
        let prompt_limit = limits.max_prompt_tokens.filter(|&most| context.is_some_and(|context| most < context));
        let most_tokens = prompt_limit.or(context).unwrap_or(usize::MAX);
        let max_tokens = max_tokens.or(limits.max_tokens);
        let mut images = Vec::new();
        let (param, prompts, chat) = match self.prompt {
            PromptInput::Text(prompt) => {
                ("prompt", model.encode_all(&mut permit, prompt, self.n, most_tokens).await?, None)
            }
            PromptInput::Chat(mut chat) => {
                let messages = mem::take(&mut chat.messages);
                if messages.iter().flat_map(Message::images).next().is_some() {
                    // Images wait for their downloads.
                    permit.leave_entrance();
                }
                let messages = model.decode_images(&mut permit, messages, urls, Some(log)).await?;
                let room = max_tokens.unwrap_or(usize::MAX).min(SUMMARY_TOKENS);
                let most_reusing = model.engine.context().saturating_sub(room);
                let most_reusing = most_reusing.min(limits.max_prompt_tokens.unwrap_or(usize::MAX));
                let reusing = model.encode_with_reused_tools(&permit, &messages, &chat, most_reusing).await;
                let EncodedChat { ids, images: placed, in_reasoning, chat } = match reusing {
                    Some(reusing) => {
                        log.set_reused_tools(reusing.chat.tools.len());
                        reusing
                    }
                    None => model.encode_chat(&mut permit, messages, chat, most_tokens).await?,
                };
                let ChatPrompt { mut tools, forbids_calls, param, .. } = chat;
                let call = model.tokenizer.id("<tool_call>");
                if forbids_calls {
                    tools.clear();
                    sampling.logit_bias.extend(call.map(|id| (id, FORBIDDEN)));
                }
                images = placed;
                // Without this token, a text may have a call that no grammar constrains.
                let format = call.and(self.format.as_ref());
                let exact_calls = format.map_or(ExactCalls::None, RequestedFormat::exact_calls);
                (param, vec![ids], Some(ChatParams { tools, in_reasoning, exact_calls, parallel_tool_calls }))
            }
        };
        let (tools, in_reasoning) = chat.as_ref().map_or((&[][..], false), |chat| (&*chat.tools, chat.in_reasoning));
        let tokens = prompts.iter().map(|ids| size_of_val(ids) + memory::token_bytes(ids.len())).sum::<usize>();
        // A stream sends the log-probabilities of one prompt at a time. A body counts its log-probabilities later.
        let echoed = self
            .logprobs
            .filter(|_| self.echo && common.streams())
            .map_or(0, |top| prompts.iter().map(Vec::len).max().unwrap_or(0) * (1 + top) * memory::LOGPROB_BYTES);
        let pixels: usize = images.iter().map(|placed| placed.image.pixels.data.len()).sum();
        permit.resize(tokens + echoed + pixels + tools.iter().map(value_bytes).sum::<usize>() + common.bytes())?;
        permit.leave_entrance();
        if let Some(context) = context {
            for ids in &prompts {
                if let Some(most) = prompt_limit.filter(|&most| ids.len() > most) {
                    return Err(ApiError::prompt_limit(ids.len(), most, param));
                }
                params::check_context(param, ids.len(), max_tokens, context)?;
            }
        }
        let budget = self.thinking_budget.or(limits.thinking_budget).filter(|_| in_reasoning);
        let has_tools = !tools.is_empty();
        let grammars = model.grammars.clone();
        let constraint =
            response_format::compile(grammars, &permit, self.format, has_tools, in_reasoning, budget).await?;
        let max_tokens = max_tokens.unwrap_or(usize::MAX);
        let request = Request {
            cache_prompt: common.cache_prompt.unwrap_or(true),
            cache_salt: common.cache_salt.as_deref().map(CacheSalt::new),
            logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            // Evaluation harnesses request one token and need that token even if it ends the text.
            ignore_eos: self.echo && self.logprobs.is_some() && max_tokens == 1,
            constraint,
            images,
            client: common.client(log),
            ..Request::new(Vec::new(), max_tokens, sampling)
        };
        Ok(Choices {
            model: Arc::downgrade(model),
            log: log.clone(),
            prompts: Arc::new(prompts),
            n: self.n,
            request,
            chat,
            stops: self.stops,
            reports_progress: common.return_progress.unwrap_or(false),
            started: VecDeque::new(),
            logged: 0,
            permit: Arc::new(permit),
        })
    }
}
