//! Python's methods, where minijinja's own differ or are missing. The rest falls through to `pycompat`.

use super::bounds;
use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Tuple, ValueKind, from_args},
};

/// Calls `value.method(args)` as Python would.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    bounds::method(value, method, args)?;
    let result = of_value(state, value, method, args)?;
    bounds::result(value, &result)?;
    Ok(result)
}

fn of_value(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = of_string(text, method, args)?
    {
        return Ok(result);
    }
    if value.kind() == ValueKind::Seq && method == "index" {
        let (what,): (&Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|item| item == *what);
        return Ok(Value::from(
            at.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the value is not in the list"))?,
        ));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `str.isspace` of one character: Unicode's white space and the four separators U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `text.strip(chars)`, at the start, the end or both.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let drop = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(drop) } else { text };
    if end { text.trim_end_matches(drop) } else { text }
}

fn of_string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let (sep, most): (Option<&str>, Option<i64>) = from_args(args)?;
            let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            split(text, sep, most, method == "rsplit")?.into_iter().collect()
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            lines(text, keep.unwrap_or(false)).into_iter().collect()
        }
        "partition" | "rpartition" => {
            let (sep,): (&str,) = from_args(args)?;
            not_empty(sep)?;
            let cut = if method == "partition" { text.split_once(sep) } else { text.rsplit_once(sep) };
            let parts = match cut {
                Some((before, after)) => [before, sep, after],
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
            let (what,): (&str,) = from_args(args)?;
            let at = text.find(what).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
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

/// Python's `str.title`: a capital after every character that is no letter.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase));
        }
        inside = c.is_alphabetic();
    }
    out
}

fn not_empty(sep: &str) -> Result<(), Error> {
    if sep.is_empty() { Err(Error::new(ErrorKind::InvalidOperation, "empty separator")) } else { Ok(()) }
}

/// At most `most` cuts, counted from the end if `from_end`.
fn split<'a>(text: &'a str, sep: Option<&str>, most: usize, from_end: bool) -> Result<Vec<&'a str>, Error> {
    let limit = most.saturating_add(1);
    let mut parts: Vec<&str> = match sep {
        Some(sep) => {
            not_empty(sep)?;
            if from_end { text.rsplitn(limit, sep).collect() } else { text.splitn(limit, sep).collect() }
        }
        // Runs of white space separate, and there are no empty parts; the uncut rest keeps its inner white space.
        None => {
            let mut parts = Vec::new();
            let mut rest = strip(text, None, true, true);
            while !rest.is_empty() {
                let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut.filter(|_| parts.len() < most) else {
                    parts.push(rest);
                    break;
                };
                let (before, after) = (&rest[..at], rest[at..].trim_start_matches(is_space));
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

/// `text.splitlines(keep)`, with all of Python's line boundaries.
fn lines(text: &str, keep: bool) -> Vec<&str> {
    let boundary = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut parts = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(boundary).unwrap_or(rest.len());
        let tail = &rest[end..];
        let width = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(0, char::len_utf8) };
        parts.push(&rest[..if keep { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_as_python_does() {
        let check = |text, sep, most, from_end, parts: &[&str]| {
            assert_eq!(split(text, sep, most, from_end).unwrap(), parts, "{text:?} {sep:?} {most} {from_end}");
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
    fn knows_every_line_boundary() {
        assert_eq!(lines("a\r\nb\u{85}\u{2028}c\n", false), ["a", "b", "", "c"]);
        assert_eq!(lines("a\r\nb", true), ["a\r\n", "b"]);
        assert!(lines("", true).is_empty());
    }
}
