//! The tools of a request.

use crate::schema::{Document, ParameterSet, ValueType, any_value, normalized, parameter_sets};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// True if a tool can have the name. Other text is no name, such as `{{ name }}` in a template.
pub(super) fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

/// The tools of a request, by name.
#[derive(Default)]
pub(super) struct Tools(BTreeMap<String, Tool>);

struct Tool {
    /// The schema of the parameters.
    schema: Value,
    /// The names of the parameters.
    parameters: Arc<BTreeSet<String>>,
}

impl Tools {
    /// Reads tool definitions in OpenAI's format.
    pub fn new(tools: &[Value]) -> Self {
        let mut declared = BTreeMap::new();
        for tool in tools.iter().map(normalized) {
            let function = tool.get("function").unwrap_or(&tool);
            let schema = function.get("parameters").or_else(|| function.get("input_schema"));
            if let Some(name) = function.get("name").and_then(Value::as_str) {
                declared.entry(name.to_owned()).or_insert_with(|| Tool::new(schema.cloned().unwrap_or(true.into())));
            }
        }
        Self(declared)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The names of the parameters of a tool.
    pub fn parameters(&self, function: &str) -> Arc<BTreeSet<String>> {
        self.0.get(function).map(|tool| Arc::clone(&tool.parameters)).unwrap_or_default()
    }

    /// The values of a parameter of a tool. Strings if its schema does not specify them.
    pub fn values(&self, function: &str, parameter: &str) -> ValueType {
        let Some(Tool { schema, .. }) = self.0.get(function) else { return ValueType::strings() };
        let document = Document::new(schema);
        let values = any_value(&parameter_sets(&[schema], &document), parameter, &document);
        if values.is_nothing() { ValueType::strings() } else { values }
    }
}

impl Tool {
    fn new(schema: Value) -> Self {
        let sets = parameter_sets(&[&schema], &Document::new(&schema));
        let parameters = Arc::new(sets.iter().flat_map(ParameterSet::names).map(str::to_owned).collect());
        drop(sets);
        Self { schema, parameters }
    }
}
