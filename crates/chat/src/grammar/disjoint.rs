//! Finds out whether the alternatives of a `oneOf` exclude each other. llguidance supports only `anyOf`, which means
//! the same as `oneOf` for such alternatives.

use crate::schema::Document;
use serde_json::Value;

/// Maximum number of alternatives that are compared pairwise.
const MAX_ALTERNATIVES: usize = 256;

/// True if the types and tags of the alternatives show that a value can match only one alternative. A tag is a required
/// property with one allowed value.
pub fn are_disjoint(alternatives: &[Value], document: &Document<'_>) -> bool {
    let resolve = |alternative| document.target(alternative).unwrap_or(alternative);
    let resolved: Vec<&Value> = alternatives.iter().map(resolve).collect();
    alternatives.len() <= MAX_ALTERNATIVES
        && resolved.iter().enumerate().all(|(at, one)| resolved[..at].iter().all(|other| differ(one, other)))
}

fn differ(one: &Value, other: &Value) -> bool {
    match (types(one), types(other)) {
        (Some(ours), Some(theirs)) if !ours.iter().any(|kind| theirs.contains(kind)) => true,
        _ => have_different_tags(one, other),
    }
}

/// The types that a schema allows. `integer` counts as `number`.
fn types(schema: &Value) -> Option<Vec<&str>> {
    let names: Vec<&str> = match schema.get("type")? {
        Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
        name => vec![name.as_str()?],
    };
    Some(names.into_iter().map(|name| if name == "integer" { "number" } else { name }).collect())
}

fn have_different_tags(one: &Value, other: &Value) -> bool {
    let properties = one.get("properties").and_then(Value::as_object).into_iter().flatten();
    let mut names = properties.map(|(name, _)| name);
    names.any(|name| matches!((tag(one, name), tag(other, name)), (Some(ours), Some(theirs)) if ours != theirs))
}

/// The only allowed value of a required property of an object.
fn tag<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    let is_object = schema.get("type").is_some_and(|kind| kind == "object");
    let is_required = schema.get("required")?.as_array()?.iter().any(|required| required == name);
    let property = schema.get("properties")?.get(name)?;
    let only = property.get("const").or_else(|| match property.get("enum")?.as_array()?.as_slice() {
        [only] => Some(only),
        _ => None,
    });
    only.filter(|_| is_object && is_required)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tagged(tag: &str) -> Value {
        json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": tag}, "x": {"type": "string"}}})
    }

    #[test]
    fn types_and_tags_make_alternatives_disjoint() {
        let root = json!({"$defs": {"cat": tagged("cat"), "dog": tagged("dog")}});
        let optional = json!({"type": "object", "properties": {"kind": {"const": "bird"}}});
        for (alternatives, disjoint) in [
            (json!([{"type": "string"}, {"type": "null"}, {"type": "integer"}]), true),
            (json!([{"type": "integer"}, {"type": "number"}]), false),
            (json!([{"type": ["string", "null"]}, {"type": "null"}]), false),
            (json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "string"}]), true),
            (json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}]), false),
            (json!([tagged("cat"), optional]), false),
            (json!([{"minimum": 1}, {"type": "string"}]), false),
            (json!([]), true),
        ] {
            assert_eq!(
                are_disjoint(alternatives.as_array().unwrap(), &Document::new(&root)),
                disjoint,
                "{alternatives}"
            );
        }
    }
}
