//! Finds out what llguidance can do with regular expressions.

use super::{
    format::{FormatError, plain_reason},
    string_formats,
};
use llguidance::{
    derivre::{RegexAst, RegexBuilder},
    regex_to_lark,
};
use serde_json::{Map, Value};

/// Maximum number of steps to find out whether an expression matches any text. llguidance has the same maximum.
const MAX_EMPTINESS_FUEL: u64 = 10_000;

/// Returns true if a pattern compiles. If it does not, returns an error if `strict` names what is strict. Otherwise
/// returns false, and the caller leaves the pattern out.
pub fn can_enforce(pattern: &RegexAst, strict: Option<&str>, path: &str) -> Result<bool, FormatError> {
    match (RegexBuilder::new().mk(pattern), strict) {
        (Err(error), Some(what)) => {
            let reason = plain_reason(&error.to_string());
            Err(FormatError::new(path, format!("the pattern cannot be enforced in a strict {what}: {reason}")))
        }
        (compiled, _) => Ok(compiled.is_ok()),
    }
}

/// True if no text matches all patterns. `None` if that takes too many steps to find out.
pub fn is_empty(patterns: Vec<RegexAst>) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let all = builder.mk(&RegexAst::And(patterns)).ok()?;
    Some(builder.to_regex_limited(all, MAX_EMPTINESS_FUEL).ok()?.always_empty())
}

/// True if patterns, or a format, together with limits of a text's length are too complex to be compiled.
pub fn has_complex_length(patterns: &[String], schema: &Map<String, Value>) -> bool {
    let count = |key: &str| schema.get(key).and_then(Value::as_u64);
    let min = count("minLength");
    let max = count("maxLength");
    let format = schema.get("format").and_then(Value::as_str).and_then(string_formats::expression);
    let patterns = patterns.iter().cloned().chain(format.map(|format| format!("^({format})$")));
    let mut all: Vec<_> = patterns.map(|pattern| RegexAst::SearchRegex(regex_to_lark(&pattern, "dw"))).collect();
    if all.is_empty() || min.is_none() && max.is_none() {
        return false;
    }
    let max = max.map_or_else(String::new, |max| max.to_string());
    all.push(RegexAst::Regex(format!("(?s:.{{{},{max}}})", min.unwrap_or(0))));
    is_empty(all).is_none()
}
