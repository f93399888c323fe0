//! Patterns with look-ahead as patterns without it.
//!
//! `(?=B)` asks that the rest of the text starts with `B`. So `(?=B)R`, where `R` matches all the rest, is the intersection
//! of `R` and `B.*`, and `(?!B)R` is that of `R` and the complement of `B.*`. If each text of `B` is at most as long as
//! each text of `R`, it does not matter what follows `R`, and the same is true inside of a pattern and of a repeated group.
//! Otherwise what follows a group is moved into its alternatives.

use super::{automaton, expressions::is_empty};
use llguidance::{derivre::RegexAst, regex_to_lark};
use std::collections::HashMap;

/// Maximum number of look-aheads of one schema. One counts again each time that it is read.
const MAX_LOOK_AHEADS: usize = 64;
/// A pattern that is too complex counts as this many.
const REFUSED: usize = 8;
/// Maximum number of groups inside of each other that are read.
const MAX_DEPTH: usize = 8;
/// Maximum length of the texts that a look-ahead matches, and maximum number of the elements after it, for which
/// [`LookAheads`] finds out whether these elements are longer.
const MAX_LOCAL: usize = 8;
const ANY: &str = "(?s:.*)";

/// Replaces the look-ahead of the patterns of one schema.
pub struct LookAheads {
    known: HashMap<String, Vec<String>>,
    left: usize,
}

impl LookAheads {
    pub fn new() -> Self {
        Self { known: HashMap::new(), left: MAX_LOOK_AHEADS }
    }

    /// Patterns that together match the same texts as `pattern`. They have no look-ahead, unless that of `pattern` has no
    /// equivalent or is too complex.
    pub fn replaced(&mut self, pattern: &str) -> Vec<String> {
        let pattern = &literal_classes(pattern);
        if !["(?=", "(?!"].iter().any(|start| pattern.contains(start)) {
            return vec![pattern.to_owned()];
        }
        if let Some(known) = self.known.get(pattern) {
            return known.clone();
        }
        let replaced = self.conjunction(pattern).unwrap_or_else(|| vec![pattern.to_owned()]);
        self.known.insert(pattern.to_owned(), replaced.clone());
        replaced
    }

    /// Each look-ahead at the start becomes a separate pattern, because intersections are cheap for llguidance.
    fn conjunction(&mut self, pattern: &str) -> Option<Vec<String>> {
        let alternatives = top_level_alternatives(pattern);
        let mut patterns = Vec::new();
        let mut whole = Vec::new();
        for alternative in &alternatives {
            let Some(mut rest) = alternative.strip_prefix('^') else {
                whole.push(ANY.to_owned() + &self.sequence(alternative, Some(ANY), false, 0)?);
                continue;
            };
            for element in elements(rest).into_iter().filter(|_| alternatives.len() == 1) {
                let Some((body, is_negated)) = look_ahead(element) else { break };
                self.left = self.left.checked_sub(1)?;
                let ahead = self.alternatives(body, Some(ANY), true, 0)?;
                patterns.push(if is_negated { self.automaton(&not(&ahead))? } else { ahead });
                rest = &rest[element.len()..];
            }
            whole.push(self.sequence(rest, Some(ANY), true, 0)?);
        }
        patterns.push(whole.join("|"));
        Some(patterns.into_iter().map(|pattern| format!("^(?:{pattern})$")).collect())
    }

    /// Alternatives, each followed by `tail`. If `tail` is `None`, it is not known what follows them. With `is_start`, they
    /// are at the start of the text.
    fn alternatives(&mut self, text: &str, tail: Option<&str>, is_start: bool, depth: usize) -> Option<String> {
        let all = top_level_alternatives(text).into_iter().map(|one| self.sequence(one, tail, is_start, depth + 1));
        Some(format!("(?:{})", all.collect::<Option<Vec<_>>>()?.join("|")))
    }

    fn sequence(&mut self, text: &str, tail: Option<&str>, is_start: bool, depth: usize) -> Option<String> {
        let mut parts = elements(text.strip_prefix('^').filter(|_| is_start).unwrap_or(text));
        if parts.len() > automaton::MAX_BYTES {
            return None;
        }
        let tail = match parts.pop_if(|last| *last == "$") {
            Some(_) => Some(tail.filter(|tail| ["", ANY].contains(tail)).map(|_| "")?),
            None => tail,
        };
        let mut done: Vec<String> = tail.filter(|tail| !tail.is_empty()).map(str::to_owned).into_iter().collect();
        while let Some(part) = parts.pop() {
            let is_start = is_start && parts.iter().all(|part| look_ahead(part).is_some());
            if let Some((body, is_negated)) = look_ahead(part) {
                self.left = self.left.checked_sub(1)?;
                let count = self.decisive(body, &done, depth).or(tail.map(|_| done.len()))?;
                let ahead = self.alternatives(body, Some(ANY), is_start, depth)?;
                let ahead = if is_negated { not(&ahead) } else { regex(&ahead) };
                let next: Vec<String> = done.drain(..count).collect();
                done.insert(0, self.automaton(&RegexAst::And(vec![regex(&next.concat()), ahead]))?);
            } else if !needs_care(part)? {
                done.insert(0, part.to_owned());
            } else {
                let (body, repeats) = group(part).filter(|_| depth < MAX_DEPTH)?;
                if let Some(alone) = self.alternatives(body, None, false, depth) {
                    done.insert(0, alone + repeats);
                    continue;
                }
                let after = tail.map(|_| done.concat())?;
                let all = self.alternatives(body, Some(&after), is_start, depth)?;
                done = vec![match repeats {
                    "" => all,
                    "?" | "??" => format!("(?:{all}|{after})"),
                    _ => return None,
                }];
            }
        }
        Some(done.concat()).filter(|text| text.len() <= automaton::MAX_BYTES)
    }

    /// An expression for `ast`. One that is too complex counts as several look-aheads.
    fn automaton(&mut self, ast: &RegexAst) -> Option<String> {
        let expression = automaton::expression(ast);
        self.left = self.left.saturating_sub(if expression.is_none() { REFUSED } else { 0 });
        expression
    }

    /// The number of elements that are at least as long as each text of look-ahead.
    fn decisive(&mut self, body: &str, elements: &[String], depth: usize) -> Option<usize> {
        let body = self.alternatives(body, None, false, depth)?;
        let is_none = |text: &str, lengths: String| is_empty(vec![regex(text), regex(&lengths)]) == Some(true);
        let length = (1..=MAX_LOCAL).find(|length| is_none(&body, format!("(?s:.{{{},}})", length + 1)))?;
        let is_longer = |count: &usize| is_none(&elements[..*count].concat(), format!("(?s:.{{0,{}}})", length - 1));
        (1..=elements.len().min(MAX_LOCAL)).find(is_longer)
    }
}

fn regex(text: &str) -> RegexAst {
    RegexAst::Regex(regex_to_lark(text, "dw"))
}

fn not(text: &str) -> RegexAst {
    RegexAst::Not(Box::new(regex(text)))
}

/// The expression of a look-ahead, and true if the text must not match it.
fn look_ahead(element: &str) -> Option<(&str, bool)> {
    let body = element.strip_suffix(')')?;
    let negated = || body.strip_prefix("(?!").map(|body| (body, true));
    body.strip_prefix("(?=").map(|body| (body, false)).or_else(negated)
}

/// The expression of a group, and how often it may occur.
fn group(element: &str) -> Option<(&str, &str)> {
    let (body, repeats) = element.strip_prefix('(')?.rsplit_once(')')?;
    let named = body.strip_prefix("?P<").or(body.strip_prefix("?<")).filter(|name| !name.starts_with(['=', '!']));
    let body = named.and_then(|named| Some(named.split_once('>')?.1)).or(body.strip_prefix("?:")).unwrap_or(body);
    (!body.starts_with('?')).then_some((body, repeats))
}

/// Escapes what is more than a character in a class of Rust's syntax, and a character in JavaScript and Python: `[`, `&&`,
/// `~~`, and a `-` that is the start or the end of a range or no part of one.
pub fn literal_classes(pattern: &str) -> String {
    let mut literal = String::with_capacity(pattern.len());
    for (_, token) in tokens(pattern) {
        let (start, class) =
            token.split_at(if token.starts_with("[^") { 2 } else { usize::from(token.starts_with('[')) });
        literal += start;
        let mut is_escaped = start.is_empty();
        // 1 after a character that may start a range, 2 inside of a range.
        let mut range = 0;
        let mut chars = class.chars().peekable();
        while let Some(c) = chars.next() {
            let is_operator = c == '-' && range == 1 && chars.peek().is_some_and(|next| *next != ']');
            literal.extend((!is_escaped && ("[&~".contains(c) || c == '-' && !is_operator)).then_some('\\'));
            literal.push(c);
            range = if is_operator && !is_escaped { 2 } else { u8::from(range != 2 || c == '\\' && !is_escaped) };
            is_escaped = start.is_empty() || c == '\\' && !is_escaped;
        }
    }
    literal
}

/// True if a part has look-ahead, or an anchor that may not be at an end of the text. `None` for a flag, which applies to
/// all that follows.
fn needs_care(part: &str) -> Option<bool> {
    let is_flag_or_end = |c: char| c.is_ascii_alphabetic() || "-)".contains(c);
    if part.strip_prefix("(?").is_some_and(|rest| rest.chars().all(is_flag_or_end)) {
        return None;
    }
    let starts = ["^", "$", "(?=", "(?!"];
    Some(tokens(part).any(|(at, _)| starts.iter().any(|start| part[at..].starts_with(start))))
}

/// Splits an expression at each `|` outside brackets.
pub fn top_level_alternatives(pattern: &str) -> Vec<&str> {
    let parts = parts(pattern, |token| token == "|").into_iter().enumerate();
    parts.map(|(at, part)| if at == 0 { part } else { &part[1..] }).collect()
}

/// The characters, classes and groups of an expression, with how often each may occur.
fn elements(pattern: &str) -> Vec<&str> {
    let repeats = |token: &str| token.starts_with(['*', '+', '?']) || token.starts_with('{') && token.len() > 1;
    let mut elements = parts(pattern, |token| !repeats(token));
    elements.retain(|part| !part.is_empty());
    elements
}

/// Parts of an expression. A token outside brackets for which `starts` returns true is the first of its part.
fn parts(pattern: &str, starts: impl Fn(&str) -> bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut first = 0;
    let mut depth = 0;
    for (at, token) in tokens(pattern) {
        if depth == 0 && starts(token) {
            parts.push(&pattern[first..at]);
            first = at;
        }
        depth += i32::from(token == "(") - i32::from(token == ")");
    }
    parts.push(&pattern[first..]);
    parts
}

/// The characters, escape sequences, classes and marks of an expression, with their offsets.
fn tokens(pattern: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = &pattern[at..];
        let braces = |start: usize| rest[start..].find('}').map_or(rest.len(), |end| start + end + 1);
        let is_count = |c: char| c.is_ascii_digit() || c == ',';
        let mut chars = rest.chars();
        let length = match (chars.next()?, chars.next().unwrap_or(' ')) {
            ('[', _) => quoted(rest, ']'),
            ('\\', 'u' | 'x' | 'p' | 'P') if chars.next() == Some('{') => braces(2),
            ('\\', 'u') => 6,
            ('\\', 'x') => 4,
            ('\\', 'p' | 'P') => 3,
            ('\\', second) => 1 + second.len_utf8(),
            ('{', second) if is_count(second) && rest[1..].trim_start_matches(is_count).starts_with('}') => braces(1),
            (first, _) => first.len_utf8(),
        };
        let token = rest.get(..length).unwrap_or(rest);
        at += token.len();
        Some((at - token.len(), token))
    })
}

/// Length of a string, regular expression or class with its delimiters, of which the last is `delimiter`.
pub fn quoted(text: &str, delimiter: char) -> usize {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let ends = c == delimiter && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::{super::json_schema::prepare, *};
    use fancy_regex::Regex;
    use serde_json::json;
    use test_support::mutate::Dice;

    const VALIBOT_EMOJI: &str = r"^(?:[\u{1F1E6}-\u{1F1FF}]{2}|\u{1F3F4}[\u{E0061}-\u{E007A}]{2}[\u{E0030}-\u{E0039}\u{E0061}-\u{E007A}]{1,3}\u{E007F}|(?:\p{Emoji}\uFE0F\u20E3?|\p{Emoji_Modifier_Base}\p{Emoji_Modifier}?|(?![\p{Emoji_Modifier_Base}\u{1F1E6}-\u{1F1FF}])\p{Emoji_Presentation})(?:\u200D(?:\p{Emoji}\uFE0F\u20E3?|\p{Emoji_Modifier_Base}\p{Emoji_Modifier}?|(?![\p{Emoji_Modifier_Base}\u{1F1E6}-\u{1F1FF}])\p{Emoji_Presentation}))*)+$";

    /// Patterns of Pydantic, zod, Valibot and ArkType, and patterns like them, each with a text that it matches.
    const PATTERNS: [(&str, &str); 26] = [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "-0.5"),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$", "+1.200"),
        (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            "a.b@c.de",
        ),
        (r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]+)*\.?$", "a-b.c"),
        (r"^(?=.*[A-Z])(?=.*\d)[\s\S]{2,}", "aA0"),
        (r"^(?!$)a*", "a"),
        (r"^(?!-)(?!.*--)[a-z.\n-]+$", "a-b\nc"),
        (r"^(?!.*@)[\s\S]*", "a\n@"),
        (r"^(?!.*aa)(?s:.*)$", "aba"),
        (r"^(?![^a-z])", "a0"),
        (r"^(?!\d)\w+$", "a0"),
        (r"^(?![)(|]*$)(?=[(])[\s\S]", "(a"),
        (r"^(?!ab+|[cä])[a-c]", "b"),
        (r"^(?!-0$)-?\d+$", "-10"),
        (r"^(?!a\.)(?!-[0-a]$).*$", "-0a"),
        (
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            "P1Y2DT0M3,5S",
        ),
        (r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$", "DE02120300000000202051"),
        (r"^[A-Z]{6}(?!00)[\dA-Z]{2}(?:[\dA-Z]{3})?$", "DEUTDEFF500"),
        (r"^(?:(?!^-0$)-?(?:(?:0|[1-9]\d*)))$", "-10"),
        (r"^(?:(?!^-0\.?0*$)(?:-?(?:(?:0|[1-9]\d*)(?:\.\d+)?)|\.\d+?))$", "-0.01"),
        (r"^(?:(?![Xx][Nn]--)[a-z0-9]{4,5}\.)+[a-z]{2,6}$", "xn-.abcd.de"),
        (r"^(?:(?![ä-ö\u{1F1E6}])[\w\xC0-\u{1F1FF}]\x{FE0F}?)+$", "aé\u{FE0F}z"),
        (VALIBOT_EMOJI, "\u{1F44D}\u{1F3FD}\u{200D}\u{2764}\u{FE0F}"),
        (
            r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])[\p{Extended_Pictographic}\p{Emoji_Component}]+$",
            "1\u{20E3}",
        ),
        (r"a(?!b)", "ab aa"),
        (r"a(?=b)(?:(?!bb)[ab]{2}|b){1,3}$|c(?=d|$)", "xabab"),
    ];

    fn compiled(patterns: &[String]) -> Vec<Regex> {
        patterns.iter().map(|pattern| Regex::new(&regex_to_lark(pattern, "dw")).unwrap()).collect()
    }

    fn match_all(patterns: &[Regex], text: &str) -> bool {
        patterns.iter().all(|pattern| pattern.is_match(text).unwrap())
    }

    #[test]
    fn patterns_of_libraries_match_the_same_texts() {
        let mut dice = Dice(1);
        for (pattern, example) in PATTERNS {
            let whole = Regex::new(&regex_to_lark(pattern, "dw")).unwrap();
            let parts = LookAheads::new().replaced(pattern);
            assert!(parts.iter().all(|part| !part.contains("(?=") && !part.contains("(?!")), "{pattern} {parts:?}");
            let parts = compiled(&parts);
            let mut matches = 0;
            for round in 0..3000 {
                let mut text: Vec<char> = if round % 3 == 0 { Vec::new() } else { example.chars().collect() };
                for _ in 0..dice.below(6) {
                    let drawn: Vec<char> = "aaA0.-+@\n(|bxn".chars().chain(example.chars()).collect();
                    let at = dice.below(text.len() + 1);
                    let end = (at + dice.below(3)).min(text.len());
                    text.splice(at..end, (0..dice.below(3)).map(|_| *dice.pick(&drawn)).collect::<Vec<_>>());
                }
                let text: String = text.into_iter().collect();
                let is_match = whole.is_match(&text).unwrap();
                assert_eq!(match_all(&parts, &text), is_match, "{pattern} {text:?}");
                matches += usize::from(is_match);
            }
            assert!(matches > 5, "{pattern} {matches}");
            let prepared = prepare(&json!({"type": "string", "pattern": pattern}), true);
            assert!(prepared.is_ok(), "{prepared:?}");
        }
    }

    /// A random expression over a few characters.
    fn expression(dice: &mut Dice, depth: usize) -> String {
        let element = |dice: &mut Dice| match dice.below(if depth == 0 { 4 } else { 9 }) {
            0..=2 => (*dice.pick(&["a", "b", "[ab]", "[^a]", ".", "-", r"\w", "ä"])).to_owned(),
            3 => format!(
                "{}{}",
                dice.pick(&["a", "b", "."]),
                dice.pick(&["?", "*", "+", "{2}", "{1,2}", "{0,3}?", "{3,5}"])
            ),
            4 | 5 => format!("({}){}", expression(dice, depth - 1), dice.pick(&["", "?", "*", "+", "{2}"])),
            6 => format!("(?={}{})", expression(dice, depth - 1), dice.pick(&["", "", "$"])),
            _ => format!("(?!{}{})", expression(dice, depth - 1), dice.pick(&["", "", "$"])),
        };
        let sequence = |dice: &mut Dice| (0..1 + dice.below(4)).map(|_| element(dice)).collect::<String>();
        let alternatives: Vec<String> = (0..1 + dice.below(5) / 3).map(|_| sequence(dice)).collect();
        alternatives.join("|")
    }

    #[test]
    fn random_look_ahead_matches_the_same_texts() {
        let mut dice = Dice(5);
        let texts: Vec<String> =
            (0..6000).map(|_| (0..dice.below(8)).map(|_| *dice.pick(&['a', 'b', '-', 'ä', '\n'])).collect()).collect();
        let mut replaced = 0;
        let mut refused = 0;
        while replaced < 300 {
            let ends = [*dice.pick(&["", "^"]), *dice.pick(&["", "$"])];
            let pattern = format!("{}{}{}", ends[0], expression(&mut dice, 2), ends[1]);
            let parts = LookAheads::new().replaced(&pattern);
            if parts[0] == pattern {
                refused += usize::from(pattern.contains("(?=") || pattern.contains("(?!"));
                continue;
            }
            replaced += 1;
            let whole = Regex::new(&regex_to_lark(&pattern, "dw")).unwrap();
            let compiled = compiled(&parts);
            for text in texts.iter().skip(dice.below(20)).step_by(20) {
                assert_eq!(match_all(&compiled, text), whole.is_match(text).unwrap(), "{pattern} {text:?} {parts:?}");
            }
        }
        // Most of the others have look-ahead in a repeated group.
        assert!(refused < replaced, "{refused}");
    }

    #[test]
    fn other_look_ahead_is_refused() {
        let many = "(?!a)".repeat(80);
        assert_eq!(literal_classes(r"a[^[&\]~a-z\[]\[[ä-ö]&"), r"a[^\[\&\]\~a-z\[]\[[ä-ö]&");
        for pattern in [
            "^(?!a)*b",
            "^(?<!a)b",
            "^(?!a",
            "(a(?!ba))*b",
            "(?i)(?!a)b",
            r"^(?!\b)a",
            r"^(a)(?!\1)b",
            "a(?!^b)",
            "a(?=b.{150}c.{150}d)[abcd]*$",
            &format!("^{many}a"),
            &format!("{}(?=a){}", "(".repeat(20), "b)?".repeat(20)),
        ] {
            assert_eq!(LookAheads::new().replaced(pattern), [pattern]);
            let error = prepare(&json!({"type": "string", "pattern": pattern}), true).unwrap_err();
            assert!(error.path == ".pattern" && error.reason.contains("pattern"), "{error:?}");
        }
    }
}
