//! A model's raw text, sorted into reasoning, content and tool calls as it streams.
//!
//! Qwen3.5 writes:
//!
//! ```text
//! reasoning
//! </think>
//!
//! content
//!
//! <tool_call>
//! <function=NAME>
//! <parameter=P>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! The text may be cut anywhere between two pushes; the deltas, put together, are the same for every cut. Held back is
//! only what could still turn out to be markup, and the white space before it.
//!
//! Text that is not well formed:
//!
//! * reasoning without `</think>` is all reasoning;
//! * a `<tool_call>` that is not followed by `<function=NAME>` is content, to the letter;
//! * text between the parameters of a call is content;
//! * a `</parameter>` ends a value only before the next tag of the call or the end of the text, else it is part of it;
//! * a call that the model ends in its middle is closed: its arguments are what has come so far. An unfinished tag after
//!   a finished value is dropped (it is markup, not text); an unfinished value is kept, a string if it is no valid JSON;
//! * a call that is cut off, because no more tokens were allowed, stays open: its arguments are no valid JSON, since
//!   nobody knows what they would have been. Of a tag that is cut off nothing is told;
//! * a call of a known tool inside the reasoning ends the reasoning, and a `</think>` right after the call is dropped.

mod body;
mod call;
mod schema;
mod tags;
mod text;

use call::{Argument, Call};
pub(super) use schema::Types;
use serde_json::Value;
use std::ops::Range;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A tool call begins; `index` counts from 0.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A fragment of a call's arguments. The fragments of one call concatenate to one valid JSON object, unless it was
    /// cut off.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Sorts streamed text.
pub struct Parser {
    tools: Vec<Value>,
    state: State,
    /// Text not yet understood begins at `buffer[at..]`.
    buffer: String,
    at: usize,
    /// Bytes of the text before the buffer.
    before: usize,
    /// The ranges in the text of the content given since the last call of [`Parser::spans`].
    spans: Vec<Range<usize>>,
    /// The reasoning ended with a call instead of its tag.
    implied: bool,
    /// Tool calls begun so far.
    calls: usize,
    out: Vec<Delta>,
}

enum State {
    /// Nothing but white space so far. A `<think>` here opens reasoning even if the prompt did not.
    Start {
        reasoning: bool,
    },
    /// Newlines are dropped before reasoning or content.
    Newlines {
        reasoning: bool,
    },
    Reasoning,
    Content,
    /// At white space and a `<tool_call>`.
    Opening,
    /// Between the parameters of a call. `stray`: in text that does not belong there.
    Body {
        call: Call,
        stray: bool,
    },
    Argument {
        call: Call,
        argument: Argument,
    },
    /// After `</function>`.
    Closing,
}

/// The end of the text so far.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Open,
    /// The model has ended.
    Said,
    /// The model was stopped.
    Cut,
}

/// The result of a step.
#[derive(PartialEq)]
enum Step {
    On,
    /// More text is needed.
    Wait,
}

impl Parser {
    /// `in_reasoning`: the prompt has opened the reasoning ([`super::Template::opens_in_reasoning`]). `tools` are the
    /// request's OpenAI tool definitions; without any, no tool call is looked for.
    pub fn new(in_reasoning: bool, tools: &[Value]) -> Self {
        let state = State::Start { reasoning: in_reasoning };
        Self {
            tools: tools.to_vec(),
            state,
            buffer: String::new(),
            at: 0,
            before: 0,
            spans: Vec::new(),
            implied: false,
            calls: 0,
            out: Vec::new(),
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.buffer.push_str(text);
        self.run(End::Open)
    }

    /// The text has ended: gives what was held back. `cut`: the model had more to say.
    pub fn finish(&mut self, cut: bool) -> Vec<Delta> {
        self.run(if cut { End::Cut } else { End::Said })
    }

    /// The ranges in all of the text, in bytes, of the content given since the last call.
    pub fn spans(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.spans)
    }

    fn run(&mut self, end: End) -> Vec<Delta> {
        while self.step(end) == Step::On {}
        self.buffer.drain(..self.at);
        self.before += self.at;
        self.at = 0;
        std::mem::take(&mut self.out)
    }

    fn step(&mut self, end: End) -> Step {
        let last = end != End::Open;
        // The state is put back by whoever does not change it.
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start { reasoning } => self.start(reasoning, last),
            State::Newlines { reasoning } => self.newlines(reasoning),
            State::Reasoning => self.reasoning(end),
            State::Content => self.content(end),
            State::Opening => self.opening(end),
            State::Body { call, stray } => self.body(call, stray, end),
            State::Argument { call, argument } => self.argument(call, argument, end),
            State::Closing => self.closing(end),
        }
    }

    fn rest(&self) -> &str {
        &self.buffer[self.at..]
    }

    /// The next `length` bytes, which are done with.
    fn take(&mut self, length: usize) -> String {
        let text = self.rest()[..length].to_string();
        self.at += length;
        text
    }

    /// Gives the next `length` bytes as content.
    fn say(&mut self, length: usize) {
        let start = self.before + self.at;
        let text = self.take(length);
        match self.spans.last_mut() {
            _ if length == 0 => return,
            Some(span) if span.end == start => span.end += length,
            _ => self.spans.push(start..start + length),
        }
        self.emit(Delta::Content(text));
    }

    /// Drops the rest of the text.
    fn drop_rest(&mut self) -> Step {
        self.at = self.buffer.len();
        self.wait(State::Content)
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn to(&mut self, state: State) -> Step {
        self.state = state;
        Step::On
    }

    fn wait(&mut self, state: State) -> Step {
        self.state = state;
        Step::Wait
    }

    fn arguments(&mut self, json: String) {
        self.emit(Delta::Arguments { index: self.calls.saturating_sub(1), json });
    }

    /// Queues a delta; text joins the delta before it if that is of its kind.
    fn emit(&mut self, delta: Delta) {
        match (self.out.last_mut(), &delta) {
            (_, Delta::Reasoning(text) | Delta::Content(text) | Delta::Arguments { json: text, .. })
                if text.is_empty() => {}
            (Some(Delta::Reasoning(before)), Delta::Reasoning(text))
            | (Some(Delta::Content(before)), Delta::Content(text)) => before.push_str(text),
            (Some(Delta::Arguments { index, json }), Delta::Arguments { index: same, json: more }) if index == same => {
                json.push_str(more);
            }
            _ => self.out.push(delta),
        }
    }
}

#[cfg(test)]
mod tests;
