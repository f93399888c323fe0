//! The limits of a string.

use serde_json::{Map, Value};

/// The limits that a string must keep. All limits are optional.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextLimits {
    /// Minimum number of characters.
    pub min: u64,
    /// Maximum number of characters.
    pub max: Option<u64>,
    /// Regular expressions that match somewhere in the string.
    pub patterns: Vec<String>,
    pub formats: Vec<String>,
}

impl TextLimits {
    /// The limits in the keywords of one schema.
    pub fn of(schema: &Map<String, Value>) -> Self {
        let texts = |key| schema.get(key).and_then(Value::as_str).map(str::to_owned).into_iter().collect();
        Self {
            min: schema.get("minLength").and_then(Value::as_u64).unwrap_or(0),
            max: schema.get("maxLength").and_then(Value::as_u64),
            patterns: texts("pattern"),
            formats: texts("format"),
        }
    }

    /// True if every string keeps the limits.
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }

    /// The limits that a string keeps if it keeps both.
    pub fn and(&self, other: &Self) -> Self {
        let both = |ours: &[String], theirs: &[String]| {
            let mut all = ours.to_vec();
            all.extend(theirs.iter().filter(|text| !ours.contains(text)).cloned());
            all
        };
        Self {
            min: self.min.max(other.min),
            max: self.max.into_iter().chain(other.max).min(),
            patterns: both(&self.patterns, &other.patterns),
            formats: both(&self.formats, &other.formats),
        }
    }

    /// A function that returns true for a word that keeps the limits. Formats are not checked. A pattern that does not
    /// compile is ignored.
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
