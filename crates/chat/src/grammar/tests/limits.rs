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

/// Hints that are too complex together are left out. zod's and Pydantic's patterns for email addresses and host names have
/// such lengths.
#[test]
fn complex_lengths_are_no_hints() {
    let patterns = [
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$",
        r"^[a-z]+$",
    ];
    for (pattern, max) in patterns.into_iter().flat_map(|pattern| [9, 255, 2048].map(|max| (pattern, max))) {
        let text = json!({"type": "string", "pattern": pattern, "minLength": 1, "maxLength": max});
        let nested = json!({"type": "object", "properties": {"a": text, "b": {"type": "array", "items": text}}});
        let tool = tool("f", &nested);
        let tools = Some(AllowedTools { tools: vec![(0, tool)], parallel: false });
        for format in [json_format(&nested, false), OutputFormat { content: ContentFormat::Nothing, tools }] {
            assert_eq!(compile(&format).err(), None, "{pattern} {max}");
        }
        if let Err(error) = compile(&json_format(&nested, true)) {
            assert!(max > 9 && error.reason.contains("`maxLength`"), "{error:?}");
        }
    }
}
