//! The limits of a string.

use super::string_formats::format_pattern;
use serde_json::{Map, Value};

/// The limits that a string must keep. All limits are optional.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextLimits {
    /// Minimum number of characters.
    pub min: u64,
    /// Maximum number of characters.
    pub max: Option<u64>,
    /// Regular expressions that match somewhere in the string, also those of formats.
    pub patterns: Vec<String>,
}

impl TextLimits {
    /// The limits in the keywords of one schema.
    pub fn of(schema: &Map<String, Value>) -> Self {
        let text = |key| schema.get(key).and_then(Value::as_str);
        // Constants are listed whatever their format is.
        let is_listed = schema.contains_key("enum") || schema.contains_key("const");
        let format = text("format").filter(|_| !is_listed).and_then(format_pattern);
        Self {
            min: schema.get("minLength").and_then(Value::as_u64).unwrap_or(0),
            max: schema.get("maxLength").and_then(Value::as_u64),
            patterns: text("pattern").map(str::to_owned).into_iter().chain(format).collect(),
        }
    }

    /// True if every string keeps the limits.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }

    /// The limits that a string keeps if it keeps both.
    pub fn and(&self, other: &Self) -> Self {
        let mut patterns = self.patterns.clone();
        patterns.extend(other.patterns.iter().filter(|pattern| !self.patterns.contains(pattern)).cloned());
        Self { min: self.min.max(other.min), max: self.max.into_iter().chain(other.max).min(), patterns }
    }

    /// A function that returns true for a word that keeps the limits. A pattern that does not compile is ignored.
    pub fn matcher(&self) -> impl Fn(&str) -> bool {
        let patterns: Vec<_> =
            self.patterns.iter().filter_map(|pattern| fancy_regex::Regex::new(pattern).ok()).collect();
        move |word| {
            let length = word.chars().count() as u64;
            let has_length = self.min <= length && self.max.is_none_or(|max| length <= max);
            has_length && patterns.iter().all(|pattern| pattern.is_match(word).unwrap_or(true))
        }
    }
}
