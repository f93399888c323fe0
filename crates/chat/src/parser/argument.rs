//! A tool call whose text is still being streamed: its id, and its arguments written as JSON.

use super::{
    json_types::{is_nested, is_string_from, to_json},
    tags::{Tag, TagKind},
};
use crate::schema::ValueType;
use serde_json::{Map, Value};
use std::{
    collections::BTreeSet,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Names of a tag around all arguments.
const WRAPPERS: [&str; 5] = ["arguments", "parameters", "params", "input", "args"];

/// The call that is being parsed.
#[derive(Default)]
pub(super) struct PendingCall {
    /// The function's name.
    pub name: String,
    /// Names of the tool's parameters. Empty if its schema names none.
    pub parameters: Arc<BTreeSet<String>>,
    /// Names of the parameters so far.
    pub seen: BTreeSet<String>,
    /// The last argument, if it has not ended yet.
    pub argument: Option<PendingArgument>,
    /// True if a grammar constrains the call.
    pub is_exact: bool,
    /// True if a parameter had its name as its tag.
    pub has_names: bool,
    /// True inside text that does not belong to a parameter.
    pub is_stray: bool,
}

impl PendingCall {
    /// True if the tool has a parameter `name`.
    pub fn knows(&self, name: &str) -> bool {
        self.parameters.is_empty() || self.parameters.contains(name)
    }

    /// True if a first parameter `name`, which the tool does not have, may contain all arguments.
    pub fn may_wrap(&self, name: &str) -> bool {
        WRAPPERS.contains(&name) && !self.is_exact && self.seen.is_empty() && !self.parameters.contains(name)
    }

    /// The parameter of a tool that has one, before the first parameter of the call.
    pub fn only_parameter(&self) -> Option<&String> {
        self.parameters.first().filter(|_| self.parameters.len() == 1 && self.seen.is_empty())
    }

    /// True if the last argument has its own name as its tag.
    pub fn is_named(&self) -> bool {
        self.argument.as_ref().is_some_and(|argument| argument.is_named)
    }

    /// The names that may be tags outside of a value: `<NAME>`, or `</NAME>` if `closes` is true.
    pub fn tag_names(&self, closes: bool) -> impl Iterator<Item = &str> {
        let wraps = !self.name.is_empty() && (closes || self.seen.is_empty());
        let own = self.argument.as_ref().filter(|_| closes).map(|argument| &argument.name);
        let all = own.is_none().then(|| self.parameters.iter().chain(&self.seen)).into_iter().flatten();
        let names = own.into_iter().chain(all).chain(closes.then_some(&self.name)).map(String::as_str);
        names.chain(WRAPPERS.into_iter().filter(move |_| wraps)).filter(|_| !self.is_stray)
    }

    /// True if `json`, an object, has arguments of the tool only.
    pub fn has_all(&self, json: &str) -> bool {
        let arguments: Option<Map<String, Value>> = serde_json::from_str(json).ok();
        arguments.is_some_and(|arguments| arguments.keys().all(|name| self.parameters.contains(name)))
    }

    /// True if `tag` starts a parameter of the tool that the call does not have yet.
    pub fn lacks(&self, tag: &Tag) -> bool {
        matches!(&tag.kind, TagKind::Parameter(name) if tag.is_exact && self.lacks_name(name))
    }

    /// True if the tool has a parameter `name` that the call does not have yet.
    pub fn lacks_name(&self, name: &str) -> bool {
        self.knows(name) && !self.seen.contains(name)
    }

    /// True for the tag that started the last argument.
    pub fn is_own(&self, kind: &TagKind) -> bool {
        matches!((kind, &self.argument), (TagKind::Parameter(name), Some(own)) if *name == own.name)
    }
}

/// The argument that is being parsed. A string is written while it streams. A value of another type is written only
/// when it is complete, because an incomplete value cannot be checked.
pub(super) struct PendingArgument {
    pub name: String,
    /// The values that the schema allows.
    allowed: ValueType,
    /// Text that is not written yet. `None` while a string is being written.
    held: Option<String>,
    /// Number of bytes of white space that `held` starts with.
    blank: usize,
    /// True if the call already has this parameter. Nothing is written then.
    is_ignored: bool,
    /// True if the tags of the parameter are `<NAME>` and `</NAME>`.
    pub is_named: bool,
}

impl PendingArgument {
    /// Returns the next argument of `call` and the start of its JSON.
    pub fn new(name: String, allowed: ValueType, call: &PendingCall, is_named: bool) -> (Self, String) {
        let is_string = allowed.others.is_empty();
        let is_ignored = call.seen.contains(&name);
        let json = if is_ignored {
            String::new()
        } else {
            let opening = if call.seen.is_empty() { '{' } else { ',' };
            format!("{opening}{}:{}", Value::from(name.as_str()), if is_string { "\"" } else { "" })
        };
        (Self { name, allowed, held: (!is_string).then(String::new), blank: 0, is_ignored, is_named }, json)
    }

    /// True if the value that ends with `text` has a type other than a string.
    pub fn has_other_type(&self, text: &str) -> bool {
        self.held.as_ref().is_some_and(|held| !to_json(&self.allowed, &format!("{held}{text}")).starts_with('"'))
    }

    /// True if no tag can be a part of the value that ends with `text`: it is complete JSON, or empty, and no string is
    /// allowed.
    pub fn is_complete(&self, text: &str) -> bool {
        let is_empty = self.is_blank() && text.trim().is_empty();
        !self.allowed.has_strings() && (is_empty || self.has_other_type(text))
    }

    /// True if the value that starts with `text` is an array or an object, whose strings may have any text.
    pub fn is_nested(&self, text: &str) -> bool {
        let start = |held: &String| is_nested(&self.allowed, if self.is_blank() { text } else { &held[self.blank..] });
        self.held.as_ref().is_some_and(start)
    }

    fn is_blank(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.len() == self.blank)
    }

    /// Takes the next piece of the value and returns the JSON that can be written.
    pub fn push(&mut self, text: &str) -> String {
        let is_blank = self.is_blank();
        let more = text.trim_start();
        // The value of an ignored argument also has an end.
        let Some(held) = &mut self.held else {
            return if self.is_ignored { String::new() } else { escaped(text) };
        };
        held.push_str(text);
        self.blank += if is_blank { text.len() - more.len() } else { 0 };
        // White space decides nothing.
        if self.is_ignored || more.is_empty() || !is_string_from(&self.allowed, &held[self.blank..]) {
            return String::new();
        }
        let json = format!("\"{}", escaped(held));
        self.held = None;
        json
    }

    /// Ends the value and returns the part of its JSON that has not been written.
    pub fn finish(&self) -> String {
        if self.is_ignored {
            return String::new();
        }
        self.held.as_ref().map_or_else(|| "\"".into(), |text| to_json(&self.allowed, text))
    }
}

/// The text of a JSON string without its quotes. Pieces of a string can be escaped separately, because JSON escapes
/// each character independently of the others.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().into()
}

/// `call_` and 24 hexadecimal digits. A counter makes ids unique in this process. The random keys of the standard library's
/// hasher make ids of different processes differ.
pub(super) fn call_id() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let [one, two] = [0, 1].map(|part| RandomState::new().hash_one((count, part)));
    format!("call_{one:016x}{:08x}", two as u32)
}
