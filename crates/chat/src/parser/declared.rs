//! The names of the tools of a request and of their parameters.

use super::tags::{Tag, TagAt, TagKind, after_gap, tag_at};
use crate::schema::{Document, ValueType, any_value, normalized, parameter_sets};
use serde_json::Value;
use std::collections::BTreeSet;

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

    /// Reads the tag at the start of `text`. Models also write `<parameter=TOOL>` before the first parameter of a call, and
    /// `<parameter=NAME VALUE`. `parameters` are those of the call that the text belongs to.
    pub fn tag_at(&self, text: &str, parameters: &[String]) -> TagAt {
        let tag = tag_at(text);
        let TagAt::Found(Tag { kind: TagKind::Parameter(name), length, is_exact }) = &tag else { return tag };
        if parameters.contains(name) {
            return tag;
        }
        let header = text[..*length].split_once('=');
        let value = header.and_then(|(word, rest)| Some((word, rest.split_once([' ', '\t', '='])?.0)));
        if let Some((word, name)) = value.filter(|(_, name)| parameters.iter().any(|known| known == name)) {
            // The value has a `>`, or ends like an attribute.
            let length = word.len() + 1 + name.len() + 1;
            return TagAt::Found(Tag { kind: TagKind::Parameter(name.into()), length, is_exact: false });
        }
        if !self.has(name) {
            return tag;
        }
        match after_gap(&text[*length..]).map_or(TagAt::Other, tag_at) {
            TagAt::Unfinished => TagAt::Unfinished,
            TagAt::Found(Tag { kind: TagKind::Parameter(_), .. }) => {
                TagAt::Found(Tag { kind: TagKind::Function(name.clone()), length: *length, is_exact: *is_exact })
            }
            _ => tag,
        }
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
