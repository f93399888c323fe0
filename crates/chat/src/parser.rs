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
//! * closing tags may be repeated or misspelt: `</param>`, `</ function>`, `</parameter` without `>`. They are not content
//!   directly after a call;
//! * names may be quoted (`<parameter="P">`) or be attributes (`<parameter name="P">`, `<invoke name="NAME">`). The `>`
//!   after the name of a known parameter or tool may be missing at the end of a line;
//! * an opening tag may be repeated before the value, with a closing tag of its own or without. If the call already has a
//!   value of the parameter, a later value is dropped, because the first one may be sent already;
//! * line feeds around tags may be missing or follow a carriage return, and closing tags may be indented;
//! * text between the parameters of a call is content;
//! * the arguments may be one JSON object instead of parameters, also in a Markdown fence. `parser/json_call.rs` reads it;
//! * a call without an end tag is closed when the model ends the answer. Its arguments are the arguments so far. An
//!   incomplete tag after a complete value is markup and is dropped, also after a number or another value that is no
//!   string. An incomplete value is kept, and becomes a string if it is not valid JSON;
//! * a call that the token limit cuts stays open. Its arguments are invalid JSON, because the rest of them is unknown.
//!   An incomplete tag is dropped.
//!
//! A call that a grammar constrains has none of these faults, so its values end at `</parameter>` only: see
//! [`Parser::with_exact_calls`].

mod argument;
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
use declared::Tools;
pub use delta::Delta;
use json_call::{JsonAt, JsonCall, JsonScanner};
use prose::{Found, Prose};
use serde_json::Value;
use start::CallFinder;
use std::ops::Range;
use tags::*;
use value::{ValueContext, ValuePart, ValueScanner};

/// The characters of line ends.
const LINE_ENDS: [char; 2] = ['\r', '\n'];

/// Splits streamed text into deltas.
pub struct Parser {
    tools: Tools,
    state: ParserState,
    /// The Markdown of the reasoning or content that is being read.
    prose: Prose,
    scanner: JsonScanner,
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
    /// The calls that start with `<tool_call>` and that a grammar constrains.
    exact_calls: ExactCalls,
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
    /// Between the parameters of a call. `stray` is true inside text that does not belong to a parameter.
    Body {
        call: PendingCall,
        stray: bool,
    },
    Argument {
        call: PendingCall,
        argument: PendingArgument,
        /// `None` until the text after the opening tag is known.
        scanner: Option<Box<ValueScanner>>,
    },
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
        let state = ParserState::Start { reasoning: in_reasoning };
        Self {
            tools: Tools::new(tools),
            state,
            prose: Prose::default(),
            scanner: JsonScanner::default(),
            buffer: String::new(),
            at: 0,
            before: 0,
            spans: Vec::new(),
            reasoning_ended_by_call: false,
            calls: 0,
            exact_calls: ExactCalls::default(),
            out: Vec::new(),
        }
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
        let last = end != InputEnd::MoreToCome;
        // Every state function sets the next state.
        match std::mem::replace(&mut self.state, ParserState::Content) {
            ParserState::Start { reasoning } => self.start(reasoning, last),
            ParserState::Newlines { reasoning } => self.newlines(reasoning),
            ParserState::Reasoning => self.reasoning(end),
            ParserState::Content => self.content(end),
            ParserState::Body { call, stray } => self.body(call, stray, end),
            ParserState::Argument { call, argument, scanner } => self.argument(call, argument, scanner, end),
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
        let text = after_gap(rest).unwrap_or(rest);
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
        self.at += self.rest().len() - self.rest().trim_start_matches(LINE_ENDS).len();
        if self.rest().is_empty() {
            self.wait(ParserState::Newlines { reasoning })
        } else {
            self.prose = Prose::default();
            self.to(if reasoning { ParserState::Reasoning } else { ParserState::Content })
        }
    }

    fn reasoning(&mut self, end: InputEnd) -> StepResult {
        let found = self.scan_prose(end, true);
        let rest = self.rest();
        let (at, is_known) = match found {
            Found::Call(at) | Found::EndThink(at) => (at, true),
            Found::Nothing(at) => (at, end == InputEnd::Truncated && at < rest.len()),
        };
        let certain = if is_known { rest[..at].trim_end_matches(LINE_ENDS).len() } else { at };
        let skipped = at - certain;
        let text = self.take(certain);
        self.prose.consume(certain);
        self.emit(Delta::Reasoning(text));
        match found {
            Found::Call(_) => {
                self.reasoning_ended_by_call = true;
                self.open_call(end)
            }
            Found::EndThink(_) => {
                self.at += skipped + END_THINK.len();
                self.to(ParserState::Newlines { reasoning: false })
            }
            Found::Nothing(_) if end == InputEnd::Truncated => self.drop_rest(),
            Found::Nothing(_) => self.wait(ParserState::Reasoning),
        }
    }

    fn content(&mut self, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        if self.reasoning_ended_by_call {
            let rest = self.rest();
            let text = after_gap(rest).unwrap_or(rest);
            if text.starts_with(END_THINK) {
                self.at += rest.len() - text.len() + END_THINK.len();
                self.reasoning_ended_by_call = false;
                return self.to(ParserState::Newlines { reasoning: false });
            } else if !last && END_THINK.starts_with(text) {
                return self.wait(ParserState::Content);
            }
            self.reasoning_ended_by_call = false;
        }
        if self.tools.is_empty() {
            self.take_content(self.rest().len());
            return self.wait(ParserState::Content);
        }
        let found = self.scan_prose(end, false);
        let rest = self.rest();
        let certain = match found {
            Found::Call(at) | Found::EndThink(at) => rest[..at].trim_end().len(),
            Found::Nothing(at) if end == InputEnd::MoreToCome => at,
            // White space after a call is dropped, and so is an incomplete start of a call.
            Found::Nothing(at) if end == InputEnd::Truncated && (self.calls > 0 || self.has_tag(at)) => {
                rest[..at].trim_end().len()
            }
            Found::Nothing(_) if self.calls > 0 && rest.trim().is_empty() => 0,
            Found::Nothing(_) => rest.len(),
        };
        self.take_content(certain);
        self.prose.consume(certain);
        match found {
            Found::Call(_) => self.open_call(end),
            _ if last => self.drop_rest(),
            _ => self.wait(ParserState::Content),
        }
    }

    /// True if a whole tag of a call is at `at` in the rest of the text.
    fn has_tag(&self, at: usize) -> bool {
        matches!(tag_at(&self.rest()[at..]), TagAt::Found(_))
    }

    fn scan_prose(&mut self, end: InputEnd, in_reasoning: bool) -> Found {
        let length = self.before + self.buffer.len();
        let Self { tools, scanner, prose, .. } = self;
        let mut finder = CallFinder { tools, scanner, length, in_reasoning, end };
        prose.scan(&self.buffer[self.at..], end, |text, starts_line| finder.judge(text, starts_line))
    }

    /// Starts the call at the next `<tool_call>` or `<function=NAME>`.
    fn open_call(&mut self, end: InputEnd) -> StepResult {
        self.prose = Prose::default();
        self.skip_space();
        let is_constrained = self.exact_calls != ExactCalls::None;
        let is_exact = is_constrained && self.rest().starts_with("<tool_call>\n<function=");
        let after = after_tool_calls(self.rest()).unwrap_or_default().len();
        self.at = self.buffer.len() - after;
        match tag_at(self.rest()) {
            TagAt::Found(Tag { kind: TagKind::Function(name), length, .. }) => self.start_call(name, length, is_exact),
            _ => self.json_calls(0, end),
        }
    }
}

/// Parsing inside a tool call.
impl Parser {
    /// Starts a call whose header has `length` bytes.
    fn start_call(&mut self, name: String, length: usize, is_exact: bool) -> StepResult {
        self.at += length;
        self.announce(name.clone());
        let parameters = self.tools.parameters(&name);
        self.begin_body(PendingCall { name, parameters, seen: Vec::new(), empty: None, is_exact })
    }

    fn announce(&mut self, name: String) {
        self.emit(Delta::ToolCall { index: self.calls, id: call_id(), name });
        self.calls += 1;
    }

    fn begin_body(&mut self, call: PendingCall) -> StepResult {
        self.to(ParserState::Body { call, stray: false })
    }

    fn body(&mut self, mut call: PendingCall, stray: bool, end: InputEnd) -> StepResult {
        let last = end != InputEnd::MoreToCome;
        if stray {
            self.take_content(self.rest().len() - self.rest().trim_start().len());
        } else {
            self.skip_space();
        }
        let rest = self.rest();
        match tag_at(rest) {
            TagAt::Unfinished if !last => self.wait(ParserState::Body { call, stray }),
            TagAt::Unfinished if end == InputEnd::Truncated => {
                // Clients read empty arguments as a call without arguments. The opening brace makes the arguments invalid
                // JSON instead.
                self.end_argument(&mut call);
                self.arguments(if call.seen.is_empty() { "{" } else { "" }.into());
                self.drop_rest()
            }
            TagAt::Unfinished => {
                self.end_call(call);
                self.drop_rest()
            }
            TagAt::Found(Tag { kind, length, is_exact }) => match kind {
                TagKind::Parameter(name) if is_exact || call.knows(&name) => {
                    self.at += length;
                    self.start_argument(call, name)
                }
                // The end of a value, or a repeated tag.
                TagKind::EndParameter => self.skip_tag(call, length),
                TagKind::Function(name) if name == call.name && call.seen.is_empty() => self.skip_tag(call, length),
                TagKind::Parameter(_) => self.stray_text(call),
                TagKind::EndFunction | TagKind::EndToolCall | TagKind::ToolCall | TagKind::Function(_) => {
                    self.end_call(call);
                    self.to(ParserState::Closing { in_call: true })
                }
            },
            TagAt::Other if call.seen.is_empty() && !stray => self.json_body(call, end),
            TagAt::Other => self.stray_text(call),
        }
    }

    /// Reads arguments that are written as one JSON object.
    fn json_body(&mut self, call: PendingCall, end: InputEnd) -> StepResult {
        let rest = &self.buffer[self.at..];
        let text = after_opening(rest).unwrap_or_default();
        let skip = rest.len() - text.len();
        match self.scanner.object(self.before + self.at + skip, text, end) {
            JsonAt::Found((json, length)) => {
                self.arguments(json);
                self.at += skip + length;
                self.to(ParserState::Closing { in_call: true })
            }
            JsonAt::Unfinished if end == InputEnd::MoreToCome => self.wait(ParserState::Body { call, stray: false }),
            JsonAt::Unfinished if end == InputEnd::Truncated => {
                let start = if text.is_empty() { "{" } else { text };
                self.arguments(start.to_owned());
                self.drop_rest()
            }
            JsonAt::Unfinished | JsonAt::Other => self.stray_text(call),
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
            JsonAt::Unfinished if end == InputEnd::MoreToCome => self.wait(ParserState::Closing { in_call: true }),
            JsonAt::Unfinished | JsonAt::Other => self.start_content(),
        }
    }

    fn skip_tag(&mut self, call: PendingCall, length: usize) -> StepResult {
        self.at += length;
        self.begin_body(call)
    }

    /// Emits text that belongs to no parameter as content.
    fn stray_text(&mut self, mut call: PendingCall) -> StepResult {
        self.end_argument(&mut call);
        let rest = self.rest();
        let first = rest.chars().next().map_or(0, char::len_utf8);
        self.take_content(rest[first..].find('<').map_or(rest.len(), |at| first + at));
        self.to(ParserState::Body { call, stray: true })
    }

    fn start_argument(&mut self, mut call: PendingCall, name: String) -> StepResult {
        if let Some(argument) = call.empty.take_if(|argument| argument.name == name) {
            return self.to(ParserState::Argument { call, argument, scanner: None });
        }
        self.end_argument(&mut call);
        let types = self.tools.types(&call.name, &name);
        let (argument, json) = PendingArgument::new(name.clone(), types, &call);
        self.arguments(json);
        call.seen.push(name);
        self.to(ParserState::Argument { call, argument, scanner: None })
    }

    /// Ends the last argument, if that has not been done because its value is empty.
    fn end_argument(&mut self, call: &mut PendingCall) {
        if let Some(argument) = call.empty.take() {
            self.arguments(argument.finish());
        }
    }

    fn argument(
        &mut self,
        mut call: PendingCall,
        mut argument: PendingArgument,
        scanner: Option<Box<ValueScanner>>,
        end: InputEnd,
    ) -> StepResult {
        let Some(mut scanner) = scanner.or_else(|| self.start_value(end)) else {
            return self.wait(ParserState::Argument { call, argument, scanner: None });
        };
        let context = ValueContext { call: &call, argument: &argument, tools: &self.tools };
        let ValuePart { mut value, end: value_end } = scanner.scan(self.rest(), end, &context);
        if end == InputEnd::Complete
            && let Some(at) = unfinished_tag(&self.rest()[..value])
            && argument.has_other_type(&self.rest()[..at])
        {
            value = at;
        }
        let json = argument.push(&self.rest()[..value]);
        self.arguments(json);
        let Some(value_end) = value_end else {
            self.at += value;
            scanner.consume(value);
            return match end {
                InputEnd::Truncated => self.drop_rest(),
                _ => self.wait(ParserState::Argument { call, argument, scanner: Some(scanner) }),
            };
        };
        self.at += value_end;
        if scanner.is_empty_before(value) {
            call.empty = Some(argument);
        } else {
            self.arguments(argument.finish());
        }
        self.begin_body(call)
    }

    /// Skips the line end before a value. `None` if more text decides whether there is one.
    fn start_value(&mut self, end: InputEnd) -> Option<Box<ValueScanner>> {
        let rest = self.rest();
        if end == InputEnd::MoreToCome && ["", "\r"].contains(&rest) {
            return None;
        }
        let line_end = ["\r\n", "\n"].into_iter().find(|line_end| rest.starts_with(line_end)).unwrap_or_default();
        self.at += line_end.len();
        Some(Box::new(ValueScanner::new(line_end)))
    }

    /// Closes a call's arguments.
    fn end_call(&mut self, mut call: PendingCall) {
        self.end_argument(&mut call);
        self.arguments(if call.seen.is_empty() { "{}" } else { "}" }.into());
    }

    /// Drops closing tags after a call.
    fn closing(&mut self, in_call: bool, end: InputEnd) -> StepResult {
        let after = after_gap(self.rest()).unwrap_or_default();
        let is_extra = |c: char| in_call && (c.is_whitespace() || "}],`".contains(c));
        let next = after.trim_start_matches(is_extra);
        let extra = &after[..after.len() - next.len()];
        let skip = self.rest().len() - next.len();
        match tag_at(next) {
            _ if skip > MAX_GAP => self.start_content(),
            TagAt::Found(Tag { kind: TagKind::Function(name), length, is_exact })
                if in_call && extra.is_empty() && (is_exact || self.tools.has(&name)) =>
            {
                self.at += skip;
                self.start_call(name, length, false)
            }
            TagAt::Found(Tag { kind, length, .. }) if kind.closes() => {
                self.at += skip + length;
                self.to(ParserState::Closing { in_call: in_call && kind != TagKind::EndToolCall })
            }
            TagAt::Unfinished if end == InputEnd::MoreToCome => self.wait(ParserState::Closing { in_call }),
            TagAt::Unfinished if end == InputEnd::Truncated || next.is_empty() || next.starts_with("</") => {
                self.drop_rest()
            }
            TagAt::Other if in_call && !extra.contains('`') => self.json_calls(skip, end),
            _ => self.start_content(),
        }
    }

    fn start_content(&mut self) -> StepResult {
        self.prose = Prose::default();
        self.to(ParserState::Content)
    }
}

/// Offset of the tag that `text` ends in the middle of.
fn unfinished_tag(text: &str) -> Option<usize> {
    text.rfind('<').filter(|&at| matches!(tag_at(&text[at..]), TagAt::Unfinished))
}

#[cfg(test)]
mod tests;
