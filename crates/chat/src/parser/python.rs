//! Values in Python's spelling. Models write literals such as `[{'a': False}]` where JSON is asked for.

use crate::json_numbers;
use serde_json::Value;

/// Writes the words, strings, tuples and numbers of a Python literal as JSON does. `None` if the text has another word.
/// The result is JSON only if the text was a literal.
pub fn to_json(text: &str) -> Option<String> {
    let mut json = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        rest = match c {
            '\'' | '"' => {
                let (string, after) = string(after, c)?;
                json += &Value::from(string).to_string();
                after
            }
            // Python allows a comma before a closing bracket.
            ',' if after.trim_start().starts_with([']', ')', '}']) => after,
            '(' | ')' => {
                json.push(if c == '(' { '[' } else { ']' });
                after
            }
            _ if is_part_of_word(c) => {
                let (word, after) = rest.split_at(rest.find(|c| !is_part_of_word(c)).unwrap_or(rest.len()));
                let word = json_word(word)?;
                let is_key = after.trim_start().starts_with(':');
                json += &if is_key { Value::from(word).to_string() } else { word };
                after
            }
            _ => {
                json.push(c);
                after
            }
        };
    }
    Some(json)
}

fn is_part_of_word(c: char) -> bool {
    c.is_alphanumeric() || "+-._".contains(c)
}

/// Reads a string after its opening quote. Returns the string and the text after it.
fn string(text: &str, quote: char) -> Option<(String, &str)> {
    let mut string = String::new();
    let mut chars = text.chars();
    loop {
        match chars.next()? {
            '\\' => push_escape(&mut chars, &mut string)?,
            c if c == quote => return Some((string, chars.as_str())),
            c => string.push(c),
        }
    }
}

/// Reads an escape sequence after its backslash. As in Python, an unknown sequence is kept with its backslash.
fn push_escape(chars: &mut std::str::Chars<'_>, string: &mut String) -> Option<()> {
    let c = chars.next()?;
    match c {
        'n' => string.push('\n'),
        't' => string.push('\t'),
        'r' => string.push('\r'),
        '\n' => {}
        '\\' | '\'' | '"' => string.push(c),
        'x' | 'u' => {
            let digits = chars.as_str().get(..if c == 'x' { 2 } else { 4 })?;
            string.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?)?);
            *chars = chars.as_str()[digits.len()..].chars();
        }
        _ => string.extend(['\\', c]),
    }
    Some(())
}

fn json_word(word: &str) -> Option<String> {
    match word {
        "True" | "true" => return Some("true".into()),
        "False" | "false" => return Some("false".into()),
        "None" | "null" => return Some("null".into()),
        _ => {}
    }
    let unsigned = word.strip_prefix(['+', '-']).unwrap_or(word);
    let sign = if word.starts_with('-') { "-" } else { "" };
    let whole = if unsigned.starts_with('.') { "0" } else { "" };
    let fraction = if unsigned.ends_with('.') { "0" } else { "" };
    let digits = if unsigned.split('_').any(str::is_empty) { unsigned.to_owned() } else { unsigned.replace('_', "") };
    let number = format!("{sign}{whole}{digits}{fraction}");
    json_numbers::is_integer(&number).map(|_| number)
}
