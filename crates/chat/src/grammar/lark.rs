//! Limits on a client's regular expression or Lark grammar. Both are checked before llguidance compiles them.
//!
//! Each intersection (`&`) or complement (`~`) multiplies the size of a terminal's automaton. llguidance limits nested
//! brackets. It follows rules recursively, for which the stack of the compiling thread is large enough.

use super::{format::FormatError, json_schema, look_ahead::quoted};
use serde_json::Value;

/// Maximum size of a regular expression or a grammar in bytes.
const MAX_BYTES: usize = 64 << 10;
/// Maximum number of `&` and `~` in a grammar. Thirty of them in one terminal take gigabytes.
const MAX_INTERSECTIONS: usize = 8;

/// Checks the length of a regular expression.
///
/// # Errors
/// The expression is too long.
pub fn check_regex(text: &str) -> Result<(), FormatError> {
    let bytes = text.len();
    if bytes > MAX_BYTES {
        return Err(FormatError::new("", format!("it has {bytes} bytes; the limit is {MAX_BYTES}")));
    }
    Ok(())
}

/// Checks a Lark grammar and its embedded JSON schemas against the limits.
///
/// # Errors
/// The grammar or an embedded JSON schema is over a limit.
pub fn check_grammar(text: &str) -> Result<(), FormatError> {
    check_regex(text)?;
    let mut intersections = 0;
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => quoted(rest, '"'),
            '/' if !rest.starts_with("//") => quoted(rest, '/'),
            '/' | '#' => rest.find('\n').unwrap_or(rest.len()),
            // A special token such as `<|im_start|>`, or a reference to another grammar.
            '<' => rest.find(['>', '\n']).map_or(rest.len(), |end| end + 1),
            '%' if rest.starts_with("%json") => {
                let json = &rest["%json".len()..];
                let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
                let schema = values.next().and_then(Result::ok).unwrap_or_default();
                json_schema::prepare(&schema, false)?;
                "%json".len() + values.byte_offset()
            }
            _ => first.len_utf8(),
        };
        intersections += usize::from(matches!(first, '&' | '~'));
        if intersections > MAX_INTERSECTIONS {
            let reason = format!("it has more than {MAX_INTERSECTIONS} intersections and complements (`&`, `~`)");
            return Err(FormatError::new("", reason));
        }
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(text: &str) -> Option<String> {
        check_grammar(text).err().map(|error| error.reason)
    }

    #[test]
    fn intersections_are_bounded() {
        let intersected = |count| format!("start: T\nT: {}/a/", "/a*/ & ".repeat(count));
        assert_eq!(reason(&intersected(3)), None);
        assert!(reason(&intersected(30)).unwrap().contains("intersections"));
        assert!(reason(&format!("start: T\nT: {}/a/", "~".repeat(30))).unwrap().contains("intersections"));
        // In strings, regular expressions and comments, these characters are plain text.
        let text = format!("start: \"{0}\" /{0}/ # {0}\n// {0}", "&~([".repeat(30));
        assert_eq!(reason(&text), None);
    }

    #[test]
    fn embedded_schemas_are_checked() {
        assert!(reason("start: \"a\" %json {\"multipleOf\": 4001}").unwrap().contains("digits"));
        assert_eq!(reason("start: %json {\"type\": \"object\"} tail\ntail: \"x\""), None);
    }
}
