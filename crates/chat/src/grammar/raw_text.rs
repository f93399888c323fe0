//! Strings as raw text between the tags of a call.
//!
//! A text has no tag of a call, and no text that the parser reads as another type of the parameter. If a string may also
//! be a list, for example, it does not start with a bracket. Texts, words, `true`, `false` and `null` of one parameter, and
//! numbers next to a text, are one terminal: llguidance's lexer follows a terminal as long as any text of it may continue.

use super::{expressions, format::FormatError, look_ahead::top_level_alternatives};
use crate::schema::{OpenNames, TextLimits, TypeSet, ValueType};
use llguidance::{derivre::RegexAst, regex_to_lark};
use serde_json::Value;
use std::collections::BTreeSet;

/// The closing tag of a value, in Lark.
pub const END: &str = r#""\n</parameter>\n""#;

/// Lark expression for any text up to the closing tag, with that tag.
const TEXT: &str = "text \"\\n\"";
/// The rule that `TEXT` refers to.
pub const TEXT_RULE: &str =
    r#"text[suffix="</parameter>"]: /(?s:.*)/ & ~/(?s:.*)(<\/function>|<\/tool_call>|<parameter=|<function=)(?s:.*)/"#;

/// Tags that end a value, and tags that start another parameter or call.
const TAGS: [&str; 5] = ["</parameter>", "</function>", "</tool_call>", "<parameter=", "<function="];

/// Expression of a text with a tag in it.
const WITH_TAG: &str = r"(?s:.*)(<\/parameter>|<\/function>|<\/tool_call>|<parameter=|<function=)(?s:.*)";

/// Largest minimum length. llguidance has about ten states for each character.
const MAX_MIN: u64 = 1000;
/// Maximum number of characters of a name that matches a pattern.
const MAX_NAME: usize = 250;

/// The alternatives for the raw text of a parameter.
#[derive(Default)]
pub struct RawText {
    /// Lark rules that the alternatives refer to.
    pub rules: String,
    /// Lark expressions, each with the closing tag.
    pub alternatives: Vec<String>,
}

impl RawText {
    /// Writes the alternatives for the strings of `value`, and for values of other types that are written next to
    /// strings. `misread` has the types that strings must not look like. `prefix` makes the names of rules unique.
    pub fn of(value: &ValueType, misread: TypeSet, prefix: &str, strict: bool) -> Result<Self, FormatError> {
        let mut raw = Self::default();
        let excluded = misread_texts(misread);
        if excluded.is_empty() && value.texts.iter().any(TextLimits::is_unlimited) {
            raw.alternatives.push(TEXT.into());
            return Ok(raw);
        }
        let mut choices = words(value, strict)?;
        choices.extend(other_values(value.others.and(raw_types(value, misread))));
        for (at, text) in value.texts.iter().enumerate() {
            let only_max = TextLimits { max: text.max, ..TextLimits::default() };
            match text.max {
                Some(max) if *text == only_max && excluded.is_empty() => {
                    raw.add_short_text(&format!("{prefix}_{at}"), max)
                }
                _ => choices.extend(expression(text, &excluded, strict)?),
            }
        }
        if !choices.is_empty() {
            raw.rules += &format!("STRING_{prefix}: ({}) {END}\n", choices.join(" | "));
            raw.alternatives.push(format!("STRING_{prefix}"));
        }
        Ok(raw)
    }

    /// Adds a text of at most `max` characters. As in `TEXT`, the first closing tag ends the text. The line feed before
    /// the tag may count as one of the characters.
    fn add_short_text(&mut self, name: &str, max: u64) {
        let text = format!("/(?s:.{{0,{max}}})\\n?/");
        self.rules += &format!("string_{name}[suffix=\"</parameter>\"]: {text}\n");
        self.alternatives.push(format!("string_{name} \"\\n\""));
    }
}

/// The types other than strings whose values are raw text. They are those that share a terminal with strings.
pub fn raw_types(value: &ValueType, misread: TypeSet) -> TypeSet {
    let literals = TypeSet::NULL.or(TypeSet::BOOLEAN);
    if !value.has_strings() {
        TypeSet::default()
    } else if value.texts.is_empty() || misread.has(TypeSet::NUMBER) {
        literals
    } else {
        literals.or(TypeSet::NUMBER)
    }
}

/// The words of an `enum`.
fn words(value: &ValueType, strict: bool) -> Result<Vec<String>, FormatError> {
    let has_tag = |word: &&String| TAGS.iter().any(|tag| word.contains(tag));
    let words: Vec<&String> = value.words.iter().filter(|word| !has_tag(word)).collect();
    let are_all_lost = words.is_empty() && value.texts.is_empty();
    if words.len() < value.words.len() && (strict || are_all_lost) {
        let reason = "`enum` or `const` has a word with a tag of a tool call, which cannot be an argument of a call";
        return Err(FormatError::new("", reason));
    }
    Ok(words.into_iter().map(|word| literal(word)).collect())
}

/// Expressions of the texts that the parser reads as another type.
fn misread_texts(misread: TypeSet) -> Vec<&'static str> {
    let texts = [
        (TypeSet::NULL, r"\s*(null|None)\s*"),
        (TypeSet::BOOLEAN, r"\s*(true|false)\s*"),
        // Only the first character tells a text from a value that is JSON.
        (TypeSet::NUMBER, r"\s*-?[0-9](?s:.*)"),
        (TypeSet::ARRAY, r"\s*\[(?s:.*)"),
        (TypeSet::OBJECT, r"\s*\{(?s:.*)"),
    ];
    texts.into_iter().filter(|(types, _)| misread.has(*types)).map(|(_, text)| text).collect()
}

/// Expressions of null, of the booleans and of numbers without limits.
fn other_values(types: TypeSet) -> impl Iterator<Item = String> {
    let expressions = [
        (TypeSet::NULL, r#""null""#),
        (TypeSet::TRUE, r#""true""#),
        (TypeSet::FALSE, r#""false""#),
        (TypeSet::INTEGER, "/-?(0|[1-9][0-9]{0,17})/"),
        (TypeSet::NUMBER, r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"),
    ];
    expressions.into_iter().filter(move |(kind, _)| types.has(*kind)).map(|(_, expression)| expression.to_owned())
}

/// Expression of the texts that keep their limits and that are none of `excluded`. `None` if there is no such text.
fn expression(text: &TextLimits, excluded: &[&str], strict: bool) -> Result<Option<String>, FormatError> {
    if excluded.is_empty() && text.patterns.is_empty() && text.max.is_none() {
        if strict && text.min > MAX_MIN {
            let reason = format!("a `minLength` above {MAX_MIN} cannot be enforced for a parameter of a strict tool");
            return Err(FormatError::new(".minLength", reason));
        }
        return Ok(Some(long_text(text.min.min(MAX_MIN))));
    }
    let max = text.max.map_or_else(String::new, |max| max.to_string());
    let lengths = if (text.min, text.max) == (0, None) { "*".into() } else { format!("{{{},{max}}}", text.min) };
    let mut included = Vec::new();
    for pattern in &text.patterns {
        included.extend(whole_match(pattern, strict, ".pattern")?);
    }
    included.push(format!("(?s:.{lengths})"));
    // The text must match up to the tag that ends it. A suffix, as in `TEXT_RULE`, would accept any text before the tag.
    let excluded: Vec<&str> = excluded.iter().copied().chain([WITH_TAG]).collect();
    Ok(intersection(&included, &excluded))
}

/// Expression of the texts with at least `min` characters and no tag. An intersection would take llguidance a step for
/// each of these characters. A `<` and the text after it count as one character, up to the first that no tag has there.
fn long_text(min: u64) -> String {
    let starts: BTreeSet<&str> = TAGS.iter().flat_map(|tag| (1..tag.len()).map(|end| &tag[1..end])).collect();
    let others = starts.iter().map(|start| {
        let next = TAGS.iter().filter_map(|tag| tag[1..].strip_prefix(start)?.chars().next());
        format!("{start}[^<{}]", next.collect::<String>())
    });
    let others = others.collect::<Vec<_>>().join("|");
    let started = format!("(<({}))*", starts.into_iter().collect::<Vec<_>>().join("|"));
    format!("/{}/", format!("([^<]|{started}<({others})){{{min},}}{started}").replace('/', "\\/"))
}

/// Lark expression of the texts that match all of `included` and none of `excluded`. `None` if it is known that there are
/// none.
fn intersection(included: &[String], excluded: &[impl AsRef<str>]) -> Option<String> {
    let regex = |expression: &str| RegexAst::Regex(expression.to_owned());
    let mut all: Vec<RegexAst> = included.iter().map(|expression| regex(expression)).collect();
    let mut parts: Vec<String> = included.iter().map(|expression| format!("/{expression}/")).collect();
    for expression in excluded.iter().map(AsRef::as_ref) {
        all.push(RegexAst::Not(Box::new(regex(expression))));
        parts.push(format!("~/{expression}/"));
    }
    (expressions::is_empty(all) != Some(true)).then(|| format!("({})", parts.join(" & ")))
}

/// Expression of names that the schema does not list. `None` if there are no such names, or if their pattern cannot be
/// enforced.
pub fn name_expression(names: &OpenNames<'_>, listed: &[&str], strict: bool) -> Result<Option<String>, FormatError> {
    let at = ".patternProperties";
    let mut included = vec!["[A-Za-z0-9_.-]{1,64}".to_owned()];
    if let Some(pattern) = names.pattern {
        let Some(expression) = whole_match(pattern, strict, at)? else { return Ok(None) };
        included = vec![format!(r#"[^<>\s"']([^<>\n]{{0,{}}}[^<>\s"'])?"#, MAX_NAME - 2), expression];
        if strict && intersection(&included, &[""; 0]).is_none() {
            let limit = format!("no name of a parameter with at most {MAX_NAME} characters can match");
            let reason = format!("`patternProperties` has the pattern `{pattern}`, which {limit}");
            return Err(FormatError::new(at, reason));
        }
    }
    let mut excluded = Vec::new();
    for other in &names.other_patterns {
        excluded.extend(whole_match(other, strict, at)?);
    }
    if !listed.is_empty() {
        let listed: Vec<_> = listed.iter().map(|name| fancy_regex::escape(name)).collect();
        excluded.push(regex_to_lark(&listed.join("|"), "dw"));
    }
    Ok(intersection(&included, &excluded))
}

/// Expression of the whole texts in which `pattern` matches somewhere. `None` if it cannot be enforced.
fn whole_match(pattern: &str, strict: bool, path: &str) -> Result<Option<String>, FormatError> {
    let pattern = regex_to_lark(&match_whole(pattern), "dw");
    let expression = RegexAst::Regex(pattern.clone());
    Ok(expressions::can_enforce(&expression, strict.then_some("tool"), path)?.then_some(pattern))
}

/// Turns `pattern`, which may match anywhere in a text, into an expression that matches the whole text.
fn match_whole(pattern: &str) -> String {
    // Python writes a flag at the start.
    let (flag, pattern) = pattern.strip_prefix("(?i)").map_or(("", pattern), |rest| ("(?i)", rest));
    let alternatives = top_level_alternatives(pattern).into_iter().map(|alternative| {
        let (inner, before) = alternative.strip_prefix('^').map_or((alternative, "(?s:.*)"), |rest| (rest, ""));
        // A dollar after a backslash is a literal.
        let end = inner.strip_suffix('$').filter(|rest| !rest.ends_with('\\'));
        let (inner, after) = end.map_or((inner, "(?s:.*)"), |rest| (rest, ""));
        format!("{before}(?:{inner}){after}")
    });
    flag.to_owned() + &alternatives.collect::<Vec<_>>().join("|")
}

/// A Lark literal. Lark writes strings as JSON does.
pub fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fancy_regex::Regex;
    use test_support::mutate::Dice;

    #[test]
    fn long_text_has_no_tag() {
        let with_tag = Regex::new(WITH_TAG).unwrap();
        let [any, long] = [0, 4].map(|min| Regex::new(&format!("^(?:{})$", long_text(min).trim_matches('/'))).unwrap());
        let mut dice = Dice(1);
        let mut tags = 0;
        for _ in 0..3000 {
            let mut text = String::new();
            for _ in 0..dice.below(6) {
                let tag = *dice.pick(&TAGS);
                let start = &tag[..dice.below(tag.len() + 1)];
                text += ["<", "a", "é\n", "/", start, &tag[1..], tag][dice.below(7)];
            }
            let has_tag = with_tag.is_match(&text).unwrap();
            assert_eq!(any.is_match(&text).unwrap(), !has_tag, "{text:?}");
            let is_long = text.chars().count() >= 4 && !has_tag;
            assert!(is_long || !long.is_match(&text).unwrap(), "{text:?}");
            assert!(!is_long || text.contains('<') || long.is_match(&text).unwrap(), "{text:?}");
            tags += usize::from(has_tag);
        }
        assert!((500..2500).contains(&tags), "{tags}");
    }
}
