//! Converts the raw text of a parameter to JSON of a type that its schema allows.

use super::{json_call::without_extra_brackets, python};
use crate::{
    json_numbers, json_repair,
    schema::{TypeSet, ValueType},
};
use serde_json::Value;

/// True if a text that starts with `start` is a string, however it continues.
pub(super) fn is_string_from(allowed: &ValueType, start: &str) -> bool {
    let start = start.trim();
    let may_be = |types: TypeSet| allowed.others.has_any(types);
    let may_be_null = may_be(TypeSet::NULL) && ["null", "None"].iter().any(|word| word.starts_with(start));
    let may_be_nested =
        may_be(TypeSet::ARRAY.or(TypeSet::OBJECT)) && (start.is_empty() || start.starts_with(['[', '{']));
    allowed.has_strings() && !may_be(TypeSet::BOOLEAN.or(TypeSet::NUMBER)) && !may_be_null && !may_be_nested
}

/// True if a text that starts with `start` is an array or an object.
pub(super) fn is_nested(allowed: &ValueType, start: &str) -> bool {
    match start.trim_start().chars().next() {
        Some('[') => allowed.others.has_any(TypeSet::ARRAY),
        Some('{') => allowed.others.has_any(TypeSet::OBJECT),
        _ => false,
    }
}

/// Converts a parameter's raw text to JSON.
///
/// Text that parses as an allowed type keeps the model's spelling, such as the digits of a number. Any other text
/// is a string. If a string is allowed together with another type, a word of an `enum` is a string, and other text
/// that parses as the other type has that type. Models also write `null` where the schema does not allow it, and
/// values in Python's spelling, in a Markdown fence, in a JSON string or with too many brackets. All of these are
/// accepted unless the parameter may be a string. `None` is also accepted for a string that may be null, because
/// templates of models print null so.
pub(super) fn to_json(allowed: &ValueType, text: &str) -> String {
    let is_word = allowed.others.is_empty() || allowed.words.iter().any(|known| known == text);
    let value = if is_word { None } else { other_value(allowed, text.trim()) };
    let inner = || if allowed.has_strings() { None } else { unwrapped(text.trim()) };
    let value = value.or_else(|| other_value(allowed, inner()?.trim()));
    let extra = || if allowed.has_strings() { None } else { without_extra_brackets(text.trim()) };
    let value = value.or_else(|| other_value(allowed, extra()?));
    value.unwrap_or_else(|| Value::from(text).to_string())
}

/// The JSON of `word` if it is a value of an allowed type other than a string.
fn other_value(allowed: &ValueType, word: &str) -> Option<String> {
    let may_be_string = allowed.has_strings();
    let fits = |json: &String| match json_type(json) {
        Some(TypeSet::NULL) => !may_be_string || allowed.others.has(TypeSet::NULL),
        Some(TypeSet::TRUE | TypeSet::FALSE) => allowed.others.has_any(TypeSet::BOOLEAN),
        Some(kind) => allowed.others.has(kind),
        None => false,
    };
    let as_json = Some(word.to_owned()).filter(fits);
    let is_python = !may_be_string || word == "None";
    as_json.or_else(|| python::to_json(word).filter(|json| is_python && fits(json)))
}

/// The type of a JSON text. `None` for text that is no JSON.
fn json_type(json: &str) -> Option<TypeSet> {
    match json_numbers::is_integer(json) {
        Some(is_integer) => Some(if is_integer { TypeSet::INTEGER } else { TypeSet::NUMBER }),
        None => serde_json::from_str(&json_repair::repair(json)).ok().map(|value| TypeSet::of(&value)),
    }
}

/// The text in a Markdown fence or in a JSON string.
fn unwrapped(text: &str) -> Option<String> {
    let fenced = text.strip_prefix("```").and_then(|text| text.strip_suffix("```")?.split_once('\n'));
    fenced.map(|(_, text)| text.to_owned()).or_else(|| serde_json::from_str(&json_repair::repair(text)).ok())
}

#[cfg(test)]
mod tests {
    use super::{super::declared::Tools, *};
    use serde_json::json;

    fn tools(parameters: &Value) -> Tools {
        Tools::new(&[json!({"name": "f", "parameters": parameters})])
    }

    /// The values of parameter `p` of a tool.
    fn values(parameters: &Value) -> ValueType {
        tools(parameters).values("f", "p")
    }

    fn read(schema: Value, text: &str) -> String {
        let parameters = json!({
            "type": "object", "properties": {"p": schema},
            "$defs": {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
        });
        to_json(&values(&parameters), text)
    }

    #[test]
    fn values_are_read_by_type() {
        for (kind, as_json, as_text) in [
            ("string", &[][..], &["5", "null", " a\n\"b\""][..]),
            ("integer", &["5", "12345678901234567890123", "5.0", "null"], &["5.5", "five", "007"]),
            ("number", &["1e3", "0.10"], &["NaN", "true"]),
            ("boolean", &["true"], &["yes"]),
            ("object", &["{\"a\": [1, 2]}"], &["{\"a\": ", "[1]"]),
            ("array", &["[1]"], &[""]),
            ("unheard-of", &[], &["1"]),
        ] {
            let json = as_json.iter().map(|text| (*text, text.to_string()));
            for (text, expected) in json.chain(as_text.iter().map(|text| (*text, json!(text).to_string()))) {
                assert_eq!(read(json!({"type": kind}), text), expected, "{kind} {text:?}");
            }
        }
        for (kind, text, expected) in
            [("integer", " -5 ", "-5"), ("integer", "None", "null"), ("boolean", "False", "false")]
        {
            assert_eq!(read(json!({"type": kind}), text), expected, "{kind} {text:?}");
        }
    }

    #[test]
    fn huge_number_is_a_number() {
        let digits = "9".repeat(400);
        for (kind, text) in [("integer", &*digits), ("number", &digits), ("integer", "1e999"), ("integer", "0.5e1")] {
            assert_eq!(read(json!({"type": kind}), text), text);
        }
        assert_eq!(read(json!({"type": "integer"}), "5e-1"), "\"5e-1\"");
        let array = format!("[{digits}, \"x\"]");
        assert_eq!(read(json!({"type": "array"}), &array), array);
    }

    #[test]
    fn unions_prefer_types_other_than_string() {
        assert_eq!(read(json!({"type": ["string", "null"]}), "null"), "null");
        assert_eq!(read(json!({"type": ["string", "null"]}), "5"), "\"5\"");
        assert_eq!(read(json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "5"), "5");
        assert_eq!(read(json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "null"), "\"null\"");
        assert_eq!(read(json!({"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}), "{}"), "{}");
        assert_eq!(read(json!({"allOf": [{"$ref": "#/$defs/Point"}]}), "{}"), "{}");
        // zod's `z.number().optional().nullable()`.
        let optional = json!({"anyOf": [{"anyOf": [{"not": {}}, {"type": "number"}]}, {"type": "null"}]});
        assert_eq!(read(optional.clone(), "5"), "5");
        assert_eq!(read(optional, "null"), "null");
        assert_eq!(read(json!({"oneOf": [false, {"type": "array"}, {"not": true}]}), "[1]"), "[1]");
        assert_eq!(read(json!({"enum": [1, 2]}), "1"), "1");
        assert_eq!(read(json!({"enum": ["1", "2"]}), "1"), "\"1\"");
        assert_eq!(read(json!({"items": {}}), "[]"), "[]");
        assert_eq!(read(json!({"$ref": "#/$defs/Loop"}), "1"), "\"1\"");
        assert_eq!(read(json!({}), "1"), "\"1\"");
        assert_eq!(read(json!({"title": "Value"}), "{\"a\": [1]}"), "{\"a\": [1]}");
        assert_eq!(read(json!(true), "['a']"), "\"['a']\"");
        assert!(Tools::new(&[]).values("f", "p").others.is_empty());
    }

    #[test]
    fn parameters_are_found_in_nested_schemas() {
        let part = json!({"properties": {"p": {"type": "integer"}}});
        for parameters in [
            json!({"allOf": [{}, part]}),
            json!({"anyOf": [part, {"properties": {"q": {}}}]}),
            json!({"$ref": "#/$defs/part", "$defs": {"part": part}}),
            json!({"additionalProperties": {"type": "integer"}}),
            json!({"allOf": [{"properties": {"q": {}}, "additionalProperties": false}, part]}),
        ] {
            assert_eq!(to_json(&values(&parameters), "1"), "1", "{parameters}");
        }
    }

    #[test]
    fn alternative_without_a_type_allows_strings() {
        let typed = json!({"properties": {"p": {"type": "integer"}}});
        for (other, may_be_string) in [
            (json!({"required": ["p"]}), true),
            (json!({"properties": {"p": true}}), true),
            (json!({"additionalProperties": true}), true),
            (json!({}), true),
            (json!({"properties": {"p": {"type": "boolean"}}}), false),
            (json!({"properties": {"q": {"type": "boolean"}}}), false),
            (json!({"properties": {"p": false}}), false),
            (json!({"additionalProperties": false}), false),
        ] {
            let values = values(&json!({"anyOf": [typed, other]}));
            assert_eq!(to_json(&values, "5"), "5", "{other}");
            assert_eq!(values.has_strings(), may_be_string, "{other}");
        }
    }

    #[test]
    fn python_values_are_read_when_json_fails() {
        for (kind, text, expected) in [
            ("array", "[{'a': False, 'b': None}]", r#"[{"a": false, "b": null}]"#),
            ("array", "['it\\'s', \"a\\n\", (1, -2.5,), [],]", r#"["it's", "a\n", [1, -2.5], []]"#),
            ("array", "('a', True)", r#"["a", true]"#),
            ("array", "['\\x41\\u00e9', 'C:\\d']", r#"["Aé", "C:\\d"]"#),
            ("object", "{'a': {'b': [null, true]}, 1: 2}", r#"{"a": {"b": [null, true]}, "1": 2}"#),
            ("object", "{\"a\": True}", r#"{"a": true}"#),
            ("object", "{'a': 12345678901234567890123}", r#"{"a": 12345678901234567890123}"#),
            ("integer", "1_000", "1000"),
            ("number", "+.5", "0.5"),
            ("number", "5.", "5.0"),
        ] {
            assert_eq!(read(json!({"type": kind}), text), expected, "{kind} {text:?}");
        }
        for (kind, text) in [
            ("array", "[1, 2"),
            ("array", "[f(1)]"),
            ("array", "['a' 'b']"),
            ("object", "{'a'}"),
            ("object", "{'a': 1} x"),
            ("object", "[1]"),
            ("integer", "0x1g"),
            ("integer", "1__0"),
        ] {
            assert_eq!(read(json!({"type": kind}), text), Value::from(text).to_string(), "{kind} {text:?}");
        }
        let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
        assert_eq!(read(json!({"type": "array"}), &deep), Value::from(deep).to_string());
        // If a string is allowed, only JSON has another type.
        assert_eq!(read(json!({"type": ["string", "array"]}), "['a']"), "\"['a']\"");
        assert_eq!(read(json!({"type": ["string", "array"]}), "[1]"), "[1]");
    }

    #[test]
    fn wrapped_values_are_read_without_strings() {
        for (kind, text, expected) in [
            ("array", "```json\n[1, 2]\n```", "[1, 2]"),
            ("object", "```\n{'a': None}\n```\n", r#"{"a": null}"#),
            ("array", r#""[{\"a\": \"b\"}]""#, r#"[{"a": "b"}]"#),
            ("object", r#""{}""#, "{}"),
            ("integer", "\"5\"", "5"),
            ("boolean", "\"true\"", "true"),
            ("boolean", "\"False\"", "false"),
            ("object", "{\"a\": \"}\"}}", r#"{"a": "}"}"#),
            ("array", "['a']\n]}", r#"["a"]"#),
            ("object", "{\"a\": 1}}x", r#""{\"a\": 1}}x""#),
            ("object", "{\"a\": 1]", r#""{\"a\": 1]""#),
            ("object", "\"[1]\"", r#""\"[1]\"""#),
            ("array", "```json\n{}\n```", r#""```json\n{}\n```""#),
            ("string", "\"5\"", r#""\"5\"""#),
        ] {
            assert_eq!(read(json!({"type": kind}), text), expected, "{kind} {text:?}");
        }
        assert_eq!(read(json!({"type": ["string", "array"]}), "\"[1]\""), r#""\"[1]\"""#);
    }

    #[test]
    fn null_is_read_where_it_is_allowed() {
        for schema in [
            json!({"type": "string", "nullable": true}),
            json!({"type": ["string", "null"]}),
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            json!({"allOf": [{"type": "string", "maxLength": 9}], "nullable": true}),
            json!({"enum": ["a", "b"], "nullable": true}),
            json!({"type": "integer", "nullable": true}),
        ] {
            assert_eq!(read(schema.clone(), "null"), "null", "{schema}");
            assert_eq!(read(schema.clone(), "None"), "null", "{schema}");
        }
        assert_eq!(read(json!({"type": "string", "nullable": false}), "null"), "\"null\"");
        assert_eq!(read(json!({"type": "string"}), "None"), "\"None\"");
    }

    #[test]
    fn words_of_enum_are_strings() {
        assert_eq!(read(json!({"type": ["string", "integer"], "enum": ["7"]}), "7"), "\"7\"");
        assert_eq!(read(json!({"enum": ["7", 8]}), "7"), "\"7\"");
        assert_eq!(read(json!({"enum": ["7", 8]}), "8"), "8");
        assert_eq!(read(json!({"type": ["string", "null"], "const": "null"}), "null"), "\"null\"");
        assert_eq!(read(json!({"anyOf": [{"enum": ["true"]}, {"type": "boolean"}]}), "true"), "\"true\"");
        let limited = json!({"anyOf": [{"enum": ["7", "x"], "pattern": "^x"}, {"type": "integer"}]});
        assert_eq!(read(limited, "7"), "7");
    }

    #[test]
    fn references_of_libraries_are_followed() {
        let parameters = json!({"$id": "https://example.com/f", "$ref": "#/$defs/Args", "$defs": {
            "Args": {"type": "object", "properties": {
                "a": {"$ref": "#/$defs/P%3Cs%3E"}, "b": {"$ref": "#n"}, "c": {"$ref": "https://example.com/f#/$defs/N"},
                "d": {"$ref": "#/$defs/Args/properties/%61"}, "e": {"allOf": [{"$ref": "#n"}], "description": "e"},
                "f": {"$ref": "#/$defs/none"}
            }},
            "P<s>": {"type": "integer"}, "N": {"$anchor": "n", "type": "integer"}
        }});
        let tools = tools(&parameters);
        for name in ["a", "b", "c", "d", "e"] {
            assert_eq!(to_json(&tools.values("f", name), "5"), "5", "{name}");
        }
        assert_eq!(to_json(&tools.values("f", "f"), "5"), "\"5\"");
    }
}
