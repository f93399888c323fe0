//! The interface of an API's answer format, and the two loops that drive it: one body, or a stream of server-sent events.

use crate::{
    error::EngineError,
    http::{
        errors::ApiError,
        output::{
            choices::Choices,
            generation::{Finished, Generation, Output, Update},
            usage::{PromptProgress, Usage},
        },
        sse::{self, Frames},
    },
};
use axum::response::Response;

/// Writes answers in the format of one API.
pub trait Renderer: Send + 'static {
    /// Ends a stream with an error that came before its first event: the model could not be loaded, or the request was
    /// refused.
    fn refuse(frames: &Frames, error: &ApiError);

    /// The first choice is in the queue. `usage` counts only its prompt.
    fn start(&mut self, _frames: &Frames, _usage: Usage) {}

    /// Nothing has happened for some seconds. Some clients close a stream after 300 s without an event and ignore comments,
    /// so their APIs need an event here.
    fn idle(&mut self, _frames: &Frames) {}

    /// More of the prompt has been evaluated. Called only if the request asks for progress.
    fn progress(&mut self, frames: &Frames, progress: PromptProgress);

    fn output(&mut self, frames: &Frames, choice: usize, output: &Output);

    /// The current choice is complete.
    fn finish(&mut self, _frames: &Frames, _choice: usize, _finished: &Finished) {}

    /// All choices are complete.
    fn end(&mut self, _frames: &Frames, _usage: Usage) {}

    /// The answer failed midway.
    fn error(&mut self, frames: &Frames, error: &ApiError) {
        Self::refuse(frames, error);
    }

    /// The response to a request that does not stream.
    fn body(self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response;
}

/// Generates all choices and answers with one body.
pub async fn body(mut choices: Choices, first: Generation, renderer: impl Renderer) -> Result<Response, ApiError> {
    let (mut first, mut usage, mut answers) = (Some(first), Usage::default(), Vec::new());
    for index in 0..choices.len() {
        let mut output = Output::default();
        let append = |update| {
            if let Update::Output(more) = update {
                output.append(more);
            }
        };
        let finished = run(&mut choices, index, first.take(), append).await?;
        usage.add(finished.usage, choices.has_previous_prompt(index));
        answers.push((output, finished));
    }
    Ok(renderer.body(answers, usage))
}

/// Streams all choices, one after another.
pub fn stream(mut choices: Choices, first: Generation, mut renderer: impl Renderer) -> Response {
    sse::respond(move |frames| async move {
        let log = choices.log.clone();
        log.begin_stream();
        match write(&mut choices, first, &mut renderer, &frames).await {
            Ok(usage) => {
                renderer.end(&frames, usage);
                log.end_stream();
            }
            Err(error) => {
                log.log_stream_error(&error);
                renderer.error(&frames, &error.into());
            }
        }
    })
}

async fn write(
    choices: &mut Choices,
    first: Generation,
    renderer: &mut impl Renderer,
    frames: &Frames,
) -> Result<Usage, EngineError> {
    renderer.start(frames, first.usage());
    let reports_progress = choices.reports_progress;
    let (mut first, mut usage) = (Some(first), Usage::default());
    for index in 0..choices.len() {
        let sink = |update| match update {
            Update::Idle => renderer.idle(frames),
            Update::Progress(progress) if reports_progress => renderer.progress(frames, progress),
            Update::Progress(_) => {}
            Update::Output(output) => renderer.output(frames, index, &output),
        };
        let finished = run(choices, index, first.take(), sink).await?;
        renderer.finish(frames, index, &finished);
        usage.add(finished.usage, choices.has_previous_prompt(index));
    }
    Ok(usage)
}

/// Passes the updates of choice `index` to `sink`. `first` is the first choice, which is queued already.
async fn run(
    choices: &mut Choices,
    index: usize,
    first: Option<Generation>,
    sink: impl FnMut(Update),
) -> Result<Finished, EngineError> {
    match first {
        Some(mut first) => {
            choices.submit_ahead(index)?;
            first.run(sink).await
        }
        None => {
            let mut task = choices.next(index).await?;
            choices.submit_ahead(index)?;
            task.run(sink).await
        }
    }
}
