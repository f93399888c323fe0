//! Inside a tool call: its parameters and its end.

use super::{
    Delta, End, Parser, State, Step,
    call::{Argument, Call, call_id},
    schema::Types,
    tags::*,
};
use serde_json::Value;

impl Parser {
    /// Begins a call, whose header takes `length` bytes.
    pub(super) fn begin(&mut self, name: String, length: usize) -> Step {
        self.at += length;
        self.emit(Delta::ToolCall { index: self.calls, id: call_id(), name: name.clone() });
        self.calls += 1;
        self.to(State::Body { call: Call { name, parameters: 0 }, stray: false })
    }

    pub(super) fn body(&mut self, call: Call, stray: bool, end: End) -> Step {
        let last = end != End::Open;
        if stray {
            self.say(self.rest().len() - self.rest().trim_start().len());
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
        if rest.is_empty() && end == End::Cut {
            // Clients read an empty text as no arguments: the brace keeps it invalid.
            self.arguments(if call.parameters == 0 { "{" } else { "" }.into());
            self.drop_rest()
        } else if rest.is_empty() || rest.starts_with(FUNCTION_END) {
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
            self.say(rest[first..].find('<').map_or(rest.len(), |at| first + at));
            self.to(State::Body { call, stray: true })
        }
    }

    pub(super) fn begin_argument(&mut self, mut call: Call, name: &str) -> Step {
        let opening = if call.parameters == 0 { '{' } else { ',' };
        call.parameters += 1;
        let (argument, start) = Argument::new(Types::of(&self.tools, &call.name, name));
        self.arguments(format!("{opening}{}:{start}", Value::from(name)));
        self.to(State::Argument { call, argument })
    }

    pub(super) fn argument(&mut self, call: Call, mut argument: Argument, end: End) -> Step {
        if !argument.begun {
            if self.rest().is_empty() && end == End::Open {
                return self.wait(State::Argument { call, argument });
            }
            argument.begun = true;
            self.at += usize::from(self.rest().starts_with('\n'));
        }
        let rest = self.rest();
        let (value, close) = match find_end(rest, end == End::Said) {
            ValueEnd::At(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), Some(at + PARAMETER_END.len())),
            ValueEnd::NotBefore(at) => (rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]), None),
            ValueEnd::Cut => (rest, Some(rest.len())),
        };
        let length = value.len();
        let mut json = argument.push(value);
        self.at += close.unwrap_or(length);
        if close.is_some() {
            json += &argument.finish();
        }
        self.arguments(json);
        match close {
            Some(_) => self.to(State::Body { call, stray: false }),
            None if end == End::Cut => self.drop_rest(),
            None => self.wait(State::Argument { call, argument }),
        }
    }

    /// Closes a call's arguments.
    pub(super) fn end(&mut self, call: &Call) {
        self.arguments(if call.parameters == 0 { "{}" } else { "}" }.into());
    }

    pub(super) fn closing(&mut self, end: End) -> Step {
        let rest = self.rest();
        let after = rest.trim_start();
        let skip = rest.len() - after.len();
        if after.starts_with(CALL_END) {
            self.at += skip + CALL_END.len();
            return self.to(State::Content);
        }
        match header(after, FUNCTION) {
            Header::Named(name, length) => return self.begin(name, skip + length),
            Header::Unfinished if end == End::Open => return self.wait(State::Closing),
            Header::Unfinished if end == End::Cut => return self.drop_rest(),
            _ => {}
        }
        if CALL_END.starts_with(after) {
            if end == End::Open {
                return self.wait(State::Closing);
            }
            self.at = self.buffer.len();
        }
        self.to(State::Content)
    }
}
