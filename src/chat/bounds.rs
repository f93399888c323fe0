//! What a template may take, beside its steps: how it nests is looked at before it is parsed, since parser and compiler
//! recurse; what it makes of text is counted as it is made.
//!
//! Filters and methods that can make much of little count what they are about to make. For `~` and `+`, which minijinja
//! does not let us see, each left operand is passed through a filter, so that a text cannot double uncounted. Not counted
//! are `*`, which the library limits to 100 MB each, and plain text inside `{% set %}` and macros.

use super::python;
use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    value::{Rest, ValueKind},
};
use std::{cell::Cell, io};

/// Bytes of a template's source. Those in use have some ten thousand.
const SOURCE: usize = 1 << 20;
/// Words and signs inside one pair of `{{ }}` or `{% %}`: no expression nests deeper. Those in use have some forty.
const WORDS: usize = 2000;
/// `elif`s, each of which is nested in the one before.
const ELIFS: usize = 500;
/// Bytes of text that one rendering may make for each byte that it is given, and beside.
const FACTOR: usize = 32;
const BESIDE: usize = 16 << 20;
/// Digits of a width or precision in a format.
const DIGITS: usize = 4;
/// Rows of `slice` and `batch`.
const ROWS: usize = 100_000;

/// The filter that stands behind every left operand.
const COUNTED: &str = "counted";

thread_local! {
    /// What the rendering on this thread may still make.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Begins a rendering of `bytes` of messages and all on this thread.
pub(super) fn begin(bytes: usize) {
    LEFT.set(bytes.saturating_mul(FACTOR).saturating_add(BESIDE));
}

/// Counts `bytes` that are about to be made.
fn spend(bytes: usize) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(bytes);
    LEFT.set(left.unwrap_or(0));
    left.map(|_| ()).ok_or_else(|| invalid("the template makes too much text of what it was given"))
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// A prompt that is being written, of bounded length.
#[derive(Default)]
pub(super) struct Prompt(pub Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        spend(bytes.len()).map_err(io::Error::other)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the filters that make much of little.
pub(super) fn install(env: &mut Environment) {
    env.add_filter(COUNTED, |value: &Value| -> Result<Value, Error> {
        spend(length(value))?;
        Ok(value.clone())
    });
    let makers = [
        ("replace", Value::from_function(filters::replace)),
        ("join", Value::from_function(filters::join)),
        ("indent", Value::from_function(filters::indent)),
        ("format", Value::from_function(filters::format)),
        ("slice", Value::from_function(filters::slice)),
        ("batch", Value::from_function(filters::batch)),
    ];
    for (name, filter) in makers {
        env.add_filter(name, move |state: &mut State, args: Rest<Value>| -> Result<Value, Error> {
            spend(made(name, &args)?)?;
            filter.call(state, &args)
        });
    }
}

/// Counts what a method of a string makes.
pub(super) fn method(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    if !matches!(method, "replace" | "join" | "format") {
        return Ok(());
    }
    // The string that joins stands in front.
    let all: Vec<Value> = match (method, args) {
        ("join", [items, ..]) => vec![items.clone(), value.clone()],
        _ => std::iter::once(value).chain(args).cloned().collect(),
    };
    spend(made(method, &all)?)
}

/// How much the filter `name` would make of `args`, in bytes; an error if that is beyond measure.
fn made(name: &str, args: &[Value]) -> Result<usize, Error> {
    let Some(first) = args.first() else { return Ok(0) };
    let text = first.as_str().unwrap_or_default();
    let number = |value: &Value| value.as_usize();
    Ok(match (name, &args[1..]) {
        ("replace", [from, to, ..]) => {
            let (text, from) = (python::string(first), python::string(from));
            text.len().saturating_add(text.matches(&*from).count().saturating_mul(length(to)))
        }
        ("join", rest) => {
            let joiner = rest.first().map_or(0, length);
            // A string is joined by its characters.
            let mut sum = text.len().saturating_add(text.chars().count().saturating_mul(joiner));
            if !text.is_empty() {
                return Ok(sum);
            }
            for item in first.try_iter()? {
                sum = sum.saturating_add(length(&item)).saturating_add(joiner);
            }
            sum
        }
        ("indent", rest) => {
            let width = rest.first().and_then(number).unwrap_or(4);
            text.len().saturating_add((text.lines().count() + 1).saturating_mul(width))
        }
        ("format", rest) => {
            let wide = text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > DIGITS);
            let given = |value: &Value| value.as_i64().is_some_and(|n| n.unsigned_abs() >= 10u64.pow(DIGITS as u32));
            if wide || (text.contains('*') && rest.iter().any(given)) {
                return Err(invalid("format: a width or precision is too large"));
            }
            let places = text.matches(['%', '{', '*']).count();
            let longest = rest.iter().map(length).max().unwrap_or(0).saturating_add(10usize.pow(DIGITS as u32));
            text.len().saturating_add(places.saturating_mul(longest))
        }
        ("slice" | "batch", [count, ..]) => match number(count) {
            Some(count) if count > ROWS => return Err(invalid(format!("{name}: more than {ROWS} rows"))),
            count => (count.unwrap_or(0) + first.len().unwrap_or(0)).saturating_mul(size_of::<Value>()),
        },
        _ => 0,
    })
}

/// The length of a value as text: exact for strings, and for others what their parts have at least.
fn length(value: &Value) -> usize {
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            value.len().unwrap_or(0).saturating_mul(size_of::<Value>())
        }
        _ => 16,
    }
}

/// A template's source with its left operands counted; an error in words if it nests too deep or is too long.
pub(super) fn bounded(source: &str) -> Result<String, String> {
    if source.len() > SOURCE {
        return Err(format!("it has more than {SOURCE} bytes"));
    }
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut elifs) = (source, 0);
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        if tag.starts_with("{#") {
            let end = tag.find("#}").map_or(tag.len(), |end| end + 2);
            out.push_str(&tag[..end]);
            rest = &tag[end..];
            continue;
        }
        let close = if tag.starts_with("{%") { "%}" } else { "}}" };
        let (mut inside, mut words, mut depth) = (&tag[2..], 0, 0usize);
        out.push_str(&tag[..2]);
        let (mut operand, mut first) = (false, true);
        while !(inside.is_empty() || depth == 0 && inside.starts_with(close)) {
            let word = &inside[..word(inside)];
            let sign = word.len() == 1 && "+~".contains(word);
            // `+%}` and `{%+` speak of white space.
            let control = first || inside[word.len()..].starts_with(close);
            if sign && operand && !control {
                out.push('|');
                out.push_str(COUNTED);
                out.push(' ');
            }
            out.push_str(word);
            inside = &inside[word.len()..];
            if word.trim().is_empty() {
                continue;
            }
            match word {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                "elif" => elifs += 1,
                _ => {}
            }
            operand = matches!(word, ")" | "]" | "}")
                || word.starts_with(|c: char| c.is_alphanumeric() || "_'\"".contains(c)) && !KEYWORDS.contains(&word);
            first = false;
            words += 1;
            if words > WORDS {
                return Err(format!("a tag has more than {WORDS} words"));
            }
        }
        if elifs > ELIFS {
            return Err(format!("it has more than {ELIFS} elif"));
        }
        rest = inside;
    }
    out.push_str(rest);
    Ok(out)
}

/// Words after which a sign stands for no sum.
const KEYWORDS: [&str; 10] = ["and", "or", "not", "in", "is", "if", "else", "elif", "set", "print"];

/// The length of the first word of a tag: a string, a name or number, a run of white space, or one sign.
fn word(text: &str) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let run = |same: fn(char) -> bool| text.find(|c| !same(c)).unwrap_or(text.len());
    match first {
        '\'' | '"' => {
            let mut escaped = false;
            let end = text.char_indices().skip(1).find(|&(_, c)| {
                let ends = c == first && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(text.len(), |(at, _)| at + 1)
        }
        c if c.is_alphanumeric() || c == '_' => run(|c| c.is_alphanumeric() || c == '_'),
        c if c.is_whitespace() => run(char::is_whitespace),
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn left_operands_are_counted() {
        for (source, wanted) in [
            ("{{ a ~ b + 'x~y' ~ f(1) }}", "{{ a |counted ~ b |counted + 'x~y' |counted ~ f(1) }}"),
            ("{%+ if a +%} + {%- set x = a[0]+-1 -%}", "{%+ if a +%} + {%- set x = a[0]|counted +-1 -%}"),
            ("{{ +1 }}{{ f(+1) }}{% if +1 %}{{ {'a': 1+2}}}", "{{ +1 }}{{ f(+1) }}{% if +1 %}{{ {'a': 1|counted +2}}}"),
            ("{# a + b #}a + b{{ 'it\\'s' + '}}' }}", "{# a + b #}a + b{{ 'it\\'s' |counted + '}}' }}"),
        ] {
            assert_eq!(bounded(source).unwrap(), wanted);
        }
    }

    #[test]
    fn what_nests_too_deep_is_refused() {
        for (source, why) in [
            (format!("{{{{ {} x }}}}", "not ".repeat(5000)), "words"),
            (format!("{{{{ x{} }}}}", "|trim".repeat(5000)), "words"),
            (format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(1000)), "elif"),
            ("x".repeat(2 << 20), "bytes"),
        ] {
            assert!(bounded(&source).unwrap_err().contains(why));
        }
    }
}
