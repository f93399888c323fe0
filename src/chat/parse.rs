//! A model's raw text, sorted into reasoning, content and tool calls as it streams.
//!
//! What Qwen3.5 writes:
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
//! What becomes of text that is not well formed:
//!
//! * reasoning without `</think>` is all reasoning;
//! * a `<tool_call>` that is not followed by `<function=NAME>` is content, to the letter;
//! * text between the parameters of a call is content;
//! * a `</parameter>` ends a value only before the next tag of the call or the end of the text, else it is part of it;
//! * a call that the text's end cuts off is closed: its arguments are what has come so far. An unfinished tag after a
//!   finished value is dropped (it is markup, not text); an unfinished value is kept, a string if it is no valid JSON.

mod call;
mod schema;
mod tags;

use call::{Argument, Call, call_id};
use schema::Types;
use serde_json::Value;
use tags::*;

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
    /// A fragment of a call's arguments. The fragments of one call concatenate to one valid JSON object.
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

/// The result of a step.
#[derive(PartialEq)]
enum Step {
    On,
    /// Nothing to be done before more text comes.
    Wait,
}

impl Parser {
    /// `in_reasoning`: the prompt has opened the reasoning ([`super::Template::opens_in_reasoning`]). `tools` are the
    /// request's OpenAI tool definitions; without any, no tool call is looked for.
    pub fn new(in_reasoning: bool, tools: &[Value]) -> Self {
        let state = State::Start { reasoning: in_reasoning };
        Self { tools: tools.to_vec(), state, buffer: String::new(), at: 0, calls: 0, out: Vec::new() }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.buffer.push_str(text);
        self.run(false)
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> Vec<Delta> {
        self.run(true)
    }

    fn run(&mut self, last: bool) -> Vec<Delta> {
        while self.step(last) == Step::On {}
        self.buffer.drain(..self.at);
        self.at = 0;
        std::mem::take(&mut self.out)
    }

    fn step(&mut self, last: bool) -> Step {
        // The state is put back by whoever does not change it.
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start { reasoning } => self.start(reasoning, last),
            State::Newlines { reasoning } => self.newlines(reasoning),
            State::Reasoning => self.reasoning(last),
            State::Content => self.content(last),
            State::Opening => self.opening(last),
            State::Body { call, stray } => self.body(call, stray, last),
            State::Argument { call, argument } => self.argument(call, argument, last),
            State::Closing => self.closing(last),
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

    fn start(&mut self, reasoning: bool, last: bool) -> Step {
        let (rest, text) = (self.rest(), self.rest().trim_start());
        if text.starts_with(THINK) {
            self.at += rest.len() - text.len() + THINK.len();
            self.to(State::Newlines { reasoning: true })
        } else if !last && THINK.starts_with(text) {
            self.wait(State::Start { reasoning })
        } else if reasoning {
            self.to(State::Newlines { reasoning })
        } else {
            self.to(State::Content)
        }
    }

    fn newlines(&mut self, reasoning: bool) -> Step {
        self.at += self.rest().len() - self.rest().trim_start_matches('\n').len();
        if self.rest().is_empty() {
            self.wait(State::Newlines { reasoning })
        } else {
            self.to(if reasoning { State::Reasoning } else { State::Content })
        }
    }

    fn reasoning(&mut self, last: bool) -> Step {
        let rest = self.rest();
        let end = rest.find(THOUGHT);
        let sure = if last && end.is_none() {
            rest.len()
        } else {
            rest[..end.unwrap_or(rest.len() - partial(rest, THOUGHT))].trim_end_matches('\n').len()
        };
        let skipped = end.map_or(0, |end| end + THOUGHT.len() - sure);
        let text = self.take(sure);
        self.emit(Delta::Reasoning(text));
        self.at += skipped;
        if end.is_some() { self.to(State::Newlines { reasoning: false }) } else { self.wait(State::Reasoning) }
    }

    fn content(&mut self, last: bool) -> Step {
        let rest = self.rest();
        let call = if self.tools.is_empty() { None } else { rest.find(CALL) };
        let sure = match call {
            Some(at) => rest[..at].trim_end().len(),
            None if self.tools.is_empty() => rest.len(),
            // White space after a call's end is layout.
            None if last && self.calls > 0 && rest.trim().is_empty() => 0,
            None if last => rest.len(),
            None => rest[..rest.len() - partial(rest, CALL)].trim_end().len(),
        };
        let text = self.take(sure);
        self.emit(Delta::Content(text));
        if call.is_some() { self.to(State::Opening) } else { self.wait(State::Content) }
    }

    fn opening(&mut self, last: bool) -> Step {
        let rest = self.rest();
        let tag = rest.len() - rest.trim_start().len() + CALL.len();
        let after = rest[tag..].trim_start();
        let skip = rest.len() - after.len();
        match header(after, FUNCTION) {
            Header::Named(name, length) => self.begin(name, skip + length),
            Header::Unfinished if !last => self.wait(State::Opening),
            // Not a call after all.
            _ => {
                let text = self.take(tag);
                self.emit(Delta::Content(text));
                self.to(State::Content)
            }
        }
    }

    /// Begins a call, whose header takes `length` bytes.
    fn begin(&mut self, name: String, length: usize) -> Step {
        self.at += length;
        self.emit(Delta::ToolCall { index: self.calls, id: call_id(), name: name.clone() });
        self.calls += 1;
        self.to(State::Body { call: Call { name, parameters: 0 }, stray: false })
    }

    fn body(&mut self, call: Call, stray: bool, last: bool) -> Step {
        if stray {
            let space = self.rest().len() - self.rest().trim_start().len();
            let space = self.take(space);
            self.emit(Delta::Content(space));
        } else {
            self.skip_space();
        }
        let rest = self.rest();
        match header(rest, PARAMETER) {
            Header::Named(name, length) => {
                self.at += length;
                return self.begin_argument(call, &name);
            }
            Header::Unfinished if !last => return self.wait(State::Body { call, stray }),
            Header::Unfinished => self.at = self.buffer.len(),
            Header::Other => {}
        }
        let rest = self.rest();
        if rest.is_empty() || rest.starts_with(FUNCTION_END) {
            self.at += FUNCTION_END.len().min(rest.len());
            self.end(&call);
            self.to(State::Closing)
        } else if [CALL_END, CALL, FUNCTION].iter().any(|tag| rest.starts_with(tag)) {
            // The call's own end is missing.
            self.end(&call);
            self.to(State::Closing)
        } else if [FUNCTION_END, CALL_END, CALL, FUNCTION].iter().any(|tag| tag.starts_with(rest)) {
            if !last {
                return self.wait(State::Body { call, stray });
            }
            self.at = self.buffer.len();
            self.to(State::Body { call, stray })
        } else {
            let first = rest.chars().next().map_or(0, char::len_utf8);
            let length = rest[first..].find('<').map_or(rest.len(), |at| first + at);
            let text = self.take(length);
            self.emit(Delta::Content(text));
            self.to(State::Body { call, stray: true })
        }
    }

    fn begin_argument(&mut self, mut call: Call, name: &str) -> Step {
        let opening = if call.parameters == 0 { '{' } else { ',' };
        call.parameters += 1;
        let (argument, start) = Argument::new(Types::of(&self.tools, &call.name, name));
        self.arguments(format!("{opening}{}:{start}", Value::from(name)));
        self.to(State::Argument { call, argument })
    }

    fn argument(&mut self, call: Call, mut argument: Argument, last: bool) -> Step {
        if !argument.begun {
            if self.rest().is_empty() && !last {
                return self.wait(State::Argument { call, argument });
            }
            argument.begun = true;
            self.at += usize::from(self.rest().starts_with('\n'));
        }
        let rest = self.rest();
        let (value, end) = match find_end(rest, last) {
            End::At(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), Some(at + PARAMETER_END.len())),
            End::NotBefore(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), None),
            End::Cut => (rest, Some(rest.len())),
        };
        let length = value.len();
        let mut json = argument.push(value);
        self.at += end.unwrap_or(length);
        if end.is_some() {
            json += &argument.finish();
        }
        self.arguments(json);
        if end.is_some() {
            self.to(State::Body { call, stray: false })
        } else {
            self.wait(State::Argument { call, argument })
        }
    }

    /// Closes a call's arguments.
    fn end(&mut self, call: &Call) {
        self.arguments(if call.parameters == 0 { "{}" } else { "}" }.into());
    }

    fn closing(&mut self, last: bool) -> Step {
        let rest = self.rest();
        let after = rest.trim_start();
        let skip = rest.len() - after.len();
        if after.starts_with(CALL_END) {
            self.at += skip + CALL_END.len();
            return self.to(State::Content);
        }
        match header(after, FUNCTION) {
            Header::Named(name, length) => return self.begin(name, skip + length),
            Header::Unfinished if !last => return self.wait(State::Closing),
            _ => {}
        }
        if CALL_END.starts_with(after) {
            if !last {
                return self.wait(State::Closing);
            }
            self.at = self.buffer.len();
        }
        self.to(State::Content)
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
