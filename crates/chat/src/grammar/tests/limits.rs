//! Formats that would take seconds or gigabytes to compile.

use super::*;
use crate::schema::{Document, ValueType, normalized};

/// zod's pattern for email addresses.
const EMAIL: &str = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";

/// A schema of an object with `count` names in `keyword`.
fn object(keyword: &str, count: usize, part: &Value) -> Value {
    let named: serde_json::Map<String, Value> = (0..count).map(|i| (format!("p{i}"), part.clone())).collect();
    json!({"type": "object", keyword: named})
}

/// The error of tools that may be called.
fn calls_error(count: usize, parameters: &Value) -> Option<FormatError> {
    let tools: Vec<_> = (0..count).map(|i| tool(&format!("f{i}"), parameters)).collect();
    compile(&call_format(&tools, true)).err()
}

#[test]
fn properties_and_tools_are_bounded() {
    let any = json!({});
    assert!(schema_error(object("properties", 1001, &any)).reason.contains("1000 properties"));
    assert!(schema_error(object("patternProperties", 63, &any)).reason.contains("1000 properties"));
    assert_eq!(calls_error(20, &object("properties", 10, &any)), None);
    assert!(calls_error(129, &object("properties", 1, &any)).unwrap().reason.contains("128"));
    assert_eq!(calls_error(3, &object("properties", 800, &any)).unwrap().tool, Some(2));
}

#[test]
fn alternatives_and_definitions_of_parameters_are_bounded() {
    let mut parameters = object("properties", 100, &json!({}));
    parameters["anyOf"] = (0..60).map(|i| json!({"required": [format!("p{i}")]})).collect();
    assert!(calls_error(1, &parameters).unwrap().reason.contains("2000 parameters"));
    let words: Vec<String> = (0..9000).map(|i| format!("word {i}")).collect();
    let mut parameters = object("properties", 900, &json!({"type": "array", "items": {"$ref": "#/$defs/words"}}));
    parameters["$defs"] = json!({"words": {"enum": words}});
    assert!(calls_error(1, &parameters).unwrap().reason.contains("2000 parameters"));
}

/// Hints that are too complex together are left out. zod's and Pydantic's patterns for email addresses and host names have
/// such lengths.
#[test]
fn complex_lengths_are_no_hints() {
    let patterns =
        [EMAIL, r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$", r"^[a-z]+$"];
    for (pattern, max) in patterns.into_iter().flat_map(|pattern| [9, 255, 2048].map(|max| (pattern, max))) {
        let text = json!({"type": "string", "pattern": pattern, "minLength": 1, "maxLength": max});
        let nested = json!({"type": "object", "properties": {"a": text, "b": {"type": "array", "items": text}}});
        let tool = tool("f", &nested);
        let tools = Some(AllowedTools { tools: vec![(0, tool)], parallel: false });
        for format in [json_format(&nested, false), OutputFormat { content: ContentFormat::Nothing, tools }] {
            assert_eq!(compile(&format).err(), None, "{pattern} {max}");
        }
        let error = compile(&json_format(&nested, true)).err();
        assert!(error.iter().all(|error| max > 9 && error.reason.contains("`maxLength`")), "{error:?}");
        assert!(error.is_some() || (pattern, max) != (EMAIL, 255));
    }
    let short = json!({"type": "string", "pattern": "^[a-z]+$", "maxLength": 9});
    let prepared = json_schema::prepare(&short, false).unwrap();
    assert_eq!((&prepared["pattern"], &prepared["maxLength"]), (&json!("^[a-z]+$"), &json!(9)));
    for value in random_values(&short, false, 20) {
        assert!(value.as_str().unwrap().len() <= 9, "{value}");
    }
    let long = json!({"type": "string", "pattern": "^[a-z]+$", "maxLength": 1_000_001});
    assert_eq!(json_schema::prepare(&long, false).unwrap().get("maxLength"), None);
}

/// Equal parts are checked once, and all parts of a schema share one number of steps.
#[test]
fn checks_of_lengths_are_bounded() {
    let text = |pattern: &str, max: usize| json!({"type": "string", "pattern": pattern, "maxLength": max});
    for (step, expected) in [(0, json!(9)), (1, Value::Null)] {
        let mut parts: Vec<_> = (0..1000).map(|at| text(EMAIL, 255 + at * step)).collect();
        parts.push(text("^[a-z]+$", 9));
        let prepared = json_schema::prepare(&json!({"prefixItems": parts}), false).unwrap();
        assert_eq!(prepared["prefixItems"][0].get("maxLength"), None);
        assert_eq!(prepared["prefixItems"][1000].get("maxLength").unwrap_or(&Value::Null), &expected);
    }
}

#[test]
fn keywords_that_are_null_count_as_absent() {
    for (unset, expected) in [
        (json!({"type": "integer", "minimum": null, "exclusiveMaximum": null}), json!({"type": "integer"})),
        (json!({"type": null, "enum": null, "properties": {}}), json!({"properties": {}})),
        (json!({"properties": null, "items": null}), json!({})),
    ] {
        let value = |schema: &Value| ValueType::of(&[schema], &Document::new(schema));
        let [unset, expected] = [value(&normalized(&unset)), value(&expected)];
        assert_eq!(unset, expected);
    }
}

#[test]
fn unknown_types_are_left_out() {
    let types =
        |types: Value| json_schema::prepare(&json!({"type": types}), false).map(|schema| schema["type"].clone());
    assert_eq!(types(json!(["string", "file"])), Ok(json!(["string"])));
    assert_eq!(types(json!(["file"])), Ok(Value::Null));
    assert_eq!(types(json!("file")), Ok(Value::Null));
    for wrong in [json!(1), json!({}), json!(["string", 1])] {
        assert_eq!(types(wrong).unwrap_err().path, ".type");
    }
}
