//! The values that a schema allows, as far as their text between the tags of a call depends on it.

use super::{document::Document, text_limits::TextLimits, type_set::TypeSet};
use serde_json::{Map, Value};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    slice,
};

/// Maximum number of steps to read one value: [`PART_STEPS`] for each part of its schema, and one for each constant.
/// References that branch could give exponentially many parts.
const MAX_STEPS: usize = 200_000;
const PART_STEPS: usize = 10;
/// Maximum number of references and parts inside of each other that are read for one value.
const MAX_DEPTH: usize = 128;
/// Maximum number of alternatives with different limits of strings.
const MAX_TEXTS: usize = 64;

/// The values that a schema allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueType {
    /// Strings of an `enum` or `const`.
    pub words: Vec<String>,
    /// Alternatives for any other string. Empty if no other string is allowed.
    pub texts: Vec<TextLimits>,
    /// Types other than strings.
    pub others: TypeSet,
    /// The numbers, arrays and objects as [`canonical`] texts, with their types, if the schema lists them all.
    constants: Option<HashMap<String, TypeSet>>,
    /// False if the schema has too many parts, so that some of them were not read.
    pub is_complete: bool,
    /// True if not every number of the allowed types is allowed.
    has_number_limits: bool,
    /// True if a keyword selects the types.
    is_typed: bool,
}

impl ValueType {
    /// The values that all `schemas` allow. If they name no type, a text that is an array or an object is one, because
    /// templates print these as JSON, and any other text is a string.
    pub fn of(schemas: &[&Value], document: &Document<'_>) -> Self {
        let mut all = TypeReader { document, steps_left: MAX_STEPS, infers_types: true }.all(schemas);
        if !all.is_typed {
            all.others = all.others.and(TypeSet::ARRAY.or(TypeSet::OBJECT));
        }
        all
    }

    /// The values that all `schemas` allow at most. The steps are taken from `steps_left`.
    pub fn at_most(schemas: &[&Value], document: &Document<'_>, steps_left: &mut usize) -> Self {
        let limit = MAX_STEPS.min(*steps_left);
        let mut reader = TypeReader { document, steps_left: limit, infers_types: false };
        let all = reader.all(schemas);
        *steps_left -= limit - reader.steps_left;
        all
    }

    /// The types of texts that the parser, which reads the types of `read`, may read as values that are not allowed.
    pub fn misread(&self, read: &Self) -> TypeSet {
        let allows =
            |types: TypeSet| self.others.has(types) && !(types.has(TypeSet::INTEGER) && self.has_number_limits);
        let kinds = [
            (TypeSet::NULL, TypeSet::NULL),
            (TypeSet::BOOLEAN, TypeSet::BOOLEAN),
            (TypeSet::NUMBER, TypeSet::NUMBER.and(read.others)),
        ];
        let misread = kinds.into_iter().filter(|(kind, types)| read.others.has_any(*kind) && !allows(*types));
        misread.fold(read.others.and(TypeSet::ARRAY.or(TypeSet::OBJECT)), |all, (kind, _)| all.or(kind))
    }

    fn any() -> Self {
        let texts = vec![TextLimits::default()];
        Self { texts, is_typed: false, ..Self::of_types(TypeSet::OTHERS) }
    }

    /// Every string.
    pub fn strings() -> Self {
        Self { texts: vec![TextLimits::default()], ..Self::nothing() }
    }

    pub fn nothing() -> Self {
        Self::of_types(TypeSet::default())
    }

    fn of_types(others: TypeSet) -> Self {
        Self {
            words: Vec::new(),
            texts: Vec::new(),
            others,
            constants: TypeSet::NULL.or(TypeSet::BOOLEAN).has(others).then(HashMap::new),
            is_complete: true,
            has_number_limits: false,
            is_typed: true,
        }
    }

    pub fn is_nothing(&self) -> bool {
        !self.has_strings() && self.others.is_empty()
    }

    pub fn has_strings(&self) -> bool {
        !self.words.is_empty() || !self.texts.is_empty()
    }

    /// The numbers, arrays and objects. `None` if the schema does not list them all.
    pub fn constants(&self) -> Option<Vec<Value>> {
        let listed = self.constants.as_ref()?.iter().filter(|(_, kind)| self.others.has_any(**kind));
        let texts: BTreeSet<&String> = listed.map(|(text, _)| text).collect();
        texts.into_iter().map(|text| serde_json::from_str(text).ok()).collect()
    }

    /// Number of listed values.
    pub fn listed(&self) -> usize {
        self.words.len() + self.constants.as_ref().map_or(0, HashMap::len)
    }

    /// Number of patterns that strings must match.
    pub fn patterns(&self) -> usize {
        self.texts.iter().map(|text| text.patterns.len()).sum()
    }

    /// The values that both allow.
    pub fn and(&self, other: &Self) -> Self {
        let mut words = self.words_allowed_by(other);
        words.extend(other.words_allowed_by(self));
        let mut texts = Vec::new();
        let pairs = self.texts.iter().flat_map(|ours| other.texts.iter().map(move |theirs| ours.and(theirs)));
        pairs.take(MAX_TEXTS + 1).for_each(|text| add_text(&mut texts, text));
        let mut others = self.others.and(other.others);
        let constants = self.constants_allowed_by(other, others);
        if let Some(constants) = &constants {
            others = others.and(constants.values().copied().fold(TypeSet::NULL.or(TypeSet::BOOLEAN), TypeSet::or));
        }
        Self {
            words,
            constants,
            is_complete: self.is_complete && other.is_complete && self.texts.len() * other.texts.len() <= MAX_TEXTS,
            texts,
            others,
            has_number_limits: self.has_number_limits || other.has_number_limits,
            is_typed: self.is_typed || other.is_typed,
        }
    }

    fn words_allowed_by(&self, other: &Self) -> Vec<String> {
        let texts: Vec<_> =
            if self.words.is_empty() { Vec::new() } else { other.texts.iter().map(TextLimits::matcher).collect() };
        let known: HashSet<&String> = other.words.iter().collect();
        let is_allowed = |word: &&String| texts.iter().any(|matches| matches(word)) || known.contains(word);
        self.words.iter().filter(is_allowed).cloned().collect()
    }

    fn constants_allowed_by(&self, other: &Self, types: TypeSet) -> Option<HashMap<String, TypeSet>> {
        let (listed, limits) = match (&self.constants, &other.constants) {
            (Some(listed), limits) | (limits @ None, Some(listed)) => (listed, limits),
            (None, None) => return None,
        };
        let is_allowed = |text: &String| limits.as_ref().is_none_or(|limits| limits.contains_key(text));
        let allowed = listed.iter().filter(|(text, kind)| types.has_any(**kind) && is_allowed(text));
        Some(allowed.map(|(text, kind)| (text.clone(), *kind)).collect())
    }

    /// The values that one of both allows.
    pub fn or(mut self, other: Self) -> Self {
        self.words.extend(other.words);
        other.texts.into_iter().for_each(|text| add_text(&mut self.texts, text));
        self.others = self.others.or(other.others);
        self.constants = self.constants.zip(other.constants).map(|(mut ours, theirs)| {
            ours.extend(theirs);
            ours
        });
        self.has_number_limits |= other.has_number_limits;
        self.is_complete &= other.is_complete;
        self.is_typed &= other.is_typed;
        self
    }
}

/// Adds an alternative, unless another one includes it.
fn add_text(texts: &mut Vec<TextLimits>, text: TextLimits) {
    if text.is_unlimited() {
        *texts = vec![text];
    } else if !texts.contains(&text) && !texts.iter().any(TextLimits::is_unlimited) {
        texts.push(text);
    }
}

struct TypeReader<'d, 'a> {
    document: &'d Document<'a>,
    steps_left: usize,
    /// True if a schema without types has the types that its keywords are for.
    infers_types: bool,
}

impl TypeReader<'_, '_> {
    fn all(&mut self, schemas: &[&Value]) -> ValueType {
        let mut all = schemas.iter().fold(ValueType::any(), |all, schema| all.and(&self.value(schema, 0)));
        all.is_complete &= self.steps_left > 0;
        all
    }

    fn value(&mut self, schema: &Value, depth: usize) -> ValueType {
        let constants = schema.get("enum").and_then(Value::as_array).map_or(0, Vec::len);
        self.steps_left = self.steps_left.saturating_sub(PART_STEPS + constants);
        let fields = match schema {
            _ if self.steps_left == 0 || depth > MAX_DEPTH => return ValueType::any(),
            _ if allows_nothing(schema) => return ValueType::nothing(),
            Value::Object(fields) => fields,
            _ => return ValueType::any(),
        };
        let parts = |key: &str| fields.get(key).and_then(Value::as_array);
        let mut all = own_type(fields, self.infers_types);
        if let Some(target) = self.document.target(schema) {
            all = all.and(&self.value(target, depth + 1));
        }
        for part in parts("allOf").into_iter().flatten() {
            all = all.and(&self.value(part, depth + 1));
        }
        for choices in ["anyOf", "oneOf"].into_iter().filter_map(parts) {
            let mut values = choices.iter().map(|choice| self.value(choice, depth + 1));
            let first = values.next().unwrap_or_else(ValueType::nothing);
            let any = values.fold(first, ValueType::or);
            all = all.and(&any);
        }
        // OpenAPI 3.0 writes a type that may be null in this way.
        if fields.get("nullable") == Some(&Value::Bool(true)) {
            all.others = all.others.or(TypeSet::NULL);
        }
        all
    }
}

/// True for `false`, and for `not` with a schema that allows every value. In zod and TypeBox, this stands for a missing
/// value.
pub fn allows_nothing(schema: &Value) -> bool {
    let allows_all = |schema: &Value| *schema == true || schema.as_object().is_some_and(Map::is_empty);
    *schema == false || schema.get("not").is_some_and(allows_all)
}

/// The values that the keywords of one schema allow, without references and combined schemas.
fn own_type(fields: &Map<String, Value>, infers_types: bool) -> ValueType {
    let mut own = match fields.get("type") {
        Some(Value::Array(names)) => {
            let types = names.iter().filter_map(Value::as_str).map(named_type);
            types.fold(ValueType::nothing(), ValueType::or)
        }
        Some(Value::String(name)) => named_type(name),
        _ => ValueType::any(),
    };
    let listed = fields.get("enum").and_then(Value::as_array).map(Vec::as_slice);
    for constants in listed.into_iter().chain(fields.get("const").map(slice::from_ref)) {
        let all = constants.iter().map(constant).fold(ValueType::nothing(), ValueType::or);
        own = own.and(&all);
    }
    let limits = TextLimits::of(fields);
    let keeps_limits = limits.matcher();
    own.words.retain(|word| keeps_limits(word));
    own.texts.iter_mut().for_each(|text| *text = text.and(&limits));
    // `json_schema::prepare` bounds every integer by 10^18.
    let is_limit = |key: &str, limit: &Value| match key {
        "minimum" => limit.as_f64().is_none_or(|min| min > -1e18),
        "maximum" => limit.as_f64().is_none_or(|max| max < 1e18),
        "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => true,
        _ => false,
    };
    own.has_number_limits |= fields.iter().any(|(key, limit)| is_limit(key, limit));
    let is_set = |key: &str| fields.contains_key(key);
    let selects = ["type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"];
    if infers_types && !selects.into_iter().any(is_set) {
        if is_set("properties") {
            return ValueType::of_types(TypeSet::OBJECT);
        }
        if is_set("items") || is_set("prefixItems") {
            return ValueType::of_types(TypeSet::ARRAY);
        }
    }
    own
}

fn named_type(name: &str) -> ValueType {
    match TypeSet::named(name).and(TypeSet::OTHERS) {
        others if others.is_empty() => ValueType::strings(),
        others => ValueType::of_types(others),
    }
}

fn constant(value: &Value) -> ValueType {
    if let Value::String(word) = value {
        return ValueType { words: vec![word.clone()], ..ValueType::nothing() };
    }
    let types = TypeSet::of(value);
    let constants = Some(HashMap::from([(canonical(value), types)]));
    ValueType { constants, has_number_limits: value.is_number(), ..ValueType::of_types(types) }
}

/// A text that is the same for equal values of JSON Schema, which does not tell 1 from 1.0. Also the same for large
/// integers that an `f64` cannot tell apart.
fn canonical(value: &Value) -> String {
    match value {
        Value::Number(number) => (number.as_f64().unwrap_or_default() + 0.0).to_string(),
        Value::Array(items) => format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let named =
                |(name, value): (&String, &Value)| format!("{}:{}", Value::from(name.as_str()), canonical(value));
            let fields: BTreeSet<_> = fields.iter().map(named).collect();
            format!("{{{}}}", fields.into_iter().collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}
