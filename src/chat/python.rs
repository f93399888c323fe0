//! Values in Python's notation. A template's prompt is what the model was trained on to the byte, and it was trained on the
//! text that Python's `str` and `json.dumps` gave.

use super::bounds::Text;
use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};
use std::fmt::{self, Write as _};

/// `repr` of a Python float: the shortest digits that read back as the same number, with an exponent from 1e16 on and
/// below 1e-4.
pub(super) fn float(x: f64) -> String {
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

/// The number a value holds, if it is a float (an integer is not).
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// Writes `str(value)`. Minijinja already writes `True`, `None` and containers as Python does; floats it does not.
pub(super) fn write(out: &mut impl fmt::Write, value: &Value) -> fmt::Result {
    match as_float(value) {
        Some(x) => out.write_str(&float(x)),
        None => write!(out, "{value}"),
    }
}

/// The arguments of `json.dumps` that templates may give.
struct Dumps {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ascii: bool,
    sort_keys: bool,
}

/// The `tojson` filter as transformers defines it: `json.dumps(x, ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`, nothing escaped for HTML.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    // Each may be given by position or by name (the last one only by name: minijinja counts to five).
    let given = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let value = if positional.is_some() { positional } else { kwargs.get::<Option<Value>>(name)? };
        Ok(value.filter(|v| !v.is_none()))
    };
    let ascii = given(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match given(indent, "indent")? {
        None => None,
        Some(v) if v.kind() == ValueKind::Bool => Some(" ".repeat(usize::from(v.is_true()))),
        Some(v) => match (v.as_str(), v.as_i64()) {
            (Some(text), _) => Some(text.to_string()),
            (None, Some(width)) => Some(" ".repeat(usize::try_from(width.clamp(0, 64)).unwrap_or(0))),
            (None, None) => return Err(invalid("tojson: indent must be an integer or a string")),
        },
    };
    let separators: Option<(String, String)> = match given(separators, "separators")? {
        None => None,
        Some(pair) => Some((pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())),
    };
    let sort_keys = given(None, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (if indent.is_some() { ",".into() } else { ", ".into() }, ": ".into()));
    let dumps = Dumps { indent, item_separator, key_separator, ascii, sort_keys };
    let mut out = Text::default();
    dumps.write(&mut out, value, 0)?;
    out.made()
}

/// Deeper values than this cannot come from parsed JSON, only from a template that nests them in a loop.
const DEEPEST: usize = 256;

impl Dumps {
    fn write(&self, out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        out.check()?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push_str("[");
                let mut empty = true;
                for item in value.try_iter()? {
                    self.separate(out, empty, depth + 1);
                    empty = false;
                    self.write(out, &item, depth + 1)?;
                }
                self.close(out, empty, depth, "]");
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push_str("{");
                for (i, key) in keys.iter().enumerate() {
                    self.separate(out, i == 0, depth + 1);
                    match key.kind() {
                        ValueKind::None => self.text(out, "null"),
                        ValueKind::Bool => self.text(out, if key.is_true() { "true" } else { "false" }),
                        ValueKind::Number => self.text(out, &number(key)),
                        ValueKind::String => self.text(out, key.as_str().unwrap_or_default()),
                        kind => return Err(invalid(format!("tojson: keys must be strings, not {kind}"))),
                    }
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(key)?, depth + 1)?;
                }
                self.close(out, keys.is_empty(), depth, "}");
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn separate(&self, out: &mut Text, first: bool, depth: usize) {
        if !first {
            out.push_str(&self.item_separator);
        }
        self.line(out, depth);
    }

    fn close(&self, out: &mut Text, empty: bool, depth: usize, bracket: &str) {
        if !empty {
            self.line(out, depth);
        }
        out.push_str(bracket);
    }

    fn line(&self, out: &mut Text, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push_str("\n");
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn text(&self, out: &mut Text, text: &str) {
        out.push_str("\"");
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Too much is found at the end.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push_str(c.encode_utf8(&mut [0; 4])),
            }
        }
        out.push_str("\"");
    }
}

/// Python's `json` writes floats by their `repr`, except for the three that JSON does not have.
fn number(value: &Value) -> String {
    match as_float(value) {
        Some(x) if x.is_nan() => "NaN".into(),
        Some(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Some(x) => float(x),
        None => value.to_string(),
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (x, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (1.5, "1.5"),
            (0.1 + 0.2, "0.30000000000000004"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.2345678e22, "1.2345678e+22"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.5e-7, "-1.5e-07"),
            (1e300, "1e+300"),
            (123456789.125, "123456789.125"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float(x), text);
        }
    }
}
