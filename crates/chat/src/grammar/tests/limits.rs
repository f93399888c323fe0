//! Formats that would take seconds or gigabytes to compile.

use super::*;

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
