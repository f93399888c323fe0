//! Limits on a client's regular expression or Lark grammar. Both are checked before llguidance compiles them.
//!
//! llguidance follows rules, brackets and embedded schemas recursively. Each intersection (`&`) or complement (`~`)
//! multiplies the size of a terminal's automaton.

use super::{format::FormatError, json_schema};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Maximum size of a regular expression or a grammar in bytes.
const MAX_BYTES: usize = 64 << 10;
/// Maximum length of a chain of rules that refer to each other. Grammars of programming languages have chains of about
/// 30.
const MAX_CHAIN: usize = 64;
/// Maximum depth of nested brackets.
const MAX_NESTING: usize = 64;
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
    let mut scanner = Scanner { rest: text, nesting: 0, intersections: 0, rules: HashMap::new(), current: "" };
    while !scanner.rest.is_empty() {
        scanner.step()?;
    }
    let mut visited = HashSet::new();
    let mut names: Vec<&str> = scanner.rules.keys().copied().filter(|&name| name != "start").collect();
    names.sort_unstable();
    // llguidance compiles `start` first, and every other rule at its first use. The check uses the same order.
    for name in std::iter::once("start").chain(names) {
        check_chain(&scanner.rules, name, &mut visited, 1)?;
    }
    Ok(())
}

/// Follows references depth first, as the compiler does.
fn check_chain<'a>(
    rules: &HashMap<&'a str, Vec<&'a str>>,
    name: &'a str,
    visited: &mut HashSet<&'a str>,
    length: usize,
) -> Result<(), FormatError> {
    let Some(references) = rules.get(name).filter(|_| visited.insert(name)) else { return Ok(()) };
    if length > MAX_CHAIN {
        return Err(FormatError::new("", format!("its rules form a chain of more than {MAX_CHAIN}, at `{name}`")));
    }
    references.iter().try_for_each(|reference| check_chain(rules, reference, visited, length + 1))
}

/// Reads a grammar token by token, without checking its syntax.
struct Scanner<'a> {
    rest: &'a str,
    nesting: usize,
    intersections: usize,
    /// For each rule or terminal: the names that its definition refers to, in order.
    rules: HashMap<&'a str, Vec<&'a str>>,
    /// Name of the rule or terminal whose definition is being read.
    current: &'a str,
}

impl<'a> Scanner<'a> {
    fn step(&mut self) -> Result<(), FormatError> {
        let Some(first) = self.rest.chars().next() else { return Ok(()) };
        let mut length = first.len_utf8();
        match first {
            '"' => length = quoted(self.rest, '"'),
            '/' if self.rest.starts_with("//") => length = line(self.rest),
            '/' => length = quoted(self.rest, '/'),
            '#' => length = line(self.rest),
            // A special token such as `<|im_start|>`, or a reference to another grammar.
            '<' => length = self.rest.find(['>', '\n']).map_or(self.rest.len(), |end| end + 1),
            '@' => length += name(&self.rest[1..]),
            '%' if self.rest.starts_with("%json") => {
                let json = &self.rest["%json".len()..];
                let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
                let schema = values.next().and_then(Result::ok).unwrap_or_default();
                json_schema::prepare(&schema, false)?;
                length = "%json".len() + values.byte_offset();
            }
            '%' => length += name(&self.rest[1..]),
            '(' | '[' | '{' => {
                self.nesting += 1;
                if self.nesting > MAX_NESTING {
                    return Err(FormatError::new("", format!("its brackets nest deeper than {MAX_NESTING}")));
                }
            }
            ')' | ']' | '}' => self.nesting = self.nesting.saturating_sub(1),
            '&' | '~' => {
                self.intersections += 1;
                if self.intersections > MAX_INTERSECTIONS {
                    let reason =
                        format!("it has more than {MAX_INTERSECTIONS} intersections and complements (`&`, `~`)");
                    return Err(FormatError::new("", reason));
                }
            }
            _ if name(self.rest) > 0 => {
                length = name(self.rest);
                let (name, after) = self.rest.split_at(length);
                if starts_definition(after) {
                    self.current = name;
                    self.rules.entry(name).or_default();
                } else {
                    self.rules.entry(self.current).or_default().push(name);
                }
            }
            _ => {}
        }
        self.rest = self.rest.get(length..).unwrap_or_default();
        Ok(())
    }
}

/// Length of the name at the start of `text`, or 0 if `text` does not start with a name.
fn name(text: &str) -> usize {
    if !text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        return 0;
    }
    text.find(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c))).unwrap_or(text.len())
}

/// True if `text`, which follows a name, shows that the name is being defined: `name: ...`, `name[attributes]: ...`,
/// `name::parameter: ...`.
fn starts_definition(mut text: &str) -> bool {
    loop {
        text = text.trim_start_matches([' ', '\t']);
        text = match text.chars().next() {
            Some('[') => {
                let mut at = 1;
                while at < text.len() && !text[at..].starts_with(']') {
                    at += if text[at..].starts_with('"') {
                        quoted(&text[at..], '"')
                    } else {
                        text[at..].chars().next().map_or(1, char::len_utf8)
                    };
                }
                text.get(at + 1..).unwrap_or_default()
            }
            Some('.') => text[1..].trim_start_matches(|c: char| c.is_ascii_digit()),
            Some(':') => match text.strip_prefix("::") {
                Some(parameter) => parameter.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_'),
                None => return true,
            },
            _ => return false,
        };
    }
}

/// Length of a string or regular expression with its delimiters.
fn quoted(text: &str, delimiter: char) -> usize {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let ends = c == delimiter && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(text: &str) -> Option<String> {
        check_grammar(text).err().map(|error| error.reason)
    }

    /// A grammar with a chain of rules: `start: r0`, `r0: r1`, and so on. The last rule is a literal.
    fn chain(rules: usize, prefix: &str) -> String {
        let rules: String = (0..rules).map(|i| format!("{prefix}{i}: \"a\" {prefix}{}\n", i + 1)).collect();
        format!("start: {prefix}0\n{rules}{prefix}{}: \"b\"\n", rules.matches(':').count())
    }

    #[test]
    fn long_chains_of_rules_are_refused() {
        assert_eq!(reason(&chain(50, "r")), None);
        assert!(reason(&chain(100, "r")).unwrap().contains("chain"));
        assert!(reason(&chain(100, "R")).unwrap().contains("chain"));
        assert!(reason(&chain(100, "r").replace(": \"a\"", "[max_tokens=\"]\"]: \"a\"")).unwrap().contains("chain"));
        // A cycle is accepted, because the compiler visits each rule once.
        assert_eq!(reason("start: a\na: b\nb: a | \"x\""), None);
    }

    #[test]
    fn nesting_and_intersections_are_bounded() {
        assert!(reason(&format!("start: {}\"a\"{}", "(".repeat(100), ")".repeat(100))).unwrap().contains("brackets"));
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
        let defs: String = (0..100).map(|i| format!("\"d{i}\": {{\"$ref\": \"#/$defs/d{}\"}}, ", i + 1)).collect();
        let schema = format!("{{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{defs}\"d100\": true}}}}");
        assert!(reason(&format!("start: %json {schema}")).unwrap().contains("chain"));
        assert_eq!(reason("start: %json {\"type\": \"object\"} tail\ntail: \"x\""), None);
    }
}
