//! The names of the tools of a request and of their parameters.

use super::json_types::{JsonTypes, target};
use serde_json::Value;

/// Maximum number of subschemas that are visited for one tool. A schema may refer to itself.
const MAX_SUBSCHEMAS: usize = 256;

/// Tool definitions in OpenAI's format.
pub(super) struct Tools(Vec<Value>);

impl Tools {
    pub fn new(tools: &[Value]) -> Self {
        Self(tools.to_vec())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    /// Types of a parameter of a tool.
    pub fn types(&self, function: &str, parameter: &str) -> JsonTypes {
        JsonTypes::of(&self.0, function, parameter)
    }

    /// Names of the parameters of a tool. Empty if its schema names none.
    pub fn parameters(&self, function: &str) -> Vec<String> {
        let mut names = Vec::new();
        let function = self.function(function);
        let schema = function.and_then(|f| f.get("parameters").or_else(|| f.get("input_schema")));
        if let Some(schema) = schema {
            collect_names(schema, schema, &mut names, &mut MAX_SUBSCHEMAS.clone());
        }
        names
    }

    fn function(&self, name: &str) -> Option<&Value> {
        let mut functions = self.0.iter().map(|tool| tool.get("function").unwrap_or(tool));
        functions.find(|function| function.get("name").and_then(Value::as_str) == Some(name))
    }
}

fn collect_names(schema: &Value, root: &Value, names: &mut Vec<String>, left: &mut usize) {
    let Some(fewer) = left.checked_sub(1) else { return };
    *left = fewer;
    let properties = schema.get("properties").and_then(Value::as_object);
    names.extend(properties.into_iter().flat_map(|properties| properties.keys().cloned()));
    let parts = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
    parts.chain(target(schema, root)).for_each(|part| collect_names(part, root, names, left));
}
