//! A JSON Schema validator for the tests, independent of llguidance. The validator ignores formats.

use serde_json::{Map, Value};

/// The violations in `value`. Empty if `value` is valid.
pub fn errors(schema: &Value, value: &Value, root: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    let schema = match schema {
        Value::Bool(true) => return wrong,
        Value::Bool(false) => return vec![format!("{value} where no value is allowed")],
        _ => schema,
    };
    if value.is_null() && schema.get("nullable") == Some(&Value::Bool(true)) {
        return wrong;
    }
    let mut must = |holds: bool, what: &str| {
        if !holds {
            wrong.push(format!("{what}: {value}"));
        }
    };
    let valid = |part: &Value, value: &Value| errors(part, value, root).is_empty();
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    let is = |kind: &Value| match kind.as_str().unwrap() {
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    };
    match schema.get("type") {
        Some(Value::Array(kinds)) => must(kinds.iter().any(is), "type"),
        Some(kind) => must(is(kind), "type"),
        None => {}
    }
    let equal = |other: &Value| other == value || other.as_f64().is_some_and(|x| value.as_f64() == Some(x));
    must(list("enum").is_none_or(|values| values.iter().any(equal)), "enum");
    must(schema.get("const").is_none_or(equal), "const");
    must(list("anyOf").is_none_or(|parts| parts.iter().any(|part| valid(part, value))), "anyOf");
    must(list("allOf").is_none_or(|parts| parts.iter().all(|part| valid(part, value))), "allOf");
    must(list("oneOf").is_none_or(|parts| parts.iter().filter(|part| valid(part, value)).count() == 1), "oneOf");
    must(schema.get("not").is_none_or(|part| !valid(part, value)), "not");
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        must(valid(target(reference, root).unwrap(), value), "$ref");
    }
    if let Some(x) = value.as_f64() {
        must(number("minimum").is_none_or(|least| x >= least), "minimum");
        must(number("maximum").is_none_or(|most| x <= most), "maximum");
        must(number("exclusiveMinimum").is_none_or(|least| x > least), "exclusiveMinimum");
        must(number("exclusiveMaximum").is_none_or(|most| x < most), "exclusiveMaximum");
        must(number("multipleOf").is_none_or(|of| (x / of).fract() == 0.0), "multipleOf");
    }
    let counted = |count: usize, [least, most]: [&str; 2]| {
        number(least).is_none_or(|least| count as f64 >= least) && number(most).is_none_or(|most| count as f64 <= most)
    };
    if let Some(text) = value.as_str() {
        must(counted(text.chars().count(), ["minLength", "maxLength"]), "length");
        let pattern = schema.get("pattern").and_then(Value::as_str);
        must(
            pattern.is_none_or(|pattern| fancy_regex::Regex::new(pattern).unwrap().is_match(text).unwrap()),
            "pattern",
        );
    }
    if let Some(items) = value.as_array() {
        must(counted(items.len(), ["minItems", "maxItems"]), "items");
        let unique = schema.get("uniqueItems") == Some(&Value::Bool(true));
        must(!unique || items.iter().enumerate().all(|(at, item)| !items[..at].contains(item)), "uniqueItems");
        let prefix = list("prefixItems").map_or(&[][..], Vec::as_slice);
        let rest = schema.get("items").unwrap_or(&Value::Bool(true));
        for (index, item) in items.iter().enumerate() {
            must(valid(prefix.get(index).unwrap_or(rest), item), "item");
        }
    }
    if let Some(fields) = value.as_object() {
        must(counted(fields.len(), ["minProperties", "maxProperties"]), "properties");
        let named = |key: &str| schema.get(key).and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
        let properties = named("properties");
        let patterns = named("patternProperties");
        for name in list("required").into_iter().flatten() {
            must(fields.contains_key(name.as_str().unwrap()), "required");
        }
        for (name, field) in fields {
            must(schema.get("propertyNames").is_none_or(|part| valid(part, &name.as_str().into())), "propertyNames");
            let mut known = properties.get(name).into_iter().collect::<Vec<_>>();
            known.extend(
                patterns
                    .iter()
                    .filter(|(pattern, _)| fancy_regex::Regex::new(pattern).unwrap().is_match(name).unwrap())
                    .map(|(_, part)| part),
            );
            if known.is_empty() {
                known.extend(schema.get("additionalProperties"));
            }
            must(known.iter().all(|part| valid(part, field)), name);
        }
    }
    wrong
}

/// The part of `root` with this pointer, anchor or `$id`.
fn target<'a>(reference: &str, root: &'a Value) -> Option<&'a Value> {
    let (id, fragment) = reference.split_once('#').unwrap_or((reference, ""));
    if !id.is_empty() {
        let resource = find(root, "$id", id)?;
        return if fragment.is_empty() { Some(resource) } else { target(&format!("#{fragment}"), resource) };
    }
    let decoded = fragment.replace("%3C", "<").replace("%3E", ">").replace("%20", " ");
    if fragment.is_empty() || fragment.starts_with('/') {
        root.pointer(&decoded)
    } else {
        find(root, "$anchor", fragment)
    }
}

fn find<'a>(part: &'a Value, keyword: &str, name: &str) -> Option<&'a Value> {
    if part.get(keyword).is_some_and(|known| known == name) {
        return Some(part);
    }
    match part {
        Value::Object(fields) => fields.values().find_map(|part| find(part, keyword, name)),
        Value::Array(items) => items.iter().find_map(|part| find(part, keyword, name)),
        _ => None,
    }
}
