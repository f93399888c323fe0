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
//! `parser/start.rs` says where a call starts. Malformed calls:
//!
//! * a value ends at `</parameter>`, at `</function>`, at `</tool_call>`, at a `<parameter=P>` of the tool that has a line of
//!   its own and that the call does not have yet, or at the next call. `parser/value.rs` says when such a tag is quoted;
//! * closing tags may be repeated or misspelt: `</param>`, `</ function>`, `</parameter=NAME>`, `</parameter` without
//!   `>`. They are not content directly after a call;
//! * a word of a tag may have one wrong letter after its first letter: `<paramter=P>`, `</fuction>`;
//! * a `</function>` directly before a further parameter does not end the call;
//! * names may be quoted (`<parameter="P">`) or be attributes (`<parameter name="P">`, `<invoke name="NAME">`). The `>`
//!   after the name of a known parameter or tool may be missing at the end of a line, or before the value of a
//!   parameter;
//! * an opening tag may be repeated before the value, with or without a closing tag for each opening tag. If the call
//!   already has a value of the parameter, a later value is dropped, because the first one may be sent already;
//! * line feeds around tags may be missing or follow a carriage return, and closing tags may be indented;
//! * text between the parameters of a call is content, and so is text before the end of its `<tool_call>`;
//! * `<parameter=TOOL>` before the first parameter is read like `<function=TOOL>`;
//! * `<parameter>` is the parameter of a tool that has one;
//! * a parameter may have its name as its tag, `<NAME>` and `</NAME>`, also inside `<arguments>`, `<parameters>`,
//!   `<params>`, `<input>` or `<args>`. Before another tag of the call, `</NAME>` also ends the value of
//!   `<parameter=NAME>`, unless it closes a `<NAME>` in the value;
//! * the arguments may be one JSON object instead of parameters, also in a Markdown fence, in `<parameter=arguments>` or
//!   in the JSON of the whole call: see `parser/json_call.rs`;
//! * a call without an end tag is closed when the model ends the answer. Its arguments are the arguments so far. An
//!   incomplete tag after a complete value is markup and is dropped, also after a number or another value that is no
//!   string. An incomplete value is kept, and becomes a string if it is not valid JSON;
//! * a call that the token limit cuts stays open. Its arguments are invalid JSON, because the rest of them is unknown.
//!   An incomplete tag is dropped.
//!
//! A call that a grammar constrains has none of these faults, so its values end at `</parameter>` only: see
//! [`Parser::with_exact_calls`].

mod argument;
mod call_tags;
mod declared;
mod delta;
mod json_call;
mod json_types;
mod prose;
mod python;
mod quotes;
mod start;
mod tags;
mod value;

use crate::grammar::ExactCalls;
use argument::{PendingArgument, PendingCall, call_id};
use declared::{Tools, is_name};
pub use delta::Delta;
use json_call::{JsonAt, JsonCall, JsonScanner, wrapped_arguments};
use prose::{Found, Mark, Prose};
use serde_json::Value;
use start::CallFinder;
use std::ops::Range;
use tags::*;
use value::{ValuePart, ValueScanner};

/// The characters of line ends.
const LINE_ENDS: [char; 2] = ['\r', '\n'];

/// Splits streamed text into deltas.
#[derive(Default)]
pub struct Parser {
    tools: Tools,
    state: ParserState,
    /// The Markdown of the reasoning or content that is being read.
    prose: Prose,
    /// The call that is being read.
    call: PendingCall,
    /// The value that is being read.
    value: ValueScanner,
    scanner: JsonScanner,
    /// Number of bytes that were read after the ends of values.
    read_again: usize,
    /// Text that is not dropped yet. `buffer[at..]` is not parsed yet.
    buffer: String,
    /// Offset in `buffer` of the first byte that is not parsed yet.
    at: usize,
    /// Number of bytes of text before the buffer.
    before: usize,
    /// Byte ranges of content in the whole text since the last call of [`Parser::spans`].
    spans: Vec<Range<usize>>,
    /// True if the last call began with `<tool_call>`.
    is_in_tool_call: bool,
    /// True if the `<tool_call>` of the last call has no `</tool_call>` so far.
    call_is_open: bool,
    /// True if a call ended the reasoning without a `</think>`.
    reasoning_ended_by_call: bool,
    /// Number of tool calls so far.
    calls: usize,
    /// The calls that start with `<tool_call>` and that a grammar constrains.
    exact_calls: ExactCalls,
    out: Vec<Delta>,
}

#[derive(Default, Clone, Copy)]
enum ParserState {
    /// There was only white space so far. A `<think>` here opens the reasoning even if the prompt did not.
    Start {
        in_reasoning: bool,
    },
    /// Line feeds before reasoning or content are dropped.
    Newlines {
        in_reasoning: bool,
    },
    Reasoning,
    #[default]
    Content,
    /// Between the parameters of a call.
    Body,
    /// After the opening tag of a parameter.
    ValueStart,
    Value,
    /// After the end of a call. `in_call` is true before its `</tool_call>`.
    Closing {
        in_call: bool,
    },
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
        Self { tools: Tools::new(tools), state: ParserState::Start { in_reasoning }, ..Self::default() }
    }

    /// Reads the calls that `exact_calls` names exactly, in the form to which
    /// [`GrammarCompiler`](crate::grammar::GrammarCompiler) constrains them.
    #[must_use]
    pub fn with_exact_calls(mut self, exact_calls: ExactCalls) -> Self {
        self.exact_calls = exact_calls;
        self
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
        match self.state {
            ParserState::Start { in_reasoning } => self.start(in_reasoning, end),
            ParserState::Newlines { in_reasoning } => self.newlines(in_reasoning),
            ParserState::Reasoning => self.reasoning(end),
            ParserState::Content => self.content(end),
            ParserState::Body => self.body(end),
            ParserState::ValueStart => self.value_start(end),
            ParserState::Value => self.value(end),
            ParserState::Closing { in_call } => self.closing(in_call, end),
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
        if self.exact_calls == ExactCalls::WithoutContent {
            self.exact_calls = ExactCalls::None;
        }
        self.emit(Delta::Content(text));
    }

    /// Drops the rest of the text.
    fn drop_rest(&mut self) -> StepResult {
        self.at = self.buffer.len();
        self.state = ParserState::Content;
        StepResult::NeedMoreText
    }

    /// Consumes the white space at the start of the text and `length` bytes after it.
    fn skip(&mut self, length: usize) {
        self.at += self.rest().len() - self.rest().trim_start_matches(is_space).len() + length;
    }

    fn to(&mut self, state: ParserState) -> StepResult {
        self.state = state;
        if matches!(state, ParserState::Reasoning | ParserState::Content) {
            self.prose = Prose::default();
        }
        StepResult::Continue
    }

    fn arguments(&mut self, json: impl Into<String>) {
        self.emit(Delta::Arguments { index: self.calls.saturating_sub(1), json: json.into() });
    }

    fn emit(&mut self, delta: Delta) {
        delta.push_to(&mut self.out);
    }
}

/// Parsing outside of tool calls.
impl Parser {
    fn start(&mut self, in_reasoning: bool, end: InputEnd) -> StepResult {
        match self.skip_tag(THINK, end) {
            Reading::Unfinished => StepResult::NeedMoreText,
            Reading::Found(()) => self.to(ParserState::Newlines { in_reasoning: true }),
            Reading::Other if in_reasoning => self.to(ParserState::Newlines { in_reasoning }),
            Reading::Other => self.to(ParserState::Content),
        }
    }

    /// Consumes `tag` if the text starts with it, also after white space.
    fn skip_tag(&mut self, tag: &str, end: InputEnd) -> Reading<()> {
        let text = after_gap(self.rest()).unwrap_or(self.rest());
        if text.starts_with(tag) {
            self.skip(tag.len());
            Reading::Found(())
        } else if end == InputEnd::MoreToCome && tag.starts_with(text) {
            Reading::Unfinished
        } else {
            Reading::Other
        }
    }

    fn newlines(&mut self, in_reasoning: bool) -> StepResult {
        self.at += self.rest().len() - self.rest().trim_start_matches(LINE_ENDS).len();
        if self.rest().is_empty() {
            return StepResult::NeedMoreText;
        }
        self.to(if in_reasoning { ParserState::Reasoning } else { ParserState::Content })
    }

    fn reasoning(&mut self, end: InputEnd) -> StepResult {
        let Found { at, mark } = self.scan_prose(end, true);
        let rest = self.rest();
        let is_end = mark.is_some() || end == InputEnd::Truncated && at < rest.len();
        let length = if is_end { rest[..at].trim_end_matches(LINE_ENDS).len() } else { at };
        let text = self.take(length);
        self.prose.consume(length);
        self.emit(Delta::Reasoning(text));
        match mark {
            Some(Mark::Call) => {
                self.reasoning_ended_by_call = true;
                self.open_call(end)
            }
            Some(Mark::EndThink) => {
                self.at += at - length + END_THINK.len();
                self.to(ParserState::Newlines { in_reasoning: false })
            }
            Some(Mark::Leftover) | None if end == InputEnd::Truncated => self.drop_rest(),
            Some(Mark::Leftover) | None => StepResult::NeedMoreText,
        }
    }

    fn content(&mut self, end: InputEnd) -> StepResult {
        if self.reasoning_ended_by_call {
            let end_think = self.skip_tag(END_THINK, end);
            if let Reading::Unfinished = end_think {
                return StepResult::NeedMoreText;
            }
            self.reasoning_ended_by_call = false;
            if let Reading::Found(()) = end_think {
                return self.to(ParserState::Newlines { in_reasoning: false });
            }
        }
        if self.tools.is_empty() {
            self.take_content(self.rest().len());
            return StepResult::NeedMoreText;
        }
        let Found { at, mark } = self.scan_prose(end, false);
        let rest = self.rest();
        let is_cut = end == InputEnd::Truncated && (self.calls > 0 || matches!(tag_at(&rest[at..]), TagAt::Found(_)));
        let length = match mark {
            None if end == InputEnd::MoreToCome => at,
            // White space after a call is dropped, and so is an incomplete start of a call.
            None if !is_cut && self.calls > 0 && rest.chars().all(is_space) => 0,
            None if !is_cut => rest.len(),
            _ => rest[..at].trim_end().len(),
        };
        self.take_content(length);
        self.prose.consume(length);
        match mark {
            Some(Mark::Leftover) => {
                self.skip_tool_calls();
                self.to(ParserState::Closing { in_call: true })
            }
            Some(_) => self.open_call(end),
            None if end == InputEnd::MoreToCome => StepResult::NeedMoreText,
            None => self.drop_rest(),
        }
    }

    fn scan_prose(&mut self, end: InputEnd, in_reasoning: bool) -> Found {
        let length = self.before + self.buffer.len();
        let Self { tools, scanner, prose, call_is_open, .. } = self;
        let mut finder = CallFinder { tools, scanner, length, in_reasoning, call_is_open: *call_is_open, end };
        prose.scan(&self.buffer[self.at..], end, |text, starts_line| finder.judge(text, starts_line))
    }

    /// Consumes white space and the `<tool_call>` after it.
    fn skip_tool_calls(&mut self) {
        self.skip(0);
        let after = after_tool_calls(self.rest()).unwrap_or_default().len();
        self.at = self.buffer.len() - after;
    }

    /// Starts the call at the next `<tool_call>` or `<function=NAME>`.
    fn open_call(&mut self, end: InputEnd) -> StepResult {
        self.skip(0);
        let is_constrained = self.exact_calls != ExactCalls::None;
        let is_exact = is_constrained && self.rest().starts_with("<tool_call>\n<function=");
        let before = self.at;
        self.skip_tool_calls();
        self.is_in_tool_call = self.at > before;
        match self.tools.header_at(self.rest()) {
            TagAt::Found(Tag { kind: TagKind::Function(name), length, .. }) => self.start_call(name, length, is_exact),
            _ => self.json_calls(0, end),
        }
    }
}

/// Parsing inside a tool call.
impl Parser {
    /// Starts a call whose header has `length` bytes.
    fn start_call(&mut self, name: String, length: usize, is_exact: bool) -> StepResult {
        self.call = PendingCall { is_exact, ..self.tools.call(&name) };
        self.announce(name);
        self.continue_call(length)
    }

    /// Continues a call after a tag of `length` bytes.
    fn continue_call(&mut self, length: usize) -> StepResult {
        self.at += length;
        self.call.is_stray = false;
        self.to(ParserState::Body)
    }

    fn announce(&mut self, name: String) {
        self.emit(Delta::ToolCall { index: self.calls, id: call_id(), name });
        self.calls += 1;
    }

    fn body(&mut self, end: InputEnd) -> StepResult {
        // Between stray texts, white space belongs to the content.
        if self.call.is_stray {
            self.take_content(self.rest().len() - self.rest().trim_start().len());
        } else {
            self.skip(0);
        }
        match self.tools.tag_at(self.rest(), &self.call) {
            TagAt::Unfinished if end == InputEnd::MoreToCome => StepResult::NeedMoreText,
            TagAt::Unfinished => {
                self.end_call(end);
                self.drop_rest()
            }
            TagAt::Found(Tag { kind, length, is_exact, is_name }) => match kind {
                TagKind::Parameter(name) if self.call.may_wrap(&name) => {
                    self.json_body(length, end).unwrap_or_else(|| {
                        if is_name { self.continue_call(length) } else { self.start_argument(name, length, false) }
                    })
                }
                TagKind::Parameter(name) if is_exact || self.call.knows(&name) => {
                    self.start_argument(name, length, is_name)
                }
                TagKind::Parameter(_) => self.stray_text(),
                // The end of a value, or a repeated tag.
                TagKind::EndParameter => self.continue_call(length),
                TagKind::Function(name) if name == self.call.name && self.call.seen.is_empty() => {
                    self.continue_call(length)
                }
                TagKind::EndFunction => match self.tag_after(length, !self.rest().starts_with("</f")) {
                    TagAt::Unfinished if end == InputEnd::MoreToCome => StepResult::NeedMoreText,
                    // The tag is too early.
                    TagAt::Found(tag) if self.call.lacks(&tag) => self.continue_call(length),
                    _ => self.close_call(),
                },
                TagKind::EndToolCall | TagKind::ToolCall | TagKind::Function(_) => self.close_call(),
            },
            TagAt::Other if self.call.seen.is_empty() && !self.call.is_stray => {
                self.json_body(0, end).unwrap_or_else(|| self.stray_text())
            }
            TagAt::Other => self.stray_text(),
        }
    }

    /// Reads the tag after `skip` bytes and white space. `<NAME>` is a tag only if `named` is true.
    fn tag_after(&self, skip: usize, named: bool) -> TagAt {
        let Some(text) = after_gap(&self.rest()[skip..]) else { return TagAt::Other };
        if named { self.tools.tag_at(text, &self.call) } else { self.tools.plain_tag_at(text, &self.call) }
    }

    /// Reads arguments that are written as one JSON object after a tag of `skip` bytes. `None` if there is no object.
    fn json_body(&mut self, skip: usize, end: InputEnd) -> Option<StepResult> {
        let text = after_opening(&self.rest()[skip..])?;
        let start = self.buffer.len() - text.len();
        match self.scanner.object(self.before + start, &self.buffer[start..], end) {
            JsonAt::Found((json, length)) if skip == 0 || self.call.has_all(&json) => {
                let PendingCall { name, parameters, .. } = &self.call;
                self.arguments(wrapped_arguments(&json, name, parameters, &self.tools).unwrap_or(json));
                self.at = start + length;
                Some(self.to(ParserState::Closing { in_call: true }))
            }
            JsonAt::Unfinished if end == InputEnd::MoreToCome => Some(StepResult::NeedMoreText),
            JsonAt::Unfinished if end == InputEnd::Truncated => {
                let text = &self.buffer[start..];
                let started = if text.is_empty() { "{" } else { text };
                self.arguments(started.to_owned());
                Some(self.drop_rest())
            }
            _ => None,
        }
    }

    /// Emits the calls in the JSON after `skip` bytes.
    fn json_calls(&mut self, skip: usize, end: InputEnd) -> StepResult {
        let at = self.at + skip;
        match self.scanner.calls(self.before + at, &self.buffer[at..], end, &self.tools) {
            JsonAt::Found((calls, length)) => {
                for JsonCall { name, arguments } in calls {
                    self.announce(name);
                    self.arguments(arguments);
                }
                self.at = at + length;
                self.to(ParserState::Closing { in_call: true })
            }
            JsonAt::Unfinished if end == InputEnd::MoreToCome => StepResult::NeedMoreText,
            JsonAt::Unfinished | JsonAt::Other => self.to(ParserState::Content),
        }
    }

    /// Emits text that belongs to no parameter as content.
    fn stray_text(&mut self) -> StepResult {
        self.end_argument();
        let rest = self.rest();
        let first = rest.chars().next().map_or(0, char::len_utf8);
        self.take_content(rest[first..].find('<').map_or(rest.len(), |at| first + at));
        self.call.is_stray = true;
        self.to(ParserState::Body)
    }

    /// Starts the argument whose opening tag has `length` bytes. `is_named` is true if that tag is `<NAME>`.
    fn start_argument(&mut self, name: String, length: usize, is_named: bool) -> StepResult {
        self.continue_call(length);
        if self.call.argument.as_ref().is_none_or(|argument| argument.name != name) {
            self.end_argument();
            let allowed = self.tools.values(&self.call.name, &name);
            let (argument, json) = PendingArgument::new(name.clone(), allowed, &self.call, is_named);
            self.arguments(json);
            self.call.seen.insert(name);
            self.call.has_names |= is_named;
            self.call.argument = Some(argument);
        }
        self.to(ParserState::ValueStart)
    }

    /// Ends the last argument, if that has not been done yet.
    fn end_argument(&mut self) {
        if let Some(argument) = self.call.argument.take() {
            self.arguments(argument.finish());
        }
    }

    /// Skips the line end before a value, once it is known whether there is one.
    fn value_start(&mut self, end: InputEnd) -> StepResult {
        let rest = self.rest();
        let line_end = ["\r\n", "\n"].into_iter().find(|line_end| rest.starts_with(line_end)).unwrap_or_default();
        match self.tag_after(0, false) {
            TagAt::Unfinished if end == InputEnd::MoreToCome => return StepResult::NeedMoreText,
            // The tag is repeated.
            TagAt::Found(tag) if self.call.is_own(&tag.kind) && !self.call.is_exact => self.skip(0),
            _ => self.at += line_end.len(),
        }
        self.value = ValueScanner::new(line_end, self.read_again);
        self.to(ParserState::Value)
    }

    fn value(&mut self, end: InputEnd) -> StepResult {
        let rest = &self.buffer[self.at..];
        let ValuePart { value, end: value_end } = self.value.scan(rest, end, &self.call, &self.tools);
        let Some(argument) = &mut self.call.argument else { return self.continue_call(0) };
        let json = argument.push(&rest[..value]);
        self.arguments(json);
        match value_end {
            Some(value_end) => {
                self.read_again += self.value.read_after(value_end);
                // The tag of a parameter may be repeated before its value.
                if !self.value.is_empty_before(value) {
                    self.end_argument();
                }
                self.continue_call(value_end)
            }
            None if end == InputEnd::Truncated => self.drop_rest(),
            None => {
                self.at += value;
                self.value.consume(value);
                StepResult::NeedMoreText
            }
        }
    }

    /// Closes a call's arguments. Those of a call that the token limit cut stay invalid JSON, because clients read empty
    /// arguments as a call without arguments.
    fn end_call(&mut self, end: InputEnd) {
        self.end_argument();
        let open = if self.call.seen.is_empty() { "{" } else { "" };
        let close = if end == InputEnd::Truncated { "" } else { "}" };
        self.arguments([open, close].concat());
    }

    fn close_call(&mut self) -> StepResult {
        self.end_call(InputEnd::Complete);
        self.to(ParserState::Closing { in_call: true })
    }

    /// Drops closing tags after a call.
    fn closing(&mut self, in_call: bool, end: InputEnd) -> StepResult {
        self.call_is_open = in_call && self.is_in_tool_call;
        let after = after_gap(self.rest()).unwrap_or_default();
        let is_extra = |c: char| in_call && (is_space(c) || "}],`".contains(c));
        let next = after.trim_start_matches(is_extra);
        let extra = &after[..after.len() - next.len()];
        let skip = self.rest().len() - next.len();
        match self.tools.tag_at(next, &self.call) {
            _ if skip > MAX_GAP => self.to(ParserState::Content),
            TagAt::Found(Tag { kind: TagKind::Function(name), length, is_exact, .. })
                if in_call && extra.is_empty() && (is_exact && is_name(&name) || self.tools.has(&name)) =>
            {
                self.start_call(name, skip + length, false)
            }
            TagAt::Found(Tag { kind, length, .. }) if kind.closes() => {
                self.at += skip + length;
                self.to(ParserState::Closing { in_call: in_call && kind != TagKind::EndToolCall })
            }
            TagAt::Unfinished if end == InputEnd::MoreToCome => StepResult::NeedMoreText,
            TagAt::Unfinished if end == InputEnd::Truncated || ["", "<"].contains(&next) || next.starts_with("</") => {
                self.drop_rest()
            }
            TagAt::Other if in_call && !extra.contains('`') => self.json_calls(skip, end),
            _ => self.to(ParserState::Content),
        }
    }
}

#[cfg(test)]
mod tests;
