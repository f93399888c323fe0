//! Splits a model's raw text into reasoning, content and tool calls while it streams.
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
//! The text may be cut anywhere between two pushes. The concatenated deltas are the same for every cut. Only text that
//! may still become markup is held back, together with the white space before it.
//!
//! Malformed text:
//!
//! * reasoning without `</think>` is reasoning up to the end of the text;
//! * a `<tool_call>` without a `<function=NAME>` after it is content, unchanged;
//! * text between the parameters of a call is content;
//! * a `</parameter>` ends a value only before the next tag of the call or the end of the text. Otherwise the
//!   `</parameter>` is part of the value;
//! * a call without an end tag is closed when the model ends the answer. Its arguments are the arguments so far. An
//!   incomplete tag after a complete value is markup and is dropped. An incomplete value is kept, and becomes a string
//!   if it is not valid JSON;
//! * a call that the token limit cuts stays open. Its arguments are invalid JSON, because the rest of them is unknown.
//!   An incomplete tag is dropped;
//! * a call of a known tool inside the reasoning ends the reasoning. A `</think>` right after the call is dropped.

mod argument;
mod json_types;
mod tags;

use argument::{PendingArgument, PendingCall, call_id};
pub(super) use json_types::{JsonTypes, target};
use serde_json::Value;
use std::ops::Range;
use tags::*;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A tool call starts. `index` is the number of earlier calls.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A fragment of a call's arguments. Together, the fragments of one call are a valid JSON object, unless the token
    /// limit cut the call.
    Arguments {
        index: usize,
        json: String,
    },
}

impl Delta {
    /// The delta's text: reasoning, content, a fragment of arguments, or the name of a function.
    pub fn text(&self) -> &str {
        match self {
            Self::Reasoning(text) | Self::Content(text) | Self::Arguments { json: text, .. } => text,
            Self::ToolCall { name, .. } => name,
        }
    }

    /// Appends the delta to `deltas`. If the last delta is of the same kind, the text is appended to that delta.
    pub fn push_to(self, deltas: &mut Vec<Self>) {
        match (deltas.last_mut(), &self) {
            (_, Self::Reasoning(text) | Self::Content(text) | Self::Arguments { json: text, .. })
                if text.is_empty() => {}
            (Some(Self::Reasoning(before)), Self::Reasoning(text))
            | (Some(Self::Content(before)), Self::Content(text)) => before.push_str(text),
            (Some(Self::Arguments { index, json }), Self::Arguments { index: same, json: more }) if index == same => {
                json.push_str(more);
            }
            _ => deltas.push(self),
        }
    }
}

/// Splits streamed text into deltas.
pub struct Parser {
    tools: Vec<Value>,
    state: ParserState,
    /// Text that is not dropped yet. `buffer[at..]` is not parsed yet.
    buffer: String,
    /// Offset in `buffer` of the first byte that is not parsed yet.
    at: usize,
    /// Number of bytes of text before the buffer.
    before: usize,
    /// Byte ranges of content in the whole text since the last call of [`Parser::spans`].
    spans: Vec<Range<usize>>,
    /// True if a call ended the reasoning without a `</think>`.
    reasoning_ended_by_call: bool,
    /// Number of tool calls so far.
    calls: usize,
    out: Vec<Delta>,
}

enum ParserState {
    /// There was only white space so far. A `<think>` here opens the reasoning even if the prompt did not.
    Start {
        reasoning: bool,
    },
    /// Line feeds before reasoning or content are dropped.
    Newlines {
        reasoning: bool,
    },
    Reasoning,
    Content,
    /// The next text is white space and a `<tool_call>`.
    Opening,
    /// Between the parameters of a call. `stray` is true inside text that does not belong to a parameter.
    Body {
        call: PendingCall,
        stray: bool,
    },
    Argument {
        call: PendingCall,
        argument: PendingArgument,
    },
    /// After the `</function>` of a call.
    Closing,
}

/// State of the input: more text can follow, or the answer has ended for a reason.
#[derive(Clone, Copy, PartialEq)]
enum InputEnd {
    MoreToCome,
    /// The model ended its answer.
    Complete,
    /// The token limit ended the answer.
    Truncated,
}

/// Result of a parser step.
#[derive(PartialEq)]
enum StepResult {
    Continue,
    NeedMoreText,
}

impl Parser {
    /// Creates a parser. `in_reasoning` is true if the prompt opened the reasoning
    /// ([`super::Template::opens_in_reasoning`]). `tools` are the request's tool definitions in OpenAI's format.
    /// Without tools, tool calls are content.
    pub fn new(in_reasoning: bool, tools: &[Value]) -> Self {
        let state = ParserState::Start { reasoning: in_reasoning };
        Self {
            tools: tools.to_vec(),
            state,
            buffer: String::new(),
            at: 0,
            before: 0,
            spans: Vec::new(),
            reasoning_ended_by_call: false,
            calls: 0,
            out: Vec::new(),
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.buffer.push_str(text);
        self.run(InputEnd::MoreToCome)
    }

    /// Ends the text and returns the text that was held back. `truncated` is true if the token limit ended the answer.
    pub fn finish(&mut self, truncated: bool) -> Vec<Delta> {
        self.run(if truncated { InputEnd::Truncated } else { InputEnd::Complete })
    }

    /// Byte ranges, in the whole text, of the content that was returned since the last call.
    pub fn spans(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.spans)
    }

    fn run(&mut self, end: InputEnd) -> Vec<Delta> {
        while self.step(end) == StepResult::Continue {}
        self.buffer.drain(..self.at);
        self.before += self.at;
        self.at = 0;
        std::mem::take(&mut self.out)
    }

    fn step(&mut self, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        // Every state function sets the next state.
        match std::mem::replace(&mut self.state, ParserState::Content) {
            ParserState::Start { reasoning } => self.start(reasoning, last),
            ParserState::Newlines { reasoning } => self.newlines(reasoning),
            ParserState::Reasoning => self.reasoning(end),
            ParserState::Content => self.content(end),
            ParserState::Opening => self.opening(end),
            ParserState::Body { call, stray } => self.body(call, stray, end),
            ParserState::Argument { call, argument } => self.argument(call, argument, end),
            ParserState::Closing => self.closing(end),
        }
    }

    fn rest(&self) -> &str {
        &self.buffer[self.at..]
    }

    /// Consumes the next `length` bytes.
    fn take(&mut self, length: usize) -> String {
        let text = self.rest()[..length].to_string();
        self.at += length;
        text
    }

    /// Emits the next `length` bytes as content.
    fn take_content(&mut self, length: usize) {
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
    fn drop_rest(&mut self) -> StepResult {
        self.at = self.buffer.len();
        self.wait(ParserState::Content)
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn to(&mut self, state: ParserState) -> StepResult {
        self.state = state;
        StepResult::Continue
    }

    fn wait(&mut self, state: ParserState) -> StepResult {
        self.state = state;
        StepResult::NeedMoreText
    }

    fn arguments(&mut self, json: String) {
        self.emit(Delta::Arguments { index: self.calls.saturating_sub(1), json });
    }

    fn emit(&mut self, delta: Delta) {
        delta.push_to(&mut self.out);
    }
}

/// Parsing outside of tool calls.
impl Parser {
    fn start(&mut self, reasoning: bool, last: bool) -> StepResult {
        let rest = self.rest();
        let text = self.rest().trim_start();
        if text.starts_with(THINK) {
            self.at += rest.len() - text.len() + THINK.len();
            self.to(ParserState::Newlines { reasoning: true })
        } else if !last && THINK.starts_with(text) {
            self.wait(ParserState::Start { reasoning })
        } else if reasoning {
            self.to(ParserState::Newlines { reasoning })
        } else {
            self.to(ParserState::Content)
        }
    }

    fn newlines(&mut self, reasoning: bool) -> StepResult {
        self.at += self.rest().len() - self.rest().trim_start_matches('\n').len();
        if self.rest().is_empty() {
            self.wait(ParserState::Newlines { reasoning })
        } else {
            self.to(if reasoning { ParserState::Reasoning } else { ParserState::Content })
        }
    }

    fn reasoning(&mut self, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        let rest = self.rest();
        let thought = rest.find(END_THINK);
        let before = &rest[..thought.unwrap_or(rest.len())];
        let (stop, call) = match self.call_in(rest, before.len()) {
            Some((at, true)) => (Some(at), true),
            // More text could turn the `<tool_call>` at this offset into a call of a known tool.
            Some((at, false)) if end != InputEnd::Complete => (Some(at), false),
            _ => (None, false),
        };
        if let Some(at) = stop {
            let certain = before[..at].trim_end_matches('\n').len();
            let text = self.take(certain);
            self.emit(Delta::Reasoning(text));
            self.reasoning_ended_by_call = call;
            return match end {
                _ if call => self.to(ParserState::Opening),
                InputEnd::Truncated => self.drop_rest(),
                _ => self.wait(ParserState::Reasoning),
            };
        }
        let held = if last { 0 } else { partial(before, END_THINK).max(self.partial_call(before)) };
        let certain = match thought {
            None if last => before.len(),
            None => before[..before.len() - held].trim_end_matches('\n').len(),
            Some(_) => before.trim_end_matches('\n').len(),
        };
        let skipped = thought.map_or(0, |thought| thought + END_THINK.len() - certain);
        let text = self.take(certain);
        self.emit(Delta::Reasoning(text));
        self.at += skipped;
        if thought.is_some() {
            self.to(ParserState::Newlines { reasoning: false })
        } else {
            self.wait(ParserState::Reasoning)
        }
    }

    /// Offset of the first `<tool_call>` in `text[..end]` that calls a known tool or may still do so. The boolean is
    /// true if the `<tool_call>` calls a known tool.
    fn call_in(&self, text: &str, end: usize) -> Option<(usize, bool)> {
        let names = || self.tools.iter().filter_map(|tool| tool.get("function").unwrap_or(tool).get("name")?.as_str());
        let mut calls = if self.tools.is_empty() { None } else { Some(text[..end].match_indices(TOOL_CALL)) };
        calls.iter_mut().flatten().find_map(|(at, _)| {
            match header(text[at + TOOL_CALL.len()..].trim_start(), FUNCTION) {
                TagHeader::Named(name, _) => names().any(|known| known == name).then_some((at, true)),
                TagHeader::Unfinished => Some((at, false)),
                TagHeader::Other => None,
            }
        })
    }

    fn partial_call(&self, text: &str) -> usize {
        if self.tools.is_empty() { 0 } else { partial(text, TOOL_CALL) }
    }

    fn content(&mut self, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        if self.reasoning_ended_by_call {
            let rest = self.rest();
            let text = self.rest().trim_start();
            if text.starts_with(END_THINK) {
                self.at += rest.len() - text.len() + END_THINK.len();
                self.reasoning_ended_by_call = false;
                return self.to(ParserState::Newlines { reasoning: false });
            } else if !last && END_THINK.starts_with(text) {
                return self.wait(ParserState::Content);
            }
            self.reasoning_ended_by_call = false;
        }
        let rest = self.rest();
        let call = if self.tools.is_empty() { None } else { rest.find(TOOL_CALL) };
        let certain = match call {
            Some(at) => rest[..at].trim_end().len(),
            None if self.tools.is_empty() => rest.len(),
            // White space after a call is dropped, and so is an incomplete `<tool_call>`.
            None if end == InputEnd::Truncated && self.calls > 0 => {
                rest[..rest.len() - partial(rest, TOOL_CALL)].trim_end().len()
            }
            None if last && self.calls > 0 && rest.trim().is_empty() => 0,
            None if last => rest.len(),
            None => rest[..rest.len() - partial(rest, TOOL_CALL)].trim_end().len(),
        };
        self.take_content(certain);
        if call.is_some() { self.to(ParserState::Opening) } else { self.wait(ParserState::Content) }
    }

    fn opening(&mut self, end: InputEnd) -> StepResult {
        let rest = self.rest();
        let tag = rest.len() - rest.trim_start().len() + TOOL_CALL.len();
        let after = rest[tag..].trim_start();
        let skip = rest.len() - after.len();
        match header(after, FUNCTION) {
            TagHeader::Named(name, length) => self.start_call(name, skip + length),
            TagHeader::Unfinished if end == InputEnd::MoreToCome => self.wait(ParserState::Opening),
            TagHeader::Unfinished if end == InputEnd::Truncated => self.drop_rest(),
            // No `<function=NAME>` follows, so the `<tool_call>` is content.
            _ => {
                self.take_content(tag);
                self.to(ParserState::Content)
            }
        }
    }
}

/// Parsing inside a tool call.
impl Parser {
    /// Starts a call whose header has `length` bytes.
    fn start_call(&mut self, name: String, length: usize) -> StepResult {
        self.at += length;
        self.emit(Delta::ToolCall { index: self.calls, id: call_id(), name: name.clone() });
        self.calls += 1;
        self.to(ParserState::Body { call: PendingCall { name, parameters: 0 }, stray: false })
    }

    fn body(&mut self, call: PendingCall, stray: bool, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        if stray {
            self.take_content(self.rest().len() - self.rest().trim_start().len());
        } else {
            self.skip_space();
        }
        let rest = self.rest();
        match header(rest, PARAMETER) {
            TagHeader::Named(name, length) => {
                self.at += length;
                return self.start_argument(call, &name);
            }
            TagHeader::Unfinished if !last => return self.wait(ParserState::Body { call, stray }),
            TagHeader::Unfinished => self.at = self.buffer.len(),
            TagHeader::Other => {}
        }
        let rest = self.rest();
        if rest.is_empty() && end == InputEnd::Truncated {
            // Clients read empty arguments as a call without arguments. The opening brace makes the arguments invalid
            // JSON instead.
            self.arguments(if call.parameters == 0 { "{" } else { "" }.into());
            self.drop_rest()
        } else if rest.is_empty() || rest.starts_with(END_FUNCTION) {
            self.at += END_FUNCTION.len().min(rest.len());
            self.end_call(&call);
            self.to(ParserState::Closing)
        } else if [END_TOOL_CALL, TOOL_CALL, FUNCTION].iter().any(|tag| rest.starts_with(tag)) {
            // The end tag of the call is missing.
            self.end_call(&call);
            self.to(ParserState::Closing)
        } else if [END_FUNCTION, END_TOOL_CALL, TOOL_CALL, FUNCTION].iter().any(|tag| tag.starts_with(rest)) {
            if !last {
                return self.wait(ParserState::Body { call, stray });
            }
            self.at = self.buffer.len();
            self.to(ParserState::Body { call, stray })
        } else {
            let first = rest.chars().next().map_or(0, char::len_utf8);
            self.take_content(rest[first..].find('<').map_or(rest.len(), |at| first + at));
            self.to(ParserState::Body { call, stray: true })
        }
    }

    fn start_argument(&mut self, mut call: PendingCall, name: &str) -> StepResult {
        let opening = if call.parameters == 0 { '{' } else { ',' };
        call.parameters += 1;
        let (argument, start) = PendingArgument::new(JsonTypes::of(&self.tools, &call.name, name));
        self.arguments(format!("{opening}{}:{start}", Value::from(name)));
        self.to(ParserState::Argument { call, argument })
    }

    fn argument(&mut self, call: PendingCall, mut argument: PendingArgument, end: InputEnd) -> StepResult {
        if !argument.started {
            if self.rest().is_empty() && end == InputEnd::MoreToCome {
                return self.wait(ParserState::Argument { call, argument });
            }
            argument.started = true;
            self.at += usize::from(self.rest().starts_with('\n'));
        }
        let rest = self.rest();
        let (value, close) = match find_end(rest, end == InputEnd::Complete) {
            ValueEnd::At(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), Some(at + END_PARAMETER.len())),
            ValueEnd::NotBefore(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), None),
            ValueEnd::Missing => (rest, Some(rest.len())),
        };
        let length = value.len();
        let mut json = argument.push(value);
        self.at += close.unwrap_or(length);
        if close.is_some() {
            json += &argument.finish();
        }
        self.arguments(json);
        match close {
            Some(_) => self.to(ParserState::Body { call, stray: false }),
            None if end == InputEnd::Truncated => self.drop_rest(),
            None => self.wait(ParserState::Argument { call, argument }),
        }
    }

    /// Closes a call's arguments.
    fn end_call(&mut self, call: &PendingCall) {
        self.arguments(if call.parameters == 0 { "{}" } else { "}" }.into());
    }

    fn closing(&mut self, end: InputEnd) -> StepResult {
        let rest = self.rest();
        let after = rest.trim_start();
        let skip = rest.len() - after.len();
        if after.starts_with(END_TOOL_CALL) {
            self.at += skip + END_TOOL_CALL.len();
            return self.to(ParserState::Content);
        }
        match header(after, FUNCTION) {
            TagHeader::Named(name, length) => return self.start_call(name, skip + length),
            TagHeader::Unfinished if end == InputEnd::MoreToCome => return self.wait(ParserState::Closing),
            TagHeader::Unfinished if end == InputEnd::Truncated => return self.drop_rest(),
            _ => {}
        }
        if END_TOOL_CALL.starts_with(after) {
            if end == InputEnd::MoreToCome {
                return self.wait(ParserState::Closing);
            }
            self.at = self.buffer.len();
        }
        self.to(ParserState::Content)
    }
}

#[cfg(test)]
mod tests;
