//! The JSON types that a tool's schema allows for a parameter, and the conversion of raw text to these types.

use crate::json_numbers;
use serde_json::Value;

/// A set of JSON types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JsonTypes {
    pub null: bool,
    pub boolean: bool,
    pub integer: bool,
    pub number: bool,
    pub object: bool,
    pub array: bool,
    pub string: bool,
}

const STRING: JsonTypes =
    JsonTypes { string: true, null: false, boolean: false, integer: false, number: false, object: false, array: false };

/// The part of `root` that the `$ref` of `schema` points to.
pub fn target<'a>(schema: &Value, root: &'a Value) -> Option<&'a Value> {
    root.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
}

/// Maximum number of subschemas that are visited for one parameter. The maximum is needed because a schema may refer to
/// itself.
const MAX_SUBSCHEMAS: usize = 256;

impl JsonTypes {
    /// Types of parameter `name` of the tool `function`. `tools` are tool definitions in OpenAI's format. A string if
    /// the tools do not specify a type.
    pub fn of(tools: &[Value], function: &str, name: &str) -> Self {
        let functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
        let schema = functions
            .filter(|f| f.get("name").and_then(Value::as_str) == Some(function))
            .find_map(|f| f.get("parameters").or_else(|| f.get("input_schema")));
        let Some(schema) = schema else { return STRING };
        let mut types = Self::default();
        let mut left = MAX_SUBSCHEMAS;
        types.collect_parameter(schema, schema, name, &mut left);
        let named = schema.get("properties").is_some_and(|properties| properties.get(name).is_some());
        if let (false, true, Some(others)) = (named, types == Self::default(), schema.get("additionalProperties")) {
            types.collect(others, schema, &mut left);
        }
        if types == Self::default() { STRING } else { types }
    }

    /// Adds the types of property `name` of an object, from every part of the schema that mentions it.
    fn collect_parameter(&mut self, schema: &Value, root: &Value, name: &str, left: &mut usize) {
        let Some(fewer) = left.checked_sub(1) else { return };
        *left = fewer;
        if let Some(property) = schema.get("properties").and_then(|properties| properties.get(name)) {
            self.collect(property, root, left);
        }
        if let Some(target) = target(schema, root) {
            self.collect_parameter(target, root, name, left);
        }
        for part in ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(key)?.as_array()).flatten() {
            self.collect_parameter(part, root, name, left);
        }
    }

    /// Types that `schema` allows. `root` is the schema that contains `schema`. A string if the schema names no type.
    pub fn of_schema(schema: &Value, root: &Value) -> Self {
        let mut types = Self::default();
        let mut left = MAX_SUBSCHEMAS;
        types.collect(schema, root, &mut left);
        if types == Self::default() { STRING } else { types }
    }

    pub fn only_string(self) -> bool {
        self == STRING
    }

    pub fn string_or_null(self) -> bool {
        self == Self { null: true, ..STRING }
    }

    fn collect(&mut self, schema: &Value, root: &Value, left: &mut usize) {
        let Some(fewer) = left.checked_sub(1) else { return };
        *left = fewer;
        match schema.get("type") {
            Some(Value::String(name)) => return self.add(name),
            Some(Value::Array(names)) => return names.iter().filter_map(Value::as_str).for_each(|name| self.add(name)),
            _ => {}
        }
        let before = *self;
        if let Some(target) = target(schema, root) {
            self.collect(target, root, left);
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            for schema in schema.get(key).and_then(Value::as_array).into_iter().flatten() {
                self.collect(schema, root, left);
            }
        }
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        for value in values.chain(schema.get("const")) {
            match value {
                Value::Null => self.null = true,
                Value::Bool(_) => self.boolean = true,
                Value::Number(_) => self.number = true,
                Value::String(_) => self.string = true,
                Value::Array(_) => self.array = true,
                Value::Object(_) => self.object = true,
            }
        }
        if *self == before {
            self.object |= schema.get("properties").is_some();
            self.array |= schema.get("items").is_some() || schema.get("prefixItems").is_some();
        }
    }

    fn add(&mut self, name: &str) {
        match name {
            "null" => self.null = true,
            "boolean" => self.boolean = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "object" => self.object = true,
            "array" => self.array = true,
            _ => self.string = true,
        }
    }

    /// Converts a parameter's raw text to JSON.
    ///
    /// Text that parses as an allowed type keeps the model's spelling, such as the digits of a number. Any other text
    /// is a string. If a string is allowed together with another type, text that parses as the other type has that
    /// type. Models also write `null` where the schema does not allow it, and, after templates that print Python,
    /// `True`, `False` and `None`. These words are accepted unless the parameter may be a string.
    pub fn json(self, text: &str) -> String {
        let word = text.trim();
        if !self.only_string() {
            let literal = match word {
                "null" if self.null || !self.string => Some("null"),
                "None" if !self.string => Some("null"),
                "true" if self.boolean => Some("true"),
                "false" if self.boolean => Some("false"),
                "True" if self.boolean && !self.string => Some("true"),
                "False" if self.boolean && !self.string => Some("false"),
                _ => None,
            };
            if let Some(literal) = literal {
                return literal.into();
            }
            let fits = match json_numbers::is_integer(word) {
                Some(integral) => self.number || (self.integer && integral),
                None => match serde_json::from_str(&json_numbers::quote_huge(word)) {
                    Ok(Value::Array(_)) => self.array,
                    Ok(Value::Object(_)) => self.object,
                    _ => false,
                },
            };
            if fits {
                return word.into();
            }
        }
        Value::from(text).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(schema: Value, text: &str) -> String {
        let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"p": schema},
            "$defs": {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
        }}})];
        JsonTypes::of(&tools, "f", "p").json(text)
    }

    #[test]
    fn values_are_read_by_type() {
        for (kind, text, expected) in [
            ("string", "5", "\"5\""),
            ("string", "null", "\"null\""),
            ("string", " a\n\"b\"", r#"" a\n\"b\"""#),
            ("integer", "5", "5"),
            ("integer", " -5 ", "-5"),
            ("integer", "12345678901234567890123", "12345678901234567890123"),
            ("integer", "5.0", "5.0"),
            ("integer", "5.5", "\"5.5\""),
            ("integer", "five", "\"five\""),
            ("integer", "007", "\"007\""),
            ("integer", "null", "null"),
            ("integer", "None", "null"),
            ("number", "1e3", "1e3"),
            ("number", "0.10", "0.10"),
            ("number", "NaN", "\"NaN\""),
            ("number", "true", "\"true\""),
            ("boolean", "true", "true"),
            ("boolean", "False", "false"),
            ("boolean", "yes", "\"yes\""),
            ("object", "{\"a\": [1, 2]}", "{\"a\": [1, 2]}"),
            ("object", "{\"a\": ", "\"{\\\"a\\\": \""),
            ("object", "[1]", "\"[1]\""),
            ("array", "[1]", "[1]"),
            ("array", "", "\"\""),
            ("unheard-of", "1", "\"1\""),
        ] {
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
        assert_eq!(read(json!({"enum": [1, 2]}), "1"), "1");
        assert_eq!(read(json!({"enum": ["1", "2"]}), "1"), "\"1\"");
        assert_eq!(read(json!({"items": {}}), "[]"), "[]");
        assert_eq!(read(json!({"$ref": "#/$defs/Loop"}), "1"), "\"1\"");
        assert_eq!(read(json!({}), "1"), "\"1\"");
        assert_eq!(JsonTypes::of(&[], "f", "p"), STRING);
    }

    #[test]
    fn parameters_are_found_in_nested_schemas() {
        let part = json!({"properties": {"p": {"type": "integer"}}});
        for parameters in [
            json!({"allOf": [{}, part]}),
            json!({"anyOf": [part, {"properties": {"q": {}}}]}),
            json!({"$ref": "#/$defs/part", "$defs": {"part": part}}),
            json!({"additionalProperties": {"type": "integer"}}),
        ] {
            let tools = [json!({"function": {"name": "f", "parameters": parameters}})];
            assert_eq!(JsonTypes::of(&tools, "f", "p").json("1"), "1", "{parameters}");
        }
    }
}
