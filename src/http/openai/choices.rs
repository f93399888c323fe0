//! One answer or several to a chat (`n`): one after the other, choice `i` drawn with seed + `i`. The first one may meet a full
//! queue; those after it wait for their turn.

use crate::http::{
    LoadedModel,
    errors::ApiError,
    layers::{memory::MemoryPermit, request_log::RequestLog},
    models::WeakModel,
    openai::{chat::Answer, chunks::Usage},
    output::{
        generation::{Reader, Transcript},
        parts::Wire,
    },
    sse,
};
use crate::{chat::parser::Parser, engine::Request, error::EngineError};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde_json::Value;
use std::{sync::Arc, time::Duration};

/// A checked request for one or more answers.
pub struct Choices {
    pub request: Request,
    pub tools: Vec<Value>,
    pub in_reasoning: bool,
    pub parallel_tool_calls: bool,
    pub stops: Vec<String>,
    pub count: usize,
    /// The memory of the request, until the answers are told.
    pub permit: Option<MemoryPermit>,
}

impl Choices {
    /// Queues the first choice. If it is the only one, it holds the request's memory.
    pub fn first(&mut self, app: &LoadedModel, log: &Arc<RequestLog>) -> Result<Transcript, EngineError> {
        let first = self.submit(app, log, 0)?;
        Ok(match self.permit.take_if(|_| self.count == 1) {
            Some(permit) => first.holding(permit),
            None => first,
        })
    }

    /// Queues choice `index`.
    pub fn submit(&self, app: &LoadedModel, log: &Arc<RequestLog>, index: usize) -> Result<Transcript, EngineError> {
        let mut request = self.request.clone();
        request.sampling.seed = request.sampling.seed.map(|seed| seed.wrapping_add(index as u64));
        let Self { tools, in_reasoning, parallel_tool_calls, .. } = self;
        let (in_reasoning, parallel_tool_calls) = (*in_reasoning, *parallel_tool_calls);
        let reader = Reader::Chat { parser: Parser::new(in_reasoning, tools), in_reasoning, parallel_tool_calls };
        Transcript::submit(app, log, request, reader, self.stops.clone())
    }

    async fn submit_later(
        &mut self,
        again: &WeakModel,
        log: &Arc<RequestLog>,
        index: usize,
    ) -> Result<Transcript, EngineError> {
        loop {
            let app = again.model()?;
            match self.submit(&app, log, index) {
                Err(EngineError::QueueFull) => tokio::time::sleep(Duration::from_millis(50)).await,
                submitted => return submitted,
            }
        }
    }

    /// One body.
    pub async fn whole(
        mut self,
        app: &Arc<LoadedModel>,
        first: Transcript,
        mut answer: Answer,
        log: &Arc<RequestLog>,
    ) -> Result<Response, ApiError> {
        let again = WeakModel::new(app);
        let (mut transcript, mut usage, mut written) = (Some(first), Usage::default(), Vec::new());
        for index in 0..self.count {
            answer.index = index;
            let mut one = match transcript.take() {
                Some(first) => first,
                None => self.submit_later(&again, log, index).await?,
            };
            let (choice, used) = answer.choice(&mut one).await?;
            add(&mut usage, used);
            written.push(choice);
        }
        Ok(Json(answer.head.envelope(&written, Some(Some(usage)))).into_response())
    }

    /// One choice after the other, and the usage of all.
    pub fn stream(
        mut self,
        app: &Arc<LoadedModel>,
        first: Transcript,
        mut answer: Answer,
        log: Arc<RequestLog>,
    ) -> Response {
        let mut again = WeakModel::new(app);
        sse::respond(move |out| async move {
            log.begin_stream();
            let (mut transcript, mut usage) = (Some(first), Usage::default());
            for index in 0..self.count {
                (answer.index, answer.begun) = (index, false);
                let one = match transcript.take() {
                    Some(first) => Ok(first),
                    None => self.submit_later(&again, &log, index).await,
                };
                if index + 1 == self.count {
                    again.release();
                }
                let ended = match one {
                    Ok(mut one) => one.tell(|turn| answer.turn(&out, &turn)).await,
                    Err(error) => Err(error),
                };
                match ended {
                    Ok(ending) => {
                        answer.finish(&out, ending.reason);
                        add(&mut usage, ending.usage);
                    }
                    Err(error) => {
                        log.log_stream_error(&error);
                        return answer.error(&out, &error.into());
                    }
                }
            }
            answer.close(&out, usage);
            log.end_stream();
        })
    }
}

/// The prompt counts once, as OpenAI has it.
fn add(sum: &mut Usage, one: Usage) {
    let first = sum.prompt_tokens == 0;
    sum.prompt_tokens = one.prompt_tokens;
    sum.completion_tokens += one.completion_tokens;
    sum.total_tokens = sum.prompt_tokens + sum.completion_tokens;
    sum.completion_tokens_details.reasoning_tokens += one.completion_tokens_details.reasoning_tokens;
    sum.timings.add(one.timings);
    if first {
        sum.prompt_tokens_details = one.prompt_tokens_details;
    }
}
