//! The parameters that a tool's schema allows.

use super::{
    document::Document,
    type_set::TypeSet,
    value_type::{ValueType, allows_nothing},
};
use fancy_regex::Regex;
use serde_json::{Map, Value};
use std::{cell::RefCell, collections::HashMap, rc::Rc};

/// Maximum number of parameter sets that `anyOf` and `oneOf` of one tool may result in.
pub const MAX_PARAMETER_SETS: usize = 64;
/// Maximum number of parts of a schema that are read for the sets of one tool.
const MAX_PARTS: usize = 1000;
const MAX_DEPTH: usize = 16;
/// The keyword of names that a part does not list.
const ADDITIONAL: &str = "additionalProperties";
/// Maximum number of patterns that are kept compiled.
const MAX_COMPILED: usize = 64;

/// One set of parameters that a call may have: all of `parts` apply to the arguments.
#[derive(Clone, Default)]
pub struct ParameterSet<'a> {
    parts: Vec<&'a Map<String, Value>>,
    /// Compiled `patternProperties` of all sets. One that does not compile matches nothing.
    compiled: Rc<RefCell<HashMap<String, Option<Regex>>>>,
}

/// The sets of parameters that all `schemas` allow: one for each combination of alternatives. At most one more than
/// [`MAX_PARAMETER_SETS`].
pub fn parameter_sets<'a>(schemas: &[&'a Value], document: &Document<'a>) -> Vec<ParameterSet<'a>> {
    let mut reader = SetReader { document, parts_left: MAX_PARTS };
    let sets = schemas.iter().fold(vec![Vec::new()], |sets, schema| combined(&sets, &reader.sets(schema, 0)));
    let compiled = Rc::default();
    sets.into_iter().map(|parts| ParameterSet { parts, compiled: Rc::clone(&compiled) }).collect()
}

/// The values of parameter `name` in any of the sets: how the parser reads it, because it does not know the set of a call.
pub fn any_value(sets: &[ParameterSet<'_>], name: &str, document: &Document<'_>) -> ValueType {
    let values = sets.iter().filter_map(|set| set.value(name, document));
    let any = values.fold(ValueType::nothing(), ValueType::or);
    if !any.is_nothing() {
        return any;
    }
    // A closed part of an `allOf` excludes the name. Another part still says what a model means by it.
    let schemas = sets.iter().map(|set| set.schemas(name).into_iter().filter(|schema| schema.is_object()));
    let schemas = schemas.map(Vec::from_iter).filter(|schemas| !schemas.is_empty());
    schemas.map(|schemas| ValueType::of(&schemas, document)).fold(ValueType::nothing(), ValueType::or)
}

type Parts<'a> = Vec<&'a Map<String, Value>>;

struct SetReader<'d, 'a> {
    document: &'d Document<'a>,
    parts_left: usize,
}

impl<'a> SetReader<'_, 'a> {
    fn sets(&mut self, schema: &'a Value, depth: usize) -> Vec<Parts<'a>> {
        self.parts_left = self.parts_left.saturating_sub(1);
        let fields = match schema {
            _ if allows_nothing(schema) => return Vec::new(),
            Value::Object(fields) if depth <= MAX_DEPTH && self.parts_left > 0 => fields,
            _ => return vec![Vec::new()],
        };
        let types = TypeSet::named_by(fields);
        if !types.is_empty() && !types.has(TypeSet::OBJECT) {
            return Vec::new();
        }
        let mut sets = vec![vec![fields]];
        let all = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
        for part in self.document.target(schema).into_iter().chain(all) {
            sets = combined(&sets, &self.sets(part, depth + 1));
        }
        for choices in ["anyOf", "oneOf"].iter().filter_map(|key| fields.get(*key)?.as_array()) {
            let choices: Vec<_> = choices.iter().flat_map(|choice| self.sets(choice, depth + 1)).collect();
            sets = combined(&sets, &choices);
        }
        sets
    }
}

fn combined<'a>(sets: &[Parts<'a>], others: &[Parts<'a>]) -> Vec<Parts<'a>> {
    let pairs = sets.iter().flat_map(|set| others.iter().map(move |other| [&set[..], &other[..]].concat()));
    pairs.take(MAX_PARAMETER_SETS + 1).collect()
}

/// Names that the schema does not list, and the schemas of their values.
pub struct OpenNames<'a> {
    /// A pattern that the names match. `None` for names that match none of the patterns.
    pub pattern: Option<&'a str>,
    /// Patterns that the names do not match.
    pub other_patterns: Vec<&'a str>,
    pub schemas: Vec<&'a Value>,
}

impl<'a> ParameterSet<'a> {
    /// The names that the schema lists, in its order.
    pub fn names(&self) -> Vec<&'a str> {
        let mut names = Vec::new();
        let properties = self.maps("properties").flat_map(Map::keys).map(String::as_str);
        for name in properties.chain(self.required()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    pub fn is_required(&self, name: &str) -> bool {
        self.required().any(|required| required == name)
    }

    /// The values of parameter `name`. `None` if a call with this set does not have it.
    fn value(&self, name: &str, document: &Document<'_>) -> Option<ValueType> {
        let schemas = self.schemas(name);
        let is_known = !schemas.is_empty() || self.is_required(name) || self.is_open();
        is_known.then(|| ValueType::of(&schemas, document))
    }

    /// True if the set has neither names nor patterns.
    fn is_open(&self) -> bool {
        let has_names = self.maps("properties").any(|names| !names.is_empty()) || self.required().next().is_some();
        !has_names && self.parts.iter().all(|part| patterns(part).next().is_none())
    }

    /// The schemas that apply to the value of parameter `name`.
    pub fn schemas(&self, name: &str) -> Vec<&'a Value> {
        let mut schemas = Vec::new();
        for part in &self.parts {
            let before = schemas.len();
            schemas.extend(part.get("properties").and_then(|properties| properties.get(name)));
            schemas.extend(patterns(part).filter(|(pattern, _)| self.matches(pattern, name)).map(|(_, schema)| schema));
            if schemas.len() == before {
                schemas.extend(part.get(ADDITIONAL));
            }
        }
        schemas
    }

    /// The names that the schema does not list. Empty if only listed names may be used: an object with `properties` is
    /// open only if it also has a schema for other names.
    pub fn open_names(&self) -> Vec<OpenNames<'a>> {
        let all_patterns: Vec<_> =
            self.parts.iter().flat_map(|part| patterns(part)).map(|(pattern, _)| pattern).collect();
        let mut open = Vec::new();
        for (at, part) in self.parts.iter().enumerate() {
            for (pattern, schema) in patterns(part) {
                let others = self.parts.iter().enumerate().filter(|(other, _)| *other != at);
                let schemas = others.filter_map(|(_, part)| part.get(ADDITIONAL)).chain([schema]).collect();
                let other_patterns = all_patterns.iter().copied().filter(|other| *other != pattern).collect();
                open.push(OpenNames { pattern: Some(pattern), other_patterns, schemas });
            }
        }
        let schemas: Vec<_> = self.parts.iter().filter_map(|part| part.get(ADDITIONAL)).collect();
        let has_schema = schemas.iter().any(|schema| schema.as_object().is_some_and(|fields| !fields.is_empty()));
        if has_schema || self.names().is_empty() && all_patterns.is_empty() {
            open.push(OpenNames { pattern: None, other_patterns: all_patterns, schemas });
        }
        open.retain(|names| !names.schemas.contains(&&Value::Bool(false)));
        open
    }

    /// The least and the greatest number of parameters.
    pub fn counts(&self) -> (usize, Option<usize>) {
        let counts = |key: &'static str| self.parts.iter().filter_map(move |part| part.get(key)?.as_u64());
        let to_usize = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        (counts("minProperties").max().map_or(0, to_usize), counts("maxProperties").min().map(to_usize))
    }

    /// A keyword that applies to the arguments as a whole and lists them.
    pub fn constant(&self) -> Option<&'static str> {
        ["enum", "const"].into_iter().find(|key| self.parts.iter().any(|part| part.contains_key(*key)))
    }

    fn matches(&self, pattern: &str, name: &str) -> bool {
        let mut compiled = self.compiled.borrow_mut();
        if compiled.len() >= MAX_COMPILED {
            compiled.clear();
        }
        let regex = compiled.entry(pattern.to_owned()).or_insert_with(|| Regex::new(pattern).ok());
        regex.as_ref().is_some_and(|regex| regex.is_match(name).unwrap_or(false))
    }

    fn maps(&self, key: &'static str) -> impl Iterator<Item = &'a Map<String, Value>> {
        self.parts.iter().filter_map(move |part| part.get(key)?.as_object())
    }

    pub fn required(&self) -> impl Iterator<Item = &'a str> {
        let lists = self.parts.iter().filter_map(|part| part.get("required")?.as_array());
        lists.flatten().filter_map(Value::as_str)
    }
}

fn patterns(part: &Map<String, Value>) -> impl Iterator<Item = (&str, &Value)> {
    let patterns = part.get("patternProperties").and_then(Value::as_object).into_iter().flatten();
    patterns.map(|(pattern, schema)| (pattern.as_str(), schema))
}
