//! The names of the tools of a request and of their parameters.

use crate::schema::{Document, ValueType, any_value, normalized, parameter_sets};
use serde_json::Value;

/// True if a tool can have the name. Other text is no name, such as `{{ name }}` in a template.
pub(super) fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

/// Tool definitions in OpenAI's format.
#[derive(Default)]
pub(super) struct Tools(Vec<Value>);

impl Tools {
    pub fn new(tools: &[Value]) -> Self {
        Self(tools.iter().map(normalized).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, name: &str) -> bool {
        functions(&self.0, name).next().is_some()
    }

    /// The values of a parameter of a tool. Strings if its schema does not specify them.
    pub fn values(&self, function: &str, parameter: &str) -> ValueType {
        if !self.has(function) {
            return ValueType::strings();
        }
        let any = Value::Bool(true);
        let schema = self.schema(function).unwrap_or(&any);
        let document = Document::new(schema);
        let values = any_value(&parameter_sets(&[schema], &document), parameter, &document);
        if values.is_nothing() { ValueType::strings() } else { values }
    }

    /// The schema of a tool's parameters.
    pub fn schema(&self, function: &str) -> Option<&Value> {
        functions(&self.0, function).find_map(|f| f.get("parameters").or_else(|| f.get("input_schema")))
    }
}

fn functions<'a>(tools: &'a [Value], name: &str) -> impl Iterator<Item = &'a Value> {
    let functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
    functions.filter(move |function| function.get("name").and_then(Value::as_str) == Some(name))
}
