//! Outside of tool calls: reasoning, content, and where a call begins.

use super::{Delta, End, Parser, State, Step, tags::*};

impl Parser {
    pub(super) fn start(&mut self, reasoning: bool, last: bool) -> Step {
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

    pub(super) fn newlines(&mut self, reasoning: bool) -> Step {
        self.at += self.rest().len() - self.rest().trim_start_matches('\n').len();
        if self.rest().is_empty() {
            self.wait(State::Newlines { reasoning })
        } else {
            self.to(if reasoning { State::Reasoning } else { State::Content })
        }
    }

    pub(super) fn reasoning(&mut self, end: End) -> Step {
        let last = end != End::Open;
        let rest = self.rest();
        let thought = rest.find(THOUGHT);
        let before = &rest[..thought.unwrap_or(rest.len())];
        let (stop, call) = match self.call_in(rest, before.len()) {
            Some((at, true)) => (Some(at), true),
            // It may become a call.
            Some((at, false)) if end != End::Said => (Some(at), false),
            _ => (None, false),
        };
        if let Some(at) = stop {
            let sure = before[..at].trim_end_matches('\n').len();
            let text = self.take(sure);
            self.emit(Delta::Reasoning(text));
            self.implied = call;
            return match end {
                _ if call => self.to(State::Opening),
                End::Cut => self.drop_rest(),
                _ => self.wait(State::Reasoning),
            };
        }
        let held = if last { 0 } else { partial(before, THOUGHT).max(self.partial_call(before)) };
        let sure = match thought {
            None if last => before.len(),
            None => before[..before.len() - held].trim_end_matches('\n').len(),
            Some(_) => before.trim_end_matches('\n').len(),
        };
        let skipped = thought.map_or(0, |thought| thought + THOUGHT.len() - sure);
        let text = self.take(sure);
        self.emit(Delta::Reasoning(text));
        self.at += skipped;
        if thought.is_some() { self.to(State::Newlines { reasoning: false }) } else { self.wait(State::Reasoning) }
    }

    /// The first `<tool_call>` in `text`, before `end`, that begins a call of a known tool, or (`false`) may still do so.
    pub(super) fn call_in(&self, text: &str, end: usize) -> Option<(usize, bool)> {
        let names = || self.tools.iter().filter_map(|tool| tool.get("function").unwrap_or(tool).get("name")?.as_str());
        let mut calls = if self.tools.is_empty() { None } else { Some(text[..end].match_indices(CALL)) };
        calls.iter_mut().flatten().find_map(|(at, _)| match header(text[at + CALL.len()..].trim_start(), FUNCTION) {
            Header::Named(name, _) => names().any(|known| known == name).then_some((at, true)),
            Header::Unfinished => Some((at, false)),
            Header::Other => None,
        })
    }

    pub(super) fn partial_call(&self, text: &str) -> usize {
        if self.tools.is_empty() { 0 } else { partial(text, CALL) }
    }

    pub(super) fn content(&mut self, end: End) -> Step {
        let last = end != End::Open;
        if self.implied {
            let (rest, text) = (self.rest(), self.rest().trim_start());
            if text.starts_with(THOUGHT) {
                self.at += rest.len() - text.len() + THOUGHT.len();
                self.implied = false;
                return self.to(State::Newlines { reasoning: false });
            } else if !last && THOUGHT.starts_with(text) {
                return self.wait(State::Content);
            }
            self.implied = false;
        }
        let rest = self.rest();
        let call = if self.tools.is_empty() { None } else { rest.find(CALL) };
        let sure = match call {
            Some(at) => rest[..at].trim_end().len(),
            None if self.tools.is_empty() => rest.len(),
            // White space after a call's end is layout, and so is the beginning of another call.
            None if end == End::Cut && self.calls > 0 => rest[..rest.len() - partial(rest, CALL)].trim_end().len(),
            None if last && self.calls > 0 && rest.trim().is_empty() => 0,
            None if last => rest.len(),
            None => rest[..rest.len() - partial(rest, CALL)].trim_end().len(),
        };
        self.say(sure);
        if call.is_some() { self.to(State::Opening) } else { self.wait(State::Content) }
    }

    pub(super) fn opening(&mut self, end: End) -> Step {
        let rest = self.rest();
        let tag = rest.len() - rest.trim_start().len() + CALL.len();
        let after = rest[tag..].trim_start();
        let skip = rest.len() - after.len();
        match header(after, FUNCTION) {
            Header::Named(name, length) => self.begin(name, skip + length),
            Header::Unfinished if end == End::Open => self.wait(State::Opening),
            Header::Unfinished if end == End::Cut => self.drop_rest(),
            // Not a call after all.
            _ => {
                self.say(tag);
                self.to(State::Content)
            }
        }
    }
}
