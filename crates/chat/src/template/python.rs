//! Python's `str`, `json.dumps` and string methods, where minijinja's functions differ or are missing.
//!
//! A model is trained on prompts that Python rendered, so a prompt must have the same bytes.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use std::fmt::{self, Write as _};

/// Python's `repr` of a float: the shortest digits that read back as the same number. Numbers from 1e16 up and numbers
/// below 1e-4 have an exponent.
fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(-4..16) => {
            let plain = x.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        Ok(exponent) => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
        Err(_) => scientific,
    }
}

/// The number in a float value. `None` for an integer.
fn as_float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// Writes `str(value)`. minijinja writes `True`, `None` and containers as Python does, but not floats.
pub(super) fn write_str(out: &mut impl fmt::Write, value: &Value) -> fmt::Result {
    match as_float(value) {
        Some(x) => out.write_str(&float_repr(x)),
        None => write!(out, "{value}"),
    }
}

/// `str(value)`.
pub(super) fn str_of(value: &Value) -> String {
    as_float(value).map_or_else(|| value.to_string(), float_repr)
}

/// Arguments of `json.dumps` that templates may pass.
struct Dumps {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The `tojson` filter as transformers defines it: `json.dumps(x, ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`. Nothing is escaped for HTML.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    // All arguments except `sort_keys` may be passed by position or by name. minijinja takes at most five parameters,
    // so `sort_keys` is accepted only by name.
    let argument = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let value = if positional.is_some() { positional } else { kwargs.get::<Option<Value>>(name)? };
        Ok(value.filter(|v| !v.is_none()))
    };
    let ensure_ascii = argument(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match argument(indent, "indent")? {
        None => None,
        Some(v) if v.kind() == ValueKind::Bool => Some(" ".repeat(usize::from(v.is_true()))),
        Some(v) => match (v.as_str(), v.as_i64()) {
            (Some(text), _) => Some(text.to_string()),
            (None, Some(width)) => Some(" ".repeat(usize::try_from(width.clamp(0, 64)).unwrap_or(0))),
            (None, None) => return Err(invalid("tojson: indent must be an integer or a string")),
        },
    };
    let separators: Option<(String, String)> = match argument(separators, "separators")? {
        None => None,
        Some(pair) => Some((pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())),
    };
    let sort_keys = argument(None, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (if indent.is_some() { ",".into() } else { ", ".into() }, ": ".into()));
    let dumps = Dumps { indent, item_separator, key_separator, ensure_ascii, sort_keys };
    let mut out = String::new();
    dumps.write(&mut out, value, 0)?;
    Ok(out)
}

/// Maximum depth of a value that `tojson` writes. Parsed JSON is never deeper, but a template can nest values in a
/// loop.
const MAX_DEPTH: usize = 256;

impl Dumps {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&json_number(value)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.separate(out, empty, depth + 1);
                    empty = false;
                    self.write(out, &item, depth + 1)?;
                }
                self.close(out, empty, depth, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    self.separate(out, i == 0, depth + 1);
                    match key.kind() {
                        ValueKind::None => self.write_string(out, "null"),
                        ValueKind::Bool => self.write_string(out, if key.is_true() { "true" } else { "false" }),
                        ValueKind::Number => self.write_string(out, &json_number(key)),
                        ValueKind::String => self.write_string(out, key.as_str().unwrap_or_default()),
                        kind => return Err(invalid(format!("tojson: keys must be strings, not {kind}"))),
                    }
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(key)?, depth + 1)?;
                }
                self.close(out, keys.is_empty(), depth, '}');
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn separate(&self, out: &mut String, first: bool, depth: usize) {
        if !first {
            out.push_str(&self.item_separator);
        }
        self.start_line(out, depth);
    }

    fn close(&self, out: &mut String, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.start_line(out, depth);
        }
        out.push(bracket);
    }

    fn start_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A number as Python's `json` writes it. Floats are written as `repr` does, except for the three values that JSON
/// lacks.
fn json_number(value: &Value) -> String {
    match as_float(value) {
        Some(x) if x.is_nan() => "NaN".into(),
        Some(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Some(x) => float_repr(x),
        None => value.to_string(),
    }
}

/// Calls `value.method(args)` as Python does. minijinja-contrib's `pycompat` has the methods that are missing here.
pub(super) fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = call_str_method(text, method, args)?
    {
        return Ok(result);
    }
    if value.kind() == ValueKind::Seq && method == "index" {
        let (item,): (&Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|other| other == *item);
        return Ok(Value::from(at.ok_or_else(|| invalid("the value is not in the list"))?));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Python's `str.isspace` of one character: Unicode's white space and the four separators U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `text.strip(chars)` at the start, at the end, or at both ends.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let drop = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(drop) } else { text };
    if end { text.trim_end_matches(drop) } else { text }
}

fn call_str_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let (separator, max): (Option<&str>, Option<i64>) = from_args(args)?;
            let max = max.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            split(text, separator, max, method == "rsplit")?.into_iter().collect()
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            split_lines(text, keep_ends.unwrap_or(false)).into_iter().collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            check_separator(separator)?;
            let cut = if method == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match cut {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let at = text.find(part).ok_or_else(|| invalid("substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap =
                |c: char| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        _ => return Ok(None),
    }))
}

/// Python's `str.title`: a capital after every character that is not a letter.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
        in_word = c.is_alphabetic();
    }
    out
}

fn check_separator(separator: &str) -> Result<(), Error> {
    if separator.is_empty() { Err(invalid("empty separator")) } else { Ok(()) }
}

/// `text.split(separator, max)`. Makes at most `max` cuts, which are counted from the end if `from_end` is true.
fn split<'a>(text: &'a str, separator: Option<&str>, max: usize, from_end: bool) -> Result<Vec<&'a str>, Error> {
    let limit = max.saturating_add(1);
    let mut parts: Vec<&str> = match separator {
        Some(separator) => {
            check_separator(separator)?;
            if from_end { text.rsplitn(limit, separator).collect() } else { text.splitn(limit, separator).collect() }
        }
        // Runs of white space separate the parts, and no part is empty. The rest after `max` cuts keeps its inner white
        // space.
        None => {
            let mut parts = Vec::new();
            let mut rest = strip(text, None, true, true);
            while !rest.is_empty() {
                let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut.filter(|_| parts.len() < max) else {
                    parts.push(rest);
                    break;
                };
                let before = &rest[..at];
                let after = rest[at..].trim_start_matches(is_space);
                parts.push(if from_end { after } else { before });
                rest = if from_end { before.trim_end_matches(is_space) } else { after };
            }
            parts
        }
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts)
}

/// `text.splitlines(keep_ends)`, with all of Python's line boundaries.
fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let boundary = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut parts = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(boundary).unwrap_or(rest.len());
        let tail = &rest[end..];
        let width = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(0, char::len_utf8) };
        parts.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    parts
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_have_python_notation() {
        let all = "0.0 -0.0 1.0 1.5 0.30000000000000004 1000000000000000.0 1e+16 1.2345678e+22 0.0001 1e-05 -1.5e-07 \
            1e+300 123456789.125 inf";
        for text in all.split(' ') {
            assert_eq!(float_repr(text.parse().unwrap()), text);
        }
    }

    #[test]
    fn split_cuts_as_python_does() {
        let check = |text, separator, max, from_end, parts: &[&str]| {
            let found = split(text, separator, max, from_end).unwrap();
            assert_eq!(found, parts, "{text:?} {separator:?} {max} {from_end}");
        };
        check(" a  b c ", None, usize::MAX, false, &["a", "b", "c"]);
        check(" a  b c ", None, 1, false, &["a", "b c"]);
        check(" a  b c ", None, 1, true, &["a  b", "c"]);
        check("", None, 1, false, &[]);
        check("a,b,c", Some(","), 1, true, &["a,b", "c"]);
        check("", Some(","), 1, false, &[""]);
        assert!(split("a", Some(""), 1, false).is_err());
    }

    #[test]
    fn split_lines_knows_every_boundary() {
        assert_eq!(split_lines("a\r\nb\u{85}\u{2028}c\n", false), ["a", "b", "", "c"]);
        assert_eq!(split_lines("a\r\nb", true), ["a\r\n", "b"]);
        assert!(split_lines("", true).is_empty());
    }
}
