//! A model of a running server whose answers are printed on the terminal, so that the model is not loaded twice.

use super::{
    answer_printer::{AnswerEnd, AnswerPrinter, TerminalAnswer},
    chat_settings::AnswerOptions,
    load::describe_plan,
    remote_server::RemoteServer,
};
use crate::error::CommandError;
use moestro_engine::Timings;
use serde_json::{Value, json};
use std::{future::Future, thread, time::Instant};
use tokio::sync::mpsc;

pub struct RemoteModel {
    server: RemoteServer,
    pub id: String,
}

impl RemoteModel {
    pub fn new(server: RemoteServer, id: String) -> Self {
        Self { server, id }
    }

    /// Describes the model: `coder at http://127.0.0.1:5413 on metal, 37 % of the experts in memory, context 32768`.
    pub fn describe(&self) -> String {
        let plan = self.server.health().map_or(Value::Null, |health| health["plan"].clone());
        format!("{} at {} {}", self.id, self.server.base_url(), describe_plan(&plan))
    }

    /// Prints an answer to `messages` until the answer ends or `stop` completes. The server stops when the connection
    /// closes.
    pub async fn answer(
        &self,
        messages: &[Value],
        options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        let (sender, mut events) = mpsc::unbounded_channel::<Result<Value, CommandError>>();
        let server = self.server.clone();
        let body = self.body(messages, options);
        // The answer is read in a separate thread, because the read may still wait for an event after the answer was
        // interrupted.
        let reader = thread::Builder::new().name("answer".into()).spawn(move || {
            let read = server.stream_chat(&body, |event| sender.send(Ok(event.clone())).is_ok());
            if let Err(error) = read {
                let _ = sender.send(Err(error));
            }
        });
        reader.map_err(CommandError::io("starting a thread"))?;
        let mut printer = AnswerPrinter::new();
        let begin = Instant::now();
        let mut timings = Timings::default();
        let mut is_cut = false;
        let mut first = None;
        let mut stop = std::pin::pin!(stop);
        loop {
            let event = tokio::select! {
                event = events.recv() => event.transpose()?,
                () = &mut stop => return printer.finish(None),
            };
            let Some(event) = event else { break };
            let progress = &event["prompt_progress"];
            if let (Some(tokens), Some(total)) = (progress["processed"].as_u64(), progress["total"].as_u64()) {
                printer.progress(tokens as usize, total as usize);
            }
            let choice = &event["choices"][0];
            let part = |name: &str| choice["delta"][name].as_str().filter(|text| !text.is_empty());
            if let Some(text) = part("reasoning_content") {
                first.get_or_insert_with(Instant::now);
                printer.reasoning(text);
            }
            if let Some(text) = part("content") {
                first.get_or_insert_with(Instant::now);
                printer.content(text)?;
            }
            is_cut |= choice["finish_reason"] == "length";
            add_usage(&mut timings, &event);
        }
        let first = first.unwrap_or_else(Instant::now);
        timings.prompt_seconds = (first - begin).as_secs_f64();
        timings.decode_seconds = first.elapsed().as_secs_f64();
        printer.finish(Some(AnswerEnd { is_cut, timings }))
    }

    fn body(&self, messages: &[Value], options: &AnswerOptions) -> Value {
        let AnswerOptions { sampling, seed, max_tokens, thinking } = options;
        // The server ignores a field that is null.
        json!({
            "model": self.id,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_progress": true,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed,
            "max_tokens": max_tokens,
            "enable_thinking": thinking,
        })
    }
}

/// Adds the token counts of an event that has them, which is the last event.
fn add_usage(timings: &mut Timings, event: &Value) {
    let usage = &event["usage"];
    let count = |value: &Value| value.as_u64().unwrap_or(0) as usize;
    if usage.is_object() {
        timings.prompt_tokens = count(&usage["prompt_tokens"]);
        timings.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        timings.generated_tokens = count(&usage["completion_tokens"]);
        timings.drafted_tokens = count(&event["timings"]["drafted_tokens"]);
        timings.accepted_tokens = count(&event["timings"]["accepted_tokens"]);
    }
}
