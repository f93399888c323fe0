//! From a transcript to a client, in any wire format: as one body or as a stream.
//!
//! [`Parts`] is an answer put together, for bodies and for formats whose streams end with the whole of it; a [`Wire`]
//! writes one format's stream.

use crate::chat::parser::Delta;
use crate::http::{
    errors::ApiError,
    layers::request_log::RequestLog,
    openai::chunks::Usage,
    output::generation::{Ending, Transcript, Turn},
    sse::{self, Frames},
};
use axum::response::Response;
use std::sync::Arc;

/// A wire format's stream. It is told what happens and writes it to `out`.
pub trait Wire: Send + 'static {
    /// The request is in the queue. `usage` knows the prompt only.
    fn begin(&mut self, _out: &Frames, _usage: Usage) {}

    fn turn(&mut self, out: &Frames, turn: &Turn);

    /// The answer is complete.
    fn end(&mut self, out: &Frames, ending: &Ending);

    /// The answer broke off.
    fn error(&mut self, out: &Frames, error: &ApiError);
}

/// The transcript as a stream of `wire`'s format.
pub fn stream(mut transcript: Transcript, mut wire: impl Wire, log: Arc<RequestLog>) -> Response {
    sse::respond(move |out| async move {
        log.begin_stream();
        wire.begin(&out, transcript.usage());
        match transcript.tell(|turn| wire.turn(&out, &turn)).await {
            Ok(ending) => {
                wire.end(&out, &ending);
                log.end_stream();
            }
            Err(error) => {
                log.log_stream_error(&error);
                wire.error(&out, &error.into());
            }
        }
    })
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Reasoning(String),
    Text(String),
    /// `arguments` are JSON in a string; that of a call which `max_tokens` cut off may not be valid.
    Call {
        id: String,
        name: String,
        arguments: String,
    },
}

/// An answer put together, in the order in which it was generated.
#[derive(Debug, Default)]
pub struct Parts(pub Vec<Part>);

impl Parts {
    pub fn add(&mut self, deltas: &[Delta]) {
        for delta in deltas {
            match (self.0.last_mut(), delta) {
                (Some(Part::Reasoning(before)), Delta::Reasoning(text))
                | (Some(Part::Text(before)), Delta::Content(text)) => before.push_str(text),
                (_, Delta::Reasoning(text)) => self.0.push(Part::Reasoning(text.clone())),
                (_, Delta::Content(text)) => self.0.push(Part::Text(text.clone())),
                (_, Delta::ToolCall { id, name, .. }) => {
                    self.0.push(Part::Call { id: id.clone(), name: name.clone(), arguments: String::new() });
                }
                (_, Delta::Arguments { json, .. }) => {
                    // Text may stand between a call's parameters.
                    let last = self.0.iter_mut().rev().find_map(|part| match part {
                        Part::Call { arguments, .. } => Some(arguments),
                        _ => None,
                    });
                    if let Some(arguments) = last {
                        arguments.push_str(json);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_become_parts_in_order() {
        let mut parts = Parts::default();
        parts.add(&[Delta::Reasoning("a".into()), Delta::Reasoning("b".into()), Delta::Content("c".into())]);
        parts.add(&[Delta::Content("d".into()), Delta::ToolCall { index: 0, id: "1".into(), name: "f".into() }]);
        parts.add(&[Delta::Arguments { index: 0, json: "{\"x\":".into() }, Delta::Content("stray".into())]);
        parts.add(&[Delta::Arguments { index: 0, json: "1}".into() }]);
        let wanted = [
            Part::Reasoning("ab".into()),
            Part::Text("cd".into()),
            Part::Call { id: "1".into(), name: "f".into(), arguments: "{\"x\":1}".into() },
            Part::Text("stray".into()),
        ];
        assert_eq!(parts.0, wanted);
    }
}
