//! `POST /v1/completions`: text or token ids in, text out, without a chat template.
//!
//! Several prompts are answered one after another as choices of one response, with the `n` choices of a prompt next to
//! each other. `max_tokens` defaults to 16. With `echo` and `logprobs`, the prompt is scored, which evaluation
//! harnesses use. A harness requests one token more than it needs and drops the entry of that token, so the token is
//! generated even if it would end the text.

use crate::http::{
    ApiError,
    generate::Generator,
    models::LoadedModel,
    openai::{CommonFields, CompletionChoice, CompletionRequest, ResponseMeta},
    output::{
        self, Choices, FinishReason, Finished, LogprobsBuilder, Output, PromptProgress, Renderer, Usage,
        completion_logprobs,
    },
    request::{GenerationRequest, ParsedValues, PromptInput, body, fields, sampling_params as params},
    sse::Frames,
};
use axum::{body::Body, response::Response};
use moestro_chat::{Tokenizer, parser::Delta};
use std::sync::Arc;

/// Default of `max_tokens`, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;

pub async fn completions(server: Generator, body: Body) -> Result<Response, ApiError> {
    let (common, request, permit) =
        body::request::<CommonFields, CompletionRequest>(&server.state, body, fields::COMPLETIONS, ParsedValues::Kept)
            .await?;
    let includes_usage = common.includes_usage();
    let echoes = request.echo.unwrap_or(false);
    let request = body::translate(&permit, move || request.into_generation(common)).await?;
    let renderer = CompletionRenderer {
        meta: ResponseMeta::new("cmpl", "text_completion", includes_usage),
        tokenizer: None,
        prompts: Arc::default(),
        n: 1,
        echoes,
        current: None,
        logprobs: None,
    };
    server.generate(request, permit, renderer).await
}

impl CompletionRequest {
    /// Checks and translates the request.
    fn into_generation(self, common: CommonFields) -> Result<GenerationRequest, ApiError> {
        common.check()?;
        let n = params::choice_count(common.n)?;
        if self.best_of.is_some_and(|best_of| usize::try_from(best_of) != Ok(n)) {
            let text = "best_of is not supported: the server returns every choice that it generates.";
            return Err(ApiError::unsupported("best_of", text));
        }
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "suffix is not supported: the model does not fill gaps."));
        }
        let max_tokens = match common.max_tokens {
            None => Some(DEFAULT_TOKENS),
            limit => params::token_limit("max_tokens", limit, 0)?,
        };
        let stops = common.stops("stop")?;
        Ok(GenerationRequest {
            n,
            max_tokens,
            logprobs: self.logprobs.map(|top| params::alternatives("logprobs", top)).transpose()?,
            echo: self.echo.unwrap_or(false),
            ..GenerationRequest::new(common, stops, PromptInput::Text(self.prompt))
        })
    }
}

/// Writes one chunk per output that has text.
struct CompletionRenderer {
    meta: ResponseMeta,
    /// Set when the model is known. A reference to the model instead of the tokenizer would keep the model in memory
    /// while a client reads slowly.
    tokenizer: Option<Arc<Tokenizer>>,
    prompts: Arc<Vec<Vec<u32>>>,
    /// Number of choices per prompt.
    n: usize,
    /// True if the text starts with the prompt.
    echoes: bool,
    /// Index of the choice that is being written.
    current: Option<usize>,
    /// Log-probabilities of the current choice, if requested.
    logprobs: Option<LogprobsBuilder>,
}

impl Renderer for CompletionRenderer {
    fn prepare(&mut self, model: &LoadedModel, choices: &Choices) {
        self.meta.model.clone_from(&model.card.id);
        self.tokenizer = Some(model.tokenizer.clone());
        self.prompts = choices.prompts.clone();
        self.n = choices.n;
        self.logprobs = choices.request.logprobs.map(|_| LogprobsBuilder::new(model.tokenizer.clone()));
    }

    fn progress(&mut self, frames: &Frames, progress: PromptProgress) {
        self.meta.write_progress(frames, progress);
    }

    fn output(&mut self, frames: &Frames, choice: usize, output: &Output) {
        let text = self.push(choice, output);
        if !text.is_empty() || output.finish.is_some() {
            let choice = self.choice(choice, text, output.finish);
            frames.data(&self.meta.chunk(&[choice]));
        }
    }

    fn end(&mut self, frames: &Frames, usage: Usage) {
        self.meta.write_end(frames, usage);
    }

    fn echoed_bytes(&self, choice: usize) -> usize {
        let (Some(tokenizer), true) = (&self.tokenizer, self.echoes) else { return 0 };
        let ids = self.prompts.get(choice / self.n).map_or(&[][..], Vec::as_slice);
        ids.iter().map(|&id| tokenizer.token_bytes(id).len()).sum()
    }

    fn body(mut self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response {
        let mut choices = Vec::with_capacity(answers.len());
        for (index, (output, _)) in answers.iter().enumerate() {
            let text = self.push(index, output);
            choices.push(self.choice(index, text, output.finish));
        }
        output::json(&self.meta.body(&choices, usage))
    }
}

impl CompletionRenderer {
    /// Adds an output of a choice and returns the text to write. With `echo`, the first text of a choice starts with
    /// the prompt.
    fn push(&mut self, choice: usize, output: &Output) -> String {
        let mut text = String::new();
        if self.current != Some(choice)
            && let Some(tokenizer) = self.tokenizer.clone()
        {
            self.current = Some(choice);
            self.logprobs = self.logprobs.is_some().then(|| LogprobsBuilder::new(tokenizer.clone()));
            if self.echoes {
                let ids = self.prompts.get(choice / self.n).map_or(&[][..], Vec::as_slice);
                text += &completion_logprobs::text(&tokenizer, ids);
                if let (Some(builder), Some(prompt)) = (&mut self.logprobs, &output.prompt_logprobs) {
                    for (&id, logprobs) in ids.iter().zip(prompt) {
                        builder.push_prompt(id, logprobs.as_ref());
                    }
                }
            }
        }
        for delta in &output.deltas {
            if let Delta::Content(more) = delta {
                text += more;
            }
        }
        if let Some(builder) = &mut self.logprobs {
            for (id, logprobs) in &output.logprobs {
                builder.push_answer(*id, logprobs);
            }
        }
        text
    }

    fn choice(&mut self, index: usize, text: String, finish_reason: Option<FinishReason>) -> CompletionChoice {
        let logprobs = self.logprobs.as_mut().map(LogprobsBuilder::take);
        CompletionChoice { index, text, logprobs, finish_reason }
    }
}
