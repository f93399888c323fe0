//! Finds out what llguidance can do with regular expressions.

use super::format::{FormatError, plain_reason};
use llguidance::{
    derivre::{Regex, RegexAst, RegexBuilder},
    regex_to_lark,
};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Maximum number of steps to find out whether an expression matches any text. llguidance has the same maximum.
const MAX_EMPTINESS_FUEL: u64 = 10_000;
/// Maximum number of such steps for the lengths of all parts of a schema.
const MAX_LENGTH_FUEL: u64 = 300_000;
/// Larger maximum lengths are ignored if the schema is not strict.
pub const MAX_LENGTH: u64 = 1_000_000;

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
    Some(intersection(patterns)?.always_empty())
}

fn intersection(patterns: Vec<RegexAst>) -> Option<Regex> {
    let mut builder = RegexBuilder::new();
    let all = builder.mk(&RegexAst::And(patterns)).ok()?;
    builder.to_regex_limited(all, MAX_EMPTINESS_FUEL).ok()
}

/// Patterns of a text, and its minimum and maximum length.
type CheckedLimits = (Vec<String>, Option<u64>, Option<u64>);

/// Finds out whether the limits of texts in one schema can be compiled.
pub struct LengthChecker {
    known: HashMap<CheckedLimits, bool>,
    fuel_left: u64,
}

impl LengthChecker {
    pub fn new() -> Self {
        Self { known: HashMap::new(), fuel_left: MAX_LENGTH_FUEL }
    }

    /// True if patterns together with limits of a text's length are too complex to be compiled, or if no
    /// steps are left to find out.
    pub fn is_complex(&mut self, patterns: &[String], schema: &Map<String, Value>) -> bool {
        let count = |key: &str| schema.get(key).and_then(Value::as_u64);
        let min = count("minLength");
        let max = count("maxLength");
        if patterns.is_empty() || min.is_none() && max.is_none() {
            return false;
        }
        let limits = (patterns.to_vec(), min, max);
        if let Some(known) = self.known.get(&limits) {
            return *known;
        }
        if self.fuel_left == 0 {
            return true;
        }
        let texts = limits.0.iter().map(|pattern| RegexAst::SearchRegex(regex_to_lark(pattern, "dw")));
        let max = max.map_or_else(String::new, |max| max.to_string());
        let length = RegexAst::Regex(format!("(?s:.{{{},{max}}})", min.unwrap_or(0)));
        let both = intersection(texts.chain([length]).collect());
        let fuel = both.as_ref().map_or(MAX_EMPTINESS_FUEL, Regex::cost);
        self.fuel_left = self.fuel_left.saturating_sub(fuel);
        self.known.insert(limits, both.is_none());
        both.is_none()
    }
}
