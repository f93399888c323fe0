//! A model of a running server whose answers are printed on the terminal, so that the model is not loaded twice.

use super::{
    answer_printer::{AnswerEnd, AnswerPrinter, AnswerStats, TerminalAnswer},
    chat_settings::AnswerOptions,
    remote_server::RemoteServer,
};
use crate::error::CommandError;
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

    pub fn server(&self) -> &RemoteServer {
        &self.server
    }

    /// Describes the model: `coder at http://127.0.0.1:5413 on metal, 37 % of the experts in memory, context 32768`.
    pub fn describe(&self) -> String {
        let plan = self.server.health().map_or(Value::Null, |health| health["plan"].clone());
        format!("{} at {} {}", self.id, self.server.base_url(), super::describe_plan(&plan))
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
        let (server, body) = (self.server.clone(), self.body(messages, options));
        // The answer is read in a separate thread, because the read may still wait for an event after the answer was
        // interrupted.
        let reader = thread::Builder::new().name("answer".into()).spawn(move || {
            let read = server.stream_chat(&body, |event| sender.send(Ok(event.clone())).is_ok());
            if let Err(error) = read {
                let _ = sender.send(Err(error));
            }
        });
        reader.map_err(|source| CommandError::Io { what: "starting a thread".into(), source })?;
        let (mut printer, begin) = (AnswerPrinter::new(), Instant::now());
        let (mut stats, mut is_cut, mut first) = (AnswerStats::default(), false, None);
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
            add_usage(&mut stats, &event);
        }
        let first = first.unwrap_or_else(Instant::now);
        stats.prompt_seconds = (first - begin).as_secs_f64();
        stats.decode_seconds = first.elapsed().as_secs_f64();
        printer.finish(Some(AnswerEnd { is_cut, stats }))
    }

    fn body(&self, messages: &[Value], options: &AnswerOptions) -> Value {
        let mut body = json!({
            "model": self.id,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_progress": true,
        });
        let fields: [(&str, Option<Value>); 8] = [
            ("temperature", options.temperature.map(Value::from)),
            ("top_p", options.top_p.map(Value::from)),
            ("top_k", options.top_k.map(Value::from)),
            ("min_p", options.min_p.map(Value::from)),
            ("repetition_penalty", options.repeat_penalty.map(Value::from)),
            ("seed", options.seed.map(Value::from)),
            ("max_tokens", options.max_tokens.map(Value::from)),
            ("enable_thinking", options.thinking.map(Value::from)),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        body
    }
}

/// Adds the token counts of an event that has them, which is the last event.
fn add_usage(stats: &mut AnswerStats, event: &Value) {
    let usage = &event["usage"];
    let count = |value: &Value| value.as_u64().unwrap_or(0) as usize;
    if usage.is_object() {
        stats.prompt_tokens = count(&usage["prompt_tokens"]);
        stats.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        stats.generated_tokens = count(&usage["completion_tokens"]);
        stats.drafted_tokens = count(&event["timings"]["drafted_tokens"]);
        stats.accepted_tokens = count(&event["timings"]["accepted_tokens"]);
    }
}
