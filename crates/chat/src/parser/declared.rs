//! The names of the tools of a request and of their parameters.

use super::json_types::JsonTypes;
use crate::schema::{Document, parameter_sets, without_nulls};
use serde_json::Value;
use std::collections::BTreeSet;

/// Tool definitions in OpenAI's format.
#[derive(Default)]
pub(super) struct Tools(Vec<Value>);

impl Tools {
    pub fn new(tools: &[Value]) -> Self {
        Self(tools.iter().map(without_nulls).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, name: &str) -> bool {
        functions(&self.0, name).next().is_some()
    }

    /// Types of a parameter of a tool.
    pub fn types(&self, function: &str, parameter: &str) -> JsonTypes {
        JsonTypes::of(self.schema(function), parameter)
    }

    /// Names of the parameters of a tool. Empty if its schema names none.
    pub fn parameters(&self, function: &str) -> Vec<String> {
        let Some(schema) = self.schema(function) else { return Vec::new() };
        let mut names = BTreeSet::new();
        for set in parameter_sets(&[schema], &Document::new(schema)) {
            names.extend(set.names().into_iter().map(str::to_owned));
        }
        names.into_iter().collect()
    }

    /// The schema of a tool's parameters.
    fn schema(&self, function: &str) -> Option<&Value> {
        functions(&self.0, function).find_map(|f| f.get("parameters").or_else(|| f.get("input_schema")))
    }
}

fn functions<'a>(tools: &'a [Value], name: &str) -> impl Iterator<Item = &'a Value> {
    let functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
    functions.filter(move |function| function.get("name").and_then(Value::as_str) == Some(name))
}
