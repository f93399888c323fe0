//! The references of a JSON schema.

use serde_json::{Map, Number, Value};
use std::{cell::OnceCell, collections::HashMap, rc::Rc};

/// Keywords whose value is an object of schemas.
pub const WITH_OBJECT: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Keywords whose value is a number.
const WITH_NUMBER: [&str; 11] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
];

/// The schema without the keywords that are null, and with numbers for texts of numbers. Generators of Go, C# and Python
/// write a keyword that is not set as null, and some write a limit as a string. A `const` may be null, and so may the
/// constants of an `enum`.
pub fn normalized(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let is_set = |(key, value): &(&String, &Value)| !value.is_null() || *key == "const";
            let part = |(key, value): (&String, &Value)| match value {
                Value::Object(named) if WITH_OBJECT.contains(&key.as_str()) => {
                    let parts = named.iter().map(|(name, part)| (name.clone(), normalized(part)));
                    (key.clone(), parts.collect::<Map<_, _>>().into())
                }
                _ if key == "const" || key == "enum" => (key.clone(), value.clone()),
                Value::String(text) if WITH_NUMBER.contains(&key.as_str()) => {
                    (key.clone(), text.trim().parse::<Number>().map_or_else(|_| value.clone(), Value::from))
                }
                _ => (key.clone(), normalized(value)),
            };
            fields.iter().filter(is_set).map(part).collect::<Map<_, _>>().into()
        }
        Value::Array(parts) => parts.iter().map(normalized).collect(),
        _ => schema.clone(),
    }
}

/// A schema document in which references are resolved. A reference may be a JSON pointer, also percent-encoded, an
/// `$anchor`, or the `$id` of a part of the document.
pub struct Document<'a> {
    root: &'a Value,
    index: OnceCell<ReferenceIndex<'a>>,
}

#[derive(Default)]
struct ReferenceIndex<'a> {
    /// Parts of the document by their absolute `$id`, with `#NAME` for an anchor. The root is also the empty text.
    named: HashMap<String, &'a Value>,
    /// The `$id` of the resource that a part belongs to, by the part's address. Parts of an unnamed root are left out.
    resources: HashMap<*const Value, Rc<str>>,
}

impl<'a> Document<'a> {
    pub fn new(root: &'a Value) -> Self {
        Self { root, index: OnceCell::new() }
    }

    /// The part that the `$ref` of `schema`, a part of this document, refers to.
    pub fn target(&self, schema: &Value) -> Option<&'a Value> {
        let reference = schema.get("$ref")?.as_str()?;
        let index = self.index.get_or_init(|| ReferenceIndex::of(self.root));
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let base = index.resources.get(&std::ptr::from_ref(schema)).map_or("", |base| base);
        let uri = if uri.is_empty() { base.to_owned() } else { join(base, uri) };
        let resource: &'a Value = index.named.get(&uri)?;
        let decoded = percent_decoded(fragment);
        if fragment.is_empty() || fragment.starts_with('/') {
            // Some generators encode the name and not the reference, or both.
            decoded.and_then(|pointer| resource.pointer(&pointer)).or_else(|| resource.pointer(fragment))
        } else {
            index.named.get(&format!("{uri}#{}", decoded?)).copied()
        }
    }
}

impl<'a> ReferenceIndex<'a> {
    fn of(root: &'a Value) -> Self {
        let mut index = Self::default();
        index.named.insert(String::new(), root);
        index.add(root, &"".into());
        index
    }

    fn add(&mut self, part: &'a Value, base: &Rc<str>) {
        let Value::Object(fields) = part else {
            part.as_array().into_iter().flatten().for_each(|item| self.add(item, base));
            return;
        };
        let mut base = base.clone();
        let id = fields.get("$id").and_then(Value::as_str).unwrap_or_default();
        let (uri, old_anchor) = id.split_once('#').unwrap_or((id, ""));
        if !uri.is_empty() {
            base = join(&base, uri).into();
            self.named.insert(base.to_string(), part);
        }
        // Drafts 3 and 4 have `id`. Others are names that a client made up, so relative references ignore it.
        if let Some(id) = fields.get("id").and_then(Value::as_str) {
            let name = if id.starts_with('#') { format!("{base}{id}") } else { join(&base, id.trim_end_matches('#')) };
            self.named.entry(name).or_insert(part);
        }
        let anchor = fields.get("$anchor").and_then(Value::as_str).unwrap_or(old_anchor);
        if !anchor.is_empty() {
            self.named.insert(format!("{base}#{anchor}"), part);
        }
        if !base.is_empty() {
            self.resources.insert(part, base.clone());
        }
        fields.values().for_each(|value| self.add(value, &base));
    }
}

/// Resolves `uri` against `base`.
fn join(base: &str, uri: &str) -> String {
    let has_scheme = uri.split(['/', '?']).next().is_some_and(|start| start.contains(':'));
    let path = base.find("://").map_or(0, |at| base[at + 3..].find('/').map_or(base.len(), |slash| at + 3 + slash));
    if has_scheme {
        uri.to_owned()
    } else if uri.starts_with('/') {
        format!("{}{uri}", &base[..path])
    } else {
        let directory = base.rfind('/').filter(|slash| *slash >= path).map_or("", |slash| &base[..=slash]);
        format!("{directory}{}", uri.strip_prefix("./").unwrap_or(uri))
    }
}

/// The text with `%XX` replaced by bytes. `None` if the result is not UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split('%');
    bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_of_every_form_are_resolved() {
        let root = json!({"$id": "https://example.com/root.json", "$defs": {
            "P<s>": {"const": 1}, "a/b~c": {"const": 2}, "L%3C": {"const": 3}, "named": {"$anchor": "here", "const": 4},
            "item": {"$id": "schemas/item", "const": 5, "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"const": 6}}},
            "old": {"$id": "#old", "const": 7}, "draft4": {"id": "item4.json#", "const": 10}, "anchor4": {"id": "#a4", "const": 11,
                "$defs": {"x": {"id": "/properties/x", "$ref": "#/$defs/y"}}}, "urn": {"$id": "urn:x:y", "const": 8}, "y": {"const": 9},
        }});
        for (reference, expected) in [
            ("#/$defs/P%3Cs%3E", Some(1)),
            ("#/$defs/a~1b~0c", Some(2)),
            ("#/$defs/L%3C", Some(3)),
            ("#here", Some(4)),
            ("schemas/item", Some(5)),
            ("schemas/item#/$defs/y", Some(6)),
            ("#old", Some(7)),
            ("item4.json", Some(10)),
            ("#a4", Some(11)),
            ("urn:x:y", Some(8)),
            ("https://example.com/root.json#/$defs/y", Some(9)),
            ("#/$defs/none", None),
            ("#none", None),
            ("https://example.com/none", None),
            ("%", None),
        ] {
            let mut root = root.clone();
            root["$ref"] = reference.into();
            let target = Document::new(&root).target(&root).and_then(|target| target["const"].as_u64());
            assert_eq!(target, expected, "{reference}");
        }
        let document = Document::new(&root);
        let inner = root.pointer("/$defs/item/$defs/x").unwrap();
        assert_eq!(document.target(inner).unwrap()["const"], 6);
        assert_eq!(document.target(root.pointer("/$defs/anchor4/$defs/x").unwrap()).unwrap()["const"], 9);
        assert_eq!(join("https://example.com/root.json", "schemas/item"), "https://example.com/schemas/item");
        assert_eq!(join("https://example.com/a/b", "/c"), "https://example.com/c");
    }
    #[test]
    fn null_keywords_are_removed_and_values_kept() {
        let schema = json!({"type": "object", "enum": null, "default": null, "properties": {
            "const": {"const": null, "items": null}, "enum": {"enum": [null, {"a": null}], "anyOf": [{"$ref": null}]}}});
        let expected = json!({"type": "object", "properties": {
            "const": {"const": null}, "enum": {"enum": [null, {"a": null}], "anyOf": [{}]}}});
        assert_eq!(normalized(&schema), expected);
        let texts =
            json!({"minItems": "1", "minimum": " -2.5 ", "maximum": "x", "const": {"minimum": "1"}, "pattern": "1"});
        let numbers =
            json!({"minItems": 1, "minimum": -2.5, "maximum": "x", "const": {"minimum": "1"}, "pattern": "1"});
        assert_eq!(normalized(&texts), numbers);
        // A part is no keyword, so it is not left out.
        assert_eq!(normalized(&json!({"$defs": {"a": null}})), json!({"$defs": {"a": null}}));
    }
}
