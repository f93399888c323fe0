//! Calls that a model writes as JSON, or as a Python literal, between the tags of a call: `{"name": NAME, "arguments": {}}`.

use super::{
    declared::Tools,
    python,
    tags::{END_THINK, InputEnd, MAX_READ_AGAIN, Reading, TagAt, TagKind, tag_at},
};
use crate::json_repair;
use serde::de::IgnoredAny;
use serde_json::{Deserializer, Value};
use std::collections::BTreeSet;

/// The names of arguments, as JSON.
const ARGUMENTS: [&str; 3] = ["\"arguments\"", "\"parameters\"", "\"input\""];

/// A call with its arguments, a JSON object in the model's spelling.
pub(super) struct JsonCall {
    pub name: String,
    pub arguments: String,
}

/// JSON in streamed text: what it means, and its length.
pub(super) type JsonAt<T> = Reading<(T, usize)>;

/// Finds the end of an object or array in streamed text. Each character is read once.
#[derive(Default)]
pub(super) struct JsonScanner {
    /// Offset of the object or array in the whole answer.
    offset: usize,
    position: usize,
    /// Number of bytes read at earlier offsets.
    read_before: usize,
    /// The brackets that are still to come, the last one first.
    closing: Vec<char>,
    quote: Option<char>,
    is_escaped: bool,
}

impl JsonScanner {
    /// Reads the calls at the start of `text`, at `offset` of the whole answer.
    pub fn calls(&mut self, offset: usize, text: &str, end: InputEnd, tools: &Tools) -> JsonAt<Vec<JsonCall>> {
        match self.read(offset, text, end) {
            JsonAt::Unfinished if end == InputEnd::Truncated => {
                truncated(text, tools).map_or(JsonAt::Other, |call| JsonAt::Found((vec![call], text.len())))
            }
            json => json.and_then(|(json, length)| Some((calls(&json, tools)?, length))),
        }
    }

    /// Reads the object at the start of `text`, at `offset` of the whole answer.
    pub fn object(&mut self, offset: usize, text: &str, end: InputEnd) -> JsonAt<String> {
        self.read(offset, text, end).and_then(|(json, length)| Some((object(&json)?, length)))
    }

    /// Reads the object or array at the start of `text`. It also ends at a tag of a call or at the end of the answer.
    /// Missing brackets are added.
    fn read(&mut self, offset: usize, text: &str, end: InputEnd) -> JsonAt<String> {
        if self.offset != offset {
            *self = Self { offset, read_before: self.read_before + self.position, ..Self::default() };
        }
        while self.position == 0 || !self.closing.is_empty() {
            if self.read_before > offset + MAX_READ_AGAIN {
                return JsonAt::Other;
            }
            let rest = &text[self.position..];
            let Some(c) = rest.chars().next() else {
                if end == InputEnd::Complete && self.position > 0 && self.quote.is_none() {
                    break;
                }
                return JsonAt::Unfinished;
            };
            match (self.quote, c) {
                (None, '<') => match tag_at(rest) {
                    TagAt::Found(tag) if tag.kind.closes() || tag.kind == TagKind::ToolCall => break,
                    TagAt::Other if rest.starts_with(END_THINK) => break,
                    TagAt::Unfinished if end == InputEnd::MoreToCome => return JsonAt::Unfinished,
                    _ => return JsonAt::Other,
                },
                // The end of a Markdown fence.
                (None, '`') if self.position > 0 => break,
                _ if !self.push(c) => return JsonAt::Other,
                _ => {}
            }
            self.position += c.len_utf8();
        }
        let missing = self.closing.iter().rev();
        JsonAt::Found((text[..self.position].chars().chain(missing.copied()).collect(), self.position))
    }

    /// Returns false if no JSON continues with `c`.
    fn push(&mut self, c: char) -> bool {
        let is_escaped = std::mem::take(&mut self.is_escaped);
        match (self.quote, c) {
            (Some(_), _) if is_escaped => {}
            (Some(_), '\\') => self.is_escaped = true,
            (Some(quote), _) if quote == c => self.quote = None,
            (Some(_), _) => {}
            (None, '{') => self.closing.push('}'),
            (None, '[') => self.closing.push(']'),
            (None, '}' | ']') => return self.closing.pop() == Some(c),
            (None, '"' | '\'') => self.quote = Some(c),
            (None, _) => return self.position > 0,
        }
        true
    }
}

/// The object or array at the start of `text`, without further closing brackets. `None` if other text follows.
pub(super) fn without_extra_brackets(text: &str) -> Option<&str> {
    let mut scanner = JsonScanner::default();
    for c in text.chars() {
        if !scanner.push(c) {
            return None;
        }
        scanner.position += c.len_utf8();
        if scanner.closing.is_empty() {
            break;
        }
    }
    let (json, rest) = text.split_at(scanner.position);
    rest.trim_end_matches(|c: char| c.is_whitespace() || "}]".contains(c)).is_empty().then_some(json)
}

/// The calls in an object or in an array of objects. `None` for any other JSON and for calls of unknown tools.
fn calls(json: &str, tools: &Tools) -> Option<Vec<JsonCall>> {
    // Models also write the tag of a call as the first member.
    let with_tag = || normalized(&format!("{{\"name\": \"{}", json.strip_prefix("{\"function=")?));
    let json = normalized(json).or_else(with_tag)?;
    let calls = if json.starts_with('[') { parts(&json).0 } else { vec![&*json] };
    let calls: Vec<_> = calls.into_iter().map(|call| read_call(call, tools)).collect::<Option<_>>()?;
    (!calls.is_empty()).then_some(calls)
}

/// An object as valid JSON. Models also write it in a JSON string.
fn object(text: &str) -> Option<String> {
    let inner = serde_json::from_str::<String>(text).ok();
    normalized(inner.as_deref().unwrap_or(text).trim()).filter(|json| json.starts_with('{'))
}

/// The call that the token limit cut. Its arguments are invalid JSON.
fn truncated(text: &str, tools: &Tools) -> Option<JsonCall> {
    let (members, rest) = parts(text.strip_prefix('{').and(Some(text))?);
    let name = name(&members, tools)?;
    let is_last = members.len() % 2 == 1 && ARGUMENTS.contains(members.last()?) && rest.starts_with('{');
    let whole = member(&members, &ARGUMENTS).and_then(|arguments| arguments.strip_suffix('}'));
    let arguments = if is_last { rest } else { whole.unwrap_or("{") };
    Some(JsonCall { name, arguments: arguments.to_owned() })
}

fn read_call(json: &str, tools: &Tools) -> Option<JsonCall> {
    let (members, _) = parts(json.strip_prefix('{').and(Some(json))?);
    if let Some(function) = member(&members, &["\"function\""]).filter(|function| function.starts_with('{')) {
        return read_call(function, tools);
    }
    let arguments = match member(&members, &ARGUMENTS) {
        Some("null" | "\"\"") => "{}".into(),
        Some(arguments) => object(arguments)?,
        // Other members could be the arguments.
        None if members.len() > 2 => return None,
        None => "{}".into(),
    };
    Some(JsonCall { name: name(&members, tools)?, arguments })
}

/// The arguments in `json` if it is a whole call of the tool `name`: only members of a call, and none of `parameters`,
/// those of the tool.
pub(super) fn wrapped_arguments(
    json: &str,
    name: &str,
    parameters: &BTreeSet<String>,
    tools: &Tools,
) -> Option<String> {
    let members = parts(json).0;
    let is_of_call = |key: &&str| {
        let is_named = ["\"id\"", "\"type\"", "\"name\"", "\"function\""].contains(key) || ARGUMENTS.contains(key);
        is_named && !parameters.contains(key.trim_matches('"'))
    };
    let is_whole = members.len() >= 4 && members.iter().step_by(2).all(is_of_call);
    let whole = calls(json, tools).filter(|_| is_whole)?.pop();
    whole.filter(|whole| whole.name == name).map(|whole| whole.arguments)
}

/// The name of a known tool.
fn name(members: &[&str], tools: &Tools) -> Option<String> {
    let name = serde_json::from_str(member(members, &["\"name\"", "\"function\""])?).ok();
    name.filter(|name: &String| tools.has(name))
}

/// The first value with one of these names.
fn member<'a>(members: &[&'a str], names: &[&str]) -> Option<&'a str> {
    members.chunks_exact(2).find(|pair| names.contains(&pair[0])).map(|pair| pair[1])
}

/// `text` if it is JSON, or as JSON if it is a Python literal.
fn normalized(text: &str) -> Option<String> {
    let is_json = |json: &String| serde_json::from_str::<Value>(&json_repair::repair(json)).is_ok();
    Some(text.to_owned()).filter(is_json).or_else(|| python::to_json(text).filter(is_json))
}

/// The items of an array, or the names and values of an object, and the text after the last one.
fn parts(json: &str) -> (Vec<&str>, &str) {
    let mut parts = Vec::new();
    let mut rest = json.get(1..).unwrap_or_default();
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',' || c == ':');
        let mut values = Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        let Some(Ok(_)) = values.next() else { return (parts, rest) };
        let (part, after) = rest.split_at(values.byte_offset());
        parts.push(part);
        rest = after;
    }
}
