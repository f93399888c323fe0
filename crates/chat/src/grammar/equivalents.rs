//! Keywords that llguidance does not have, written with keywords that it has and that mean the same.

use crate::schema::{Document, TextLimits, TypeSet, ValueType};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Maximum number of arrays that `uniqueItems` becomes: those of five constants are 326.
const MAX_ARRAYS: usize = 400;
/// Maximum number of required properties of all alternatives of a `oneOf`.
const MAX_NAMES: usize = 64;
/// Maximum number of bytes of JSON of these arrays.
const MAX_BYTES: usize = 32 << 10;
/// Maximum number of bytes of a name.
const MAX_NAME: usize = 250;

/// Replaces `uniqueItems` in `prepared`, a prepared schema. `items` has the values of the items. Returns false if that
/// is not possible.
pub fn replace_unique_items(prepared: &mut Map<String, Value>, items: Option<&ValueType>) -> bool {
    let count = |key: &str| prepared.get(key).and_then(Value::as_u64);
    let min = count("minItems").unwrap_or(0) as usize;
    let max = count("maxItems").map_or(usize::MAX, |max| max as usize);
    if max <= 1 {
        return true;
    }
    let is_list = prepared.get("type").is_some_and(|kind| kind == "array");
    let has_others = ["prefixItems", "enum", "const"].iter().any(|key| prepared.contains_key(*key));
    let constants = items.filter(|_| is_list && !has_others).and_then(constants);
    let Some(arrays) = constants.and_then(|constants| unique_arrays(&constants, min, max)) else { return false };
    // The items may have limits that their constants do not keep.
    let kept = usize::from(items.is_some_and(|items| !TypeSet::NULL.or(TypeSet::BOOLEAN).has(items.others)));
    ["items", "minItems", "maxItems"][kept..].iter().for_each(|key| _ = prepared.shift_remove(*key));
    prepared.insert("enum".into(), arrays.into());
    true
}

/// Lists values. `None` if they are not listed.
fn constants(value: &ValueType) -> Option<Vec<Value>> {
    let others = [(TypeSet::NULL, Value::Null), (TypeSet::TRUE, true.into()), (TypeSet::FALSE, false.into())];
    let listed = value.constants().filter(|_| value.texts.is_empty())?;
    let words: BTreeSet<&String> = value.words.iter().collect();
    let words = words.into_iter().map(|word| Value::from(word.as_str()));
    let others = others.into_iter().filter(|(kind, _)| value.others.has(*kind)).map(|(_, value)| value);
    Some(words.chain(others).chain(listed).collect())
}

/// All arrays of `min` to `max` different constants. `None` if they are too many or too large.
fn unique_arrays(constants: &[Value], min: usize, max: usize) -> Option<Vec<Value>> {
    let mut arrays: Vec<Vec<&Value>> = vec![Vec::new()];
    let mut start = 0;
    for _ in 0..max.min(constants.len()) {
        let end = arrays.len();
        for at in start..end {
            let longer = constants.iter().filter(|constant| !arrays[at].contains(constant));
            let longer: Vec<_> = longer.map(|constant| [&arrays[at][..], &[constant]].concat()).collect();
            arrays.extend(longer);
            if arrays.len() > MAX_ARRAYS {
                return None;
            }
        }
        start = end;
    }
    let arrays: Vec<Value> = arrays.into_iter().filter(|array| array.len() >= min).map(|array| json!(array)).collect();
    serde_json::to_string(&arrays).is_ok_and(|json| json.len() <= MAX_BYTES).then_some(arrays)
}

/// Replaces `propertyNames`, which allows `names`, in `prepared`, a prepared schema. `values` is the schema of
/// properties that are not listed. Returns false if that is not possible.
pub fn replace_property_names(
    prepared: &mut Map<String, Value>,
    names: &ValueType,
    values: &Value,
    can_enforce: impl Fn(&str) -> bool,
) -> bool {
    let has = |key: &str| prepared.get(key).and_then(Value::as_object).is_some_and(|parts| !parts.is_empty());
    let (key, parts) = match &names.texts[..] {
        _ if has("patternProperties") => return false,
        [] if names.words.iter().all(|word| word.len() <= MAX_NAME) => {
            let mut properties = prepared.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
            for (_, part) in properties.iter_mut().filter(|(name, _)| !names.words.contains(name)) {
                *part = Value::Bool(false);
            }
            for word in &names.words {
                properties.entry(word).or_insert_with(|| values.clone());
            }
            ("properties", properties)
        }
        [text] => match &patterns(text)[..] {
            [] => return true,
            [pattern] if names.words.is_empty() && !has("properties") && can_enforce(pattern) => {
                ("patternProperties", Map::from_iter([(pattern.clone(), values.clone())]))
            }
            _ => return false,
        },
        _ => return false,
    };
    prepared.insert(key.into(), parts.into());
    prepared.insert("additionalProperties".into(), false.into());
    true
}

/// Regular expressions of a text's limits.
fn patterns(text: &TextLimits) -> Vec<String> {
    let mut patterns = text.patterns.clone();
    if (text.min, text.max) != (0, None) {
        let max = text.max.map_or_else(String::new, |max| max.to_string());
        patterns.push(format!("^(?s:.{{{},{max}}})$", text.min));
    }
    patterns
}

/// A part for each alternative of a `oneOf` whose alternatives require different properties. An alternative with its
/// part excludes every other one, because it lacks a property of each. `None` if that is not possible.
pub fn excluding_parts<'a>(one_of: &'a [Value], document: &Document<'a>) -> Option<Vec<Value>> {
    let lists: Vec<Vec<&str>> = one_of.iter().map(|one| required(one, document)).collect::<Option<_>>()?;
    if lists.iter().map(|names| names.len().max(1)).sum::<usize>() > MAX_NAMES {
        return None;
    }
    let parts = lists.iter().enumerate().map(|(at, own)| {
        let others = lists.iter().enumerate().filter(|(other, _)| *other != at);
        let missing = others.map(|(_, names)| names.iter().find(|name| !own.contains(name)));
        let absent = missing.map(|name| Some(((*name?).to_owned(), Value::Bool(false))));
        let absent: Map<String, Value> = absent.collect::<Option<_>>()?;
        Some(json!({"type": "object", "required": own, "properties": absent}))
    });
    parts.collect()
}

/// The names that an object requires, also if `schema` is a reference.
fn required<'a>(schema: &'a Value, document: &Document<'a>) -> Option<Vec<&'a str>> {
    let named = schema.get("required").or_else(|| document.target(schema)?.get("required"));
    named?.as_array()?.iter().map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::super::json_schema::prepare;
    use serde_json::{Value, json};

    #[test]
    fn keywords_have_equivalents() {
        let list = |items: Value| json!({"type": "array", "items": items, "uniqueItems": true});
        let map =
            |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "null"}});
        let nulls = json!({"$ref": "#/$defs/additionalProperties"});
        let mut short = list(json!({"enum": ["a", "b", "c"]}));
        short["maxItems"] = 1.into();
        let mut pairs = list(json!({"anyOf": [{"enum": ["b", "a"]}, {"type": "null"}]}));
        pairs["minItems"] = 2.into();
        pairs["maxItems"] = 2.into();
        // Pydantic does not require a tag that has a default.
        let tagged = |tag: &str| json!({"type": "object", "properties": {"kind": {"const": tag, "default": tag}}});
        let required = |tag: &str| json!({"allOf": [{"type": "object", "properties": {"kind": {"const": tag}}}, {"required": ["kind"]}]});
        let pets = json!({"oneOf": [tagged("cat"), tagged("dog")], "discriminator": {"propertyName": "kind"}});
        assert_eq!(prepare(&pets, false).unwrap()["anyOf"], json!([required("cat"), required("dog")]));
        let mut optional = pets.clone();
        optional["oneOf"].as_array_mut().unwrap().push(json!({"type": "null"}));
        for strict in [false, true] {
            let prepared = prepare(&optional, strict).unwrap();
            let none = json!({"allOf": [{"type": "null"}, {"required": ["kind"]}]});
            assert_eq!(prepared["anyOf"], json!([required("cat"), required("dog"), none]));
        }
        let mut unset = map(json!({"enum": ["a"]}));
        unset["additionalProperties"] = Value::Null;
        let mut named = json!({"type": "object", "patternProperties": {"^x": {"type": "null"}}});
        named["propertyNames"] = Value::Null;
        let record = |names: Value| {
            json!({"type": "object", "required": [], "properties": {}, "propertyNames": names,
            "patternProperties": {"": {"type": "null"}}})
        };
        for (schema, key, expected) in [
            (record(json!({"type": "string", "pattern": "^x"})), "patternProperties", json!({"^x": nulls})),
            (record(json!({"enum": ["a"]})), "properties", json!({"a": nulls})),
            (record(json!({"type": "string"})), "additionalProperties", json!({"type": "null"})),
            (unset, "properties", json!({"a": true})),
            (named, "patternProperties", json!({"^x": {"type": "null"}})),
            (pets, "anyOf", json!([required("cat"), required("dog")])),
            (list(json!({"type": "boolean"})), "enum", json!([[], [true], [false], [true, false], [false, true]])),
            (pairs, "enum", json!([["a", "b"], ["a", null], ["b", "a"], ["b", null], [null, "a"], [null, "b"]])),
            (list(json!({"type": "integer", "enum": [2, 1]})), "enum", json!([[], [1], [2], [1, 2], [2, 1]])),
            (list(json!({"const": 1.5})), "enum", json!([[], [1.5]])),
            (short, "enum", Value::Null),
            (map(json!({"enum": ["a", "b"]})), "properties", json!({"a": nulls, "b": nulls})),
            (map(json!({"pattern": "^x"})), "patternProperties", json!({"^x": nulls})),
            (map(json!({"minLength": 2})), "patternProperties", json!({"^(?s:.{2,})$": nulls})),
            (map(json!({"type": "string"})), "patternProperties", Value::Null),
            (map(json!(true)), "patternProperties", Value::Null),
            (
                json!({"oneOf": [{"required": ["a", "b"]}, {"required": ["b", "c"]}]}),
                "anyOf",
                json!([
                    {"allOf": [{"required": ["a", "b"]},
                        {"type": "object", "required": ["a", "b"], "properties": {"c": false}}]},
                    {"allOf": [{"required": ["b", "c"]},
                        {"type": "object", "required": ["b", "c"], "properties": {"a": false}}]},
                ]),
            ),
        ] {
            let prepared = prepare(&schema, true).unwrap();
            assert_eq!(prepared.get(key).unwrap_or(&Value::Null), &expected, "{schema}");
        }
    }

    #[test]
    fn keywords_without_equivalents_are_refused() {
        let words = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
        let list = |items: Value| json!({"type": "array", "items": items, "uniqueItems": true});
        let map = |names: Value| json!({"type": "object", "propertyNames": names, "properties": {"a": {}}});
        for schema in [
            list(json!({"type": "string"})),
            list(json!({"enum": words(6)})),
            list(json!({"enum": ["x".repeat(1000), "y", "z", "v", "w"]})),
            json!({"uniqueItems": true, "items": {"enum": ["a"]}}),
            json!({"type": "array", "uniqueItems": true}),
            map(json!({"pattern": "^a"})),
            map(json!({"anyOf": [{"const": "a"}, {"pattern": "^b"}]})),
            map(json!({"enum": ["a".repeat(70_000)]})),
            map(json!({"not": {"const": "a"}})),
            json!({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 9}}),
            json!({"type": "object", "propertyNames": {"pattern": "^(?!a)"}}),
            json!({"type": "object", "propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}}),
            json!({"propertyNames": {"pattern": "^a"}, "patternProperties": {"": {}}, "properties": {"a": {}}}),
            json!({"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}),
            json!({"oneOf": [{"properties": {"a": {}}}, {}], "discriminator": {"propertyName": "a"}}),
            json!({"oneOf": [{"required": ["a"]}, {"properties": {"b": {}}}]}),
            json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "anyOf": [{"required": ["c"]}]}),
        ] {
            let error = prepare(&schema, true).unwrap_err();
            let keyword = error.path.split('.').nth(1).unwrap();
            assert!(error.reason.contains("strict schema") && schema.get(keyword).is_some(), "{schema}: {error:?}");
            assert!(prepare(&schema, false).is_ok(), "{schema}");
        }
    }

    /// Schemas that would become very large.
    #[test]
    fn equivalents_are_bounded() {
        let words: Vec<String> = (0..400).map(|n| n.to_string()).collect();
        let list = json!({"type": "array", "items": {"enum": &words[..5]}, "uniqueItems": true});
        let names: Vec<Value> = words[..60].iter().map(|name| json!({"required": [name]})).collect();
        let map = json!({"type": "object", "propertyNames": {"enum": words}});
        let nested = (0..12).fold(json!({"type": "null"}), |values, _| {
            json!({"type": "object", "propertyNames": {"enum": &words[..9]}, "additionalProperties": values})
        });
        assert!(prepare(&nested, true).unwrap().to_string().len() < 20_000);
        for schema in [
            json!({"prefixItems": vec![list; 500]}),
            json!({"prefixItems": vec![map; 50]}),
            json!({"prefixItems": vec![json!({"oneOf": names}); 50]}),
        ] {
            assert!(prepare(&schema, true).is_err());
        }
    }
}
