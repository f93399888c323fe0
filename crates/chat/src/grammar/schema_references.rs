//! Limits on the intersections and multiples of a prepared JSON schema.
//!
//! If `allOf`, or a keyword next to a `$ref`, restricts one value several times, llguidance intersects the patterns.
//! Each pattern multiplies the size of the automaton. The automaton of a `multipleOf` has a state for each remainder,
//! and llguidance checks no limit while it compiles that automaton.

use super::format::FormatError;
use crate::schema::{Document, WITH_OBJECT};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Maximum number of patterns and formats that one value must match.
const MAX_INTERSECTED_PATTERNS: usize = 8;
/// Largest `multipleOf`, written without its decimal point.
const MAX_MULTIPLE: f64 = 4000.0;
/// Largest power of ten by which a `multipleOf` is scaled to write it without its decimal point (eight decimals).
const MAX_SCALE: f64 = 1e8;
/// Maximum number of parts of a schema that are visited to count patterns.
const MAX_VISITS: usize = 1_000_000;

/// Keywords whose value is a schema.
const WITH_SCHEMA: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords whose value is an array of schemas.
const WITH_ARRAY: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];

/// Checks the intersections and multiples of a prepared schema.
///
/// # Errors
/// A `multipleOf` has too many digits, or too many patterns or multiples apply to one value.
pub fn check(root: &Value) -> Result<(), FormatError> {
    check_intersections(&Document::new(root), root, "", &mut MAX_VISITS.clone())
}

/// The direct subschemas of a prepared schema: their keywords, their names or indices, and the parts.
pub fn subschemas(schema: &Value) -> Vec<(&str, String, &Value)> {
    let mut parts = Vec::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        match value {
            Value::Object(named) if WITH_OBJECT.contains(&key.as_str()) => {
                parts.extend(named.iter().map(|(name, part)| (key.as_str(), format!(".{name}"), part)));
            }
            Value::Array(many) if WITH_ARRAY.contains(&key.as_str()) || key == "items" => {
                parts.extend(many.iter().enumerate().map(|(at, part)| (key.as_str(), format!("[{at}]"), part)));
            }
            Value::Object(_) if WITH_SCHEMA.contains(&key.as_str()) => parts.push((key, String::new(), value)),
            _ => {}
        }
    }
    parts
}

fn check_intersections<'a>(
    document: &Document<'a>,
    schema: &'a Value,
    path: &str,
    visits: &mut usize,
) -> Result<(), FormatError> {
    let Value::Object(fields) = schema else { return Ok(()) };
    if let Some(divisor) = fields.get("multipleOf").and_then(Value::as_f64) {
        let (coefficient, _) = decimal(divisor);
        if coefficient.fract() != 0.0 || coefficient > MAX_MULTIPLE {
            let reason = format!("its digits are a number above {MAX_MULTIPLE}, or it has more than eight decimals");
            return Err(FormatError::new(&format!("{path}.multipleOf"), reason));
        }
    }
    if intersects(fields) {
        let mut counts = HashMap::new();
        count_patterns(document, schema, "", &mut counts, &mut HashSet::new(), visits);
        let are_many = |multiples: &[f64]| multiples.len() > 1 && multiples.iter().product::<f64>() > MAX_MULTIPLE;
        if counts.values().any(|counted| are_many(&counted.multiples)) {
            let reason = "one value must be a multiple of several numbers whose product is too large";
            return Err(FormatError::new(path, reason));
        }
        if *visits == 0 || counts.values().any(|counted| counted.patterns > MAX_INTERSECTED_PATTERNS) {
            let reason = format!("one value must match more than {MAX_INTERSECTED_PATTERNS} patterns or formats");
            return Err(FormatError::new(path, reason));
        }
    }
    for (key, name, part) in subschemas(schema) {
        check_intersections(document, part, &format!("{path}.{key}{name}"), visits)?;
    }
    Ok(())
}

/// Counts the restrictions of `schema` by the name of the property that they apply to. The count is an upper bound,
/// because it adds up the restrictions of alternatives, and of properties with the same name on different levels.
fn count_patterns<'a>(
    document: &Document<'a>,
    schema: &'a Value,
    property: &str,
    counts: &mut HashMap<String, Restrictions>,
    followed: &mut HashSet<*const Value>,
    visits: &mut usize,
) {
    *visits = visits.saturating_sub(1);
    let Value::Object(fields) = schema else { return };
    if *visits == 0 {
        return;
    }
    let counted = counts.entry(property.to_owned()).or_default();
    counted.patterns += usize::from(fields.contains_key("pattern"));
    if let Some(divisor) = fields.get("multipleOf").and_then(Value::as_f64) {
        let (coefficient, scale) = decimal(divisor);
        counted.multiples.push(coefficient * scale);
    }
    if let Some(target) = document.target(schema).filter(|target| followed.insert(std::ptr::from_ref(*target))) {
        count_patterns(document, target, property, counts, followed, visits);
    }
    for (key, name, part) in subschemas(schema) {
        let name = match key {
            "properties" => name.as_str(),
            "patternProperties" | "additionalProperties" => "*",
            "anyOf" | "oneOf" | "allOf" => property,
            "$defs" => continue,
            _ => "[]",
        };
        count_patterns(document, part, name, counts, followed, visits);
    }
}

/// Restrictions of one value.
#[derive(Default)]
struct Restrictions {
    /// Number of patterns, also of formats.
    patterns: usize,
    /// The `multipleOf` numbers. Their product is an upper bound for the number of remainders of all together.
    multiples: Vec<f64>,
}

/// Returns a number as an integer and the power of ten that divides it. If the number has too many decimals, the first
/// value is not an integer.
fn decimal(number: f64) -> (f64, f64) {
    let mut coefficient = number.abs();
    let mut scale = 1.0;
    while coefficient.fract() != 0.0 && scale < MAX_SCALE {
        coefficient *= 10.0;
        scale *= 10.0;
    }
    (coefficient, scale)
}

/// True if several parts of the schema restrict the same value.
fn intersects(fields: &Map<String, Value>) -> bool {
    let applicators = ["$ref", "anyOf", "oneOf", "allOf"].iter().filter(|key| fields.contains_key(**key)).count();
    let all_of = fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    let own = ["pattern", "multipleOf", "properties", "items", "prefixItems", "additionalProperties"];
    all_of > 1 || applicators > 1 || applicators == 1 && own.iter().any(|key| fields.contains_key(*key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn reason(schema: Value) -> Option<String> {
        check(&schema).err().map(|error| error.reason)
    }

    #[test]
    fn multiples_are_bounded() {
        for divisor in [0.01, 0.5, 1.25, 7.0, 3600.0, 4000.0] {
            assert_eq!(reason(json!({"properties": {"a": {"multipleOf": divisor}}})), None, "{divisor}");
        }
        for divisor in [4001.0, 1e9, 40.001, 1e-9, 1e-300, 1e300] {
            assert!(reason(json!({"items": {"multipleOf": divisor}})).unwrap().contains("digits"), "{divisor}");
        }
        let both = |a: f64, b: f64| reason(json!({"allOf": [{"multipleOf": a}, {"multipleOf": b}]}));
        assert_eq!(both(7.0, 60.0), None);
        assert!(both(997.0, 991.0).unwrap().contains("product") && both(0.001, 991.0).unwrap().contains("product"));
        let reference = json!({"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 991}}});
        assert!(reason(reference).unwrap().contains("product"));
    }

    #[test]
    fn intersected_patterns_are_bounded() {
        let patterns = |count| (0..count).map(|i| json!({"pattern": format!("a.{{{i}}}")})).collect::<Vec<_>>();
        assert_eq!(reason(json!({"allOf": patterns(4)})), None);
        assert!(reason(json!({"allOf": patterns(30)})).unwrap().contains("patterns"));
        let objects = |count| {
            patterns(count).into_iter().map(|pattern| json!({"properties": {"a": pattern}})).collect::<Vec<_>>()
        };
        assert!(reason(json!({"properties": {"x": {"allOf": objects(30)}}})).unwrap().contains("patterns"));
        // Patterns of different properties are not intersected, and neither are patterns of alternatives.
        let properties: Map<String, Value> =
            patterns(30).into_iter().enumerate().map(|(i, pattern)| (format!("p{i}"), pattern)).collect();
        assert_eq!(reason(json!({"allOf": [{"properties": properties}, {"required": ["p1"]}]})), None);
        assert_eq!(reason(json!({"anyOf": patterns(30)})), None);
        // A chain of references, each with a pattern next to it.
        let defs: Map<String, Value> = (0..30)
            .map(|i| (format!("d{i}"), json!({"pattern": "a", "$ref": format!("#/$defs/d{}", i + 1)})))
            .collect();
        assert!(reason(json!({"$ref": "#/$defs/d0", "$defs": defs})).unwrap().contains("patterns"));
    }
}
