//! The interface of an API's answer format, and the two ways to write an answer with it: as one body, or as a stream.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, RequestLog, body_guard, memory},
    models::LoadedModel,
    output::{Choices, Finished, Generation, Output, PromptProgress, Usage, generation::Update},
    sse::{self, Frames, StreamFormat},
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use std::{future::Future, mem, pin::pin, sync::Arc, time::Duration};
use tokio::time::timeout;

/// Writes answers in the format of one API.
pub trait Renderer: Send + 'static {
    const STREAM: StreamFormat = StreamFormat::Events;

    /// Bytes of memory per token in the log-probabilities of an answer, as a body or until the end of a stream.
    const LOGPROB_BYTES: usize = memory::LOGPROB_BYTES;

    /// True if a stream keeps its text and log-probabilities until its end.
    fn keeps_output(&self) -> bool {
        false
    }

    /// Memory of the renderer until the response is sent, without the generated text.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Ends a stream with an error that came before its first event: the model could not be loaded, or the request was
    /// refused. Writes OpenAI's error object by default.
    fn refuse(&mut self, frames: &Frames, error: &ApiError) {
        frames.data(&error.body());
    }

    /// Sets the fields that depend on the model. Called before all other methods, with two exceptions: `refuse`, and
    /// `start` and `idle` while the model is being loaded.
    fn prepare(&mut self, _model: &LoadedModel, _choices: &Choices) {}

    /// Begins a stream. `usage` counts only the prompt of the first choice, or nothing while the model is being loaded.
    fn start(&mut self, _frames: &Frames, _usage: Usage) {}

    /// Called after some seconds without an event, also while the model is being loaded. Some clients ignore comments
    /// and close a stream after 300 s without an event, so the renderers of their APIs write an event here.
    fn idle(&mut self, _frames: &Frames) {}

    /// Reports that more of the prompt has been evaluated. Called only if the request asks for progress.
    fn progress(&mut self, _frames: &Frames, _progress: PromptProgress) {}

    fn output(&mut self, _frames: &Frames, _choice: usize, _output: &Output) {}

    /// Ends the current choice, which is complete.
    fn finish(&mut self, _frames: &Frames, _choice: usize, _finished: &Finished) {}

    /// Ends a stream after all choices are complete.
    fn end(&mut self, _frames: &Frames, _usage: Usage) {}

    /// Ends a stream whose answer failed midway.
    fn error(&mut self, frames: &Frames, error: &ApiError) {
        self.refuse(frames, error);
    }

    /// Number of bytes of the text that the body adds to this choice's output.
    fn echoed_bytes(&self, _choice: usize) -> usize {
        0
    }

    /// The response to a request that does not stream.
    fn body(self, answers: Vec<(Output, Finished)>, usage: Usage) -> Response;
}

/// A response with this JSON body.
pub fn json(body: &impl Serialize) -> Response {
    Json(body).into_response()
}

/// Adds the memory of the output's text and log-probabilities to the permit.
fn grow<R: Renderer>(permit: &mut MemoryPermit, output: &Output) -> Result<(), ApiError> {
    permit.grow(output.text_bytes() + R::LOGPROB_BYTES * output.listed_tokens())
}

/// Generates all choices and answers with one body.
pub async fn body<R: Renderer>(mut choices: Choices, first: Generation, renderer: R) -> Result<Response, ApiError> {
    let mut first = Some(first);
    let mut usage = Usage::default();
    let mut answers = Vec::new();
    let mut permit = choices.permit.reserve(0)?;
    for index in 0..choices.len() {
        permit.grow(memory::CHOICE_BYTES + memory::answer_bytes(renderer.echoed_bytes(index), 0))?;
        let mut output = Output::default();
        let append = |update| {
            if let Update::Output(more) = update {
                grow::<R>(&mut permit, &more)?;
                output.append(more);
            }
            Ok(())
        };
        let finished = run(&mut choices, index, first.take(), append).await?;
        usage.add(finished.usage, choices.has_previous_prompt(index));
        answers.push((output, finished));
    }
    Ok(body_guard::hold(renderer.body(answers, usage), permit))
}

/// Streams all choices, one after another.
pub fn stream<R: Renderer>(choices: Choices, first: Generation, mut renderer: R) -> Response {
    sse::respond(R::STREAM, move |frames| async move {
        choices.log.begin_stream();
        renderer.start(&frames, first.usage());
        write_all(choices, first, renderer, &frames).await;
    })
}

/// Like [`stream`], for choices that are not ready because their model is still being loaded.
pub fn stream_later<R: Renderer>(
    log: Arc<RequestLog>,
    ready: impl Future<Output = Result<(Arc<LoadedModel>, Choices, Generation), ApiError>> + Send + 'static,
    mut renderer: R,
) -> Response {
    sse::respond(R::STREAM, move |frames| async move {
        log.begin_stream();
        let (ready, has_started) = wait(ready, &mut renderer, &frames, log.event_interval).await;
        match ready {
            Ok((model, choices, first)) => {
                renderer.prepare(&model, &choices);
                drop(model);
                if !has_started {
                    renderer.start(&frames, first.usage());
                }
                write_all(choices, first, renderer, &frames).await;
            }
            Err(error) if has_started => renderer.error(&frames, &error),
            Err(error) => renderer.refuse(&frames, &error),
        }
    })
}

/// Waits for a future and writes events meanwhile. Returns the future's output, and whether the stream has been
/// started.
async fn wait<T>(
    ready: impl Future<Output = T>,
    renderer: &mut impl Renderer,
    frames: &Frames,
    interval: Duration,
) -> (T, bool) {
    let mut ready = pin!(ready);
    let mut has_started = false;
    loop {
        match timeout(interval, &mut ready).await {
            Ok(ready) => return (ready, has_started),
            Err(_) => {
                if !mem::replace(&mut has_started, true) {
                    renderer.start(frames, Usage::default());
                }
                renderer.idle(frames);
            }
        }
    }
}

/// Writes all choices and the end of the stream.
async fn write_all(mut choices: Choices, first: Generation, mut renderer: impl Renderer, frames: &Frames) {
    let log = choices.log.clone();
    match write(&mut choices, first, &mut renderer, frames).await {
        Ok(usage) => {
            renderer.end(frames, usage);
            log.end_stream();
        }
        Err(error) => {
            log.log_stream_error(error.message());
            renderer.error(frames, &error);
        }
    }
}

async fn write<R: Renderer>(
    choices: &mut Choices,
    first: Generation,
    renderer: &mut R,
    frames: &Frames,
) -> Result<Usage, ApiError> {
    let reports_progress = choices.reports_progress;
    let interval = choices.log.event_interval;
    let mut first = Some(first);
    let mut usage = Usage::default();
    let mut permit = choices.permit.reserve(0)?;
    for index in 0..choices.len() {
        let sink = |update| {
            match update {
                Update::Progress(progress) if reports_progress => renderer.progress(frames, progress),
                Update::Idle | Update::Progress(_) => {}
                Update::Output(output) => {
                    if renderer.keeps_output() {
                        grow::<R>(&mut permit, &output)?;
                    }
                    renderer.output(frames, index, &output);
                }
            }
            // Many updates write nothing: progress that was not requested, and text that the parser holds back, such as
            // a long array in a tool call.
            if frames.silence() >= interval {
                renderer.idle(frames);
            }
            Ok(())
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
    mut sink: impl FnMut(Update) -> Result<(), ApiError>,
) -> Result<Finished, ApiError> {
    if let Some(mut first) = first {
        choices.submit_next(index)?;
        return first.run(sink).await;
    }
    loop {
        let mut task = choices.next(index).await?;
        choices.submit_next(index)?;
        let write = |update| {
            if index + 1 == choices.len() && !matches!(update, Update::Idle) {
                choices.release_model();
            }
            sink(update)
        };
        match task.run(write).await {
            // The queue gave up this choice before it started. The choices after it are queued again, too, so that they
            // stay in order.
            Err(error) if error.is_queue_full() => choices.started.clear(),
            finished => return finished,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use tokio_stream::StreamExt;

    /// A renderer that writes the names of the methods that are called.
    struct Recorder;

    impl Renderer for Recorder {
        fn refuse(&mut self, frames: &Frames, _: &ApiError) {
            frames.data(&"refuse");
        }

        fn start(&mut self, frames: &Frames, _: Usage) {
            frames.data(&"start");
        }

        fn idle(&mut self, frames: &Frames) {
            frames.data(&"idle");
        }

        fn body(self, _: Vec<(Output, Finished)>, _: Usage) -> Response {
            Body::empty().into_response()
        }
    }

    #[tokio::test]
    async fn waiting_stream_starts_and_sends_events() {
        let response = sse::respond(StreamFormat::Events, |frames| async move {
            let (release, mut ready) = tokio::sync::oneshot::channel();
            let mut recorder = Recorder;
            let waited = wait(&mut ready, &mut recorder, &frames, Duration::from_millis(5));
            let waited = timeout(Duration::from_millis(500), waited).await;
            assert!(waited.is_err(), "the future was not ready");
            release.send(7).unwrap();
            let (ready, has_started) = wait(ready, &mut recorder, &frames, Duration::from_secs(60)).await;
            assert_eq!((ready, has_started), (Ok(7), false));
        });
        let mut body = response.into_body().into_data_stream();
        let mut text = Vec::new();
        while let Some(part) = body.next().await {
            text.extend_from_slice(&part.unwrap());
        }
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("data: \"start\"\n\ndata: \"idle\"\n\n"), "{text}");
        assert_eq!(text.matches("start").count(), 1);
    }
}
