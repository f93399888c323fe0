//! Finds out whether the alternatives of a `oneOf` exclude each other. llguidance supports only `anyOf`, which means
//! the same as `oneOf` for such alternatives.

use crate::schema::{Document, TypeSet, allows_nothing};
use serde_json::Value;
use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
    slice,
};

/// Maximum number of alternatives that are compared pairwise.
const MAX_ALTERNATIVES: usize = 256;
/// Maximum number of parts that are read for one `oneOf`. A part that is not read may allow every value.
const MAX_PARTS: usize = 100_000;
/// Maximum number of steps for all alternatives of a schema: names and constants that are read or compared. Values that
/// are not compared may be equal.
pub const MAX_STEPS: usize = 20_000_000;
/// Maximum number of constants of alternatives. More constants count as any value of their types.
const MAX_CONSTANTS: usize = 100_000;
/// Maximum number of references and parts inside of each other that are read.
const MAX_DEPTH: usize = 32;

/// True if the types, constants and tags of the alternatives show that a value can match only one alternative. A tag is a
/// property that one of two alternatives requires and that has different values in them. `steps_left` is what is left of
/// [`MAX_STEPS`].
pub fn are_disjoint<'a>(alternatives: &'a [Value], document: &Document<'a>, steps_left: &mut usize) -> bool {
    let mut reader = AlternativeReader { document, parts_left: MAX_PARTS, steps_left, tags: HashMap::new() };
    let all: Vec<_> = alternatives.iter().map(|alternative| reader.read(alternative, 0)).collect();
    let mut excludes_earlier = |at: usize| all[..at].iter().all(|other| reader.exclude(&all[at], other, 0));
    alternatives.len() <= MAX_ALTERNATIVES && (0..all.len()).all(&mut excludes_earlier)
}

/// The values that a schema allows at most.
#[derive(Default)]
struct AllowedValues<'a> {
    types: TypeSet,
    /// The only allowed values, as [`canonical`] texts, and their types. `None` if the schema does not list them.
    constants: Option<HashMap<String, TypeSet>>,
    /// The properties of an object.
    properties: Vec<(&'a str, &'a Value)>,
    required: Vec<&'a str>,
}

impl<'a> AllowedValues<'a> {
    fn of_types(types: TypeSet) -> Self {
        Self { types, ..Self::default() }
    }

    fn of_type(name: &str) -> Self {
        match name {
            "null" => Self::of_constants(&[Value::Null]),
            "boolean" => Self::of_constants(&[Value::Bool(true), Value::Bool(false)]),
            _ => Self::of_types(TypeSet::named(name)),
        }
    }

    fn of_constants(values: &[Value]) -> Self {
        let types = values.iter().map(TypeSet::of).fold(TypeSet::default(), TypeSet::or);
        let constants = values.iter().map(|value| (canonical(value), TypeSet::of(value))).collect();
        Self { constants: Some(constants), ..Self::of_types(types) }
    }

    /// The values that one of both allows.
    fn or(self, other: Self) -> Self {
        let both =
            self.constants.zip(other.constants).filter(|(ours, theirs)| ours.len() + theirs.len() <= MAX_CONSTANTS);
        let constants = both.map(|(mut ours, theirs)| {
            ours.extend(theirs);
            ours
        });
        Self { constants, ..Self::of_types(self.types.or(other.types)) }
    }
}

struct AlternativeReader<'d, 'a> {
    document: &'d Document<'a>,
    parts_left: usize,
    steps_left: &'d mut usize,
    /// What the properties allow that were compared before, by their address.
    tags: HashMap<*const Value, Rc<AllowedValues<'a>>>,
}

impl<'a> AlternativeReader<'_, 'a> {
    /// Returns false if too few steps are left.
    fn spend(&mut self, steps: usize) -> bool {
        let is_enough = steps <= *self.steps_left;
        *self.steps_left = self.steps_left.saturating_sub(steps);
        is_enough
    }

    fn read(&mut self, schema: &'a Value, depth: usize) -> AllowedValues<'a> {
        let everything = AllowedValues::of_types(TypeSet::OTHERS.or(TypeSet::STRING));
        self.parts_left = self.parts_left.saturating_sub(1);
        let fields = match schema {
            _ if allows_nothing(schema) => return AllowedValues::of_constants(&[]),
            Value::Object(fields) if depth <= MAX_DEPTH && self.parts_left > 0 => fields,
            _ => return everything,
        };
        let list = |key: &str| fields.get(key).and_then(Value::as_array).map(Vec::as_slice);
        let properties = fields.get("properties").and_then(Value::as_object);
        let names = properties.map_or(0, |properties| properties.len());
        let values = ["required", "enum"].into_iter().filter_map(list).map(<[Value]>::len).sum::<usize>();
        if !self.spend(1 + names + values) {
            return everything;
        }
        let mut allowed = AllowedValues {
            properties: properties.into_iter().flatten().map(|(name, part)| (name.as_str(), part)).collect(),
            required: list("required").into_iter().flatten().filter_map(Value::as_str).collect(),
            ..everything
        };
        if let Some(names) = list("type").or(fields.get("type").map(slice::from_ref)) {
            let types = names.iter().filter_map(Value::as_str).map(AllowedValues::of_type).reduce(AllowedValues::or);
            allowed = Self::both(allowed, types.unwrap_or(AllowedValues::of_constants(&[])));
        }
        for values in list("enum").into_iter().chain(fields.get("const").map(slice::from_ref)) {
            allowed = Self::both(allowed, AllowedValues::of_constants(values));
        }
        for part in self.document.target(schema).into_iter().chain(list("allOf").into_iter().flatten()) {
            let part = self.read(part, depth + 1);
            allowed = Self::both(allowed, part);
        }
        for choices in ["anyOf", "oneOf"].into_iter().filter_map(list) {
            let choices = choices.iter().map(|part| self.read(part, depth + 1)).reduce(AllowedValues::or);
            allowed = Self::both(allowed, choices.unwrap_or(AllowedValues::of_constants(&[])));
        }
        // OpenAPI 3.0 writes a type that may be null in this way.
        let is_nullable = fields.get("nullable") == Some(&Value::Bool(true));
        if is_nullable { allowed.or(AllowedValues::of_constants(&[Value::Null])) } else { allowed }
    }

    /// The values that both allow.
    fn both(mut one: AllowedValues<'a>, other: AllowedValues<'a>) -> AllowedValues<'a> {
        one.types = one.types.and(other.types);
        one.constants = match (one.constants, other.constants) {
            (Some(ours), Some(theirs)) => {
                Some(ours.into_iter().filter(|(text, _)| theirs.contains_key(text)).collect())
            }
            (ours, theirs) => ours.or(theirs),
        };
        if let Some(constants) = &mut one.constants {
            constants.retain(|_, types| one.types.has_any(*types));
            one.types = one.types.and(constants.values().copied().fold(TypeSet::default(), TypeSet::or));
        }
        one.properties.extend(other.properties);
        one.required.extend(other.required);
        one
    }

    /// True if no value is allowed by both.
    fn exclude(&mut self, one: &AllowedValues<'a>, other: &AllowedValues<'a>, depth: usize) -> bool {
        let types = one.types.and(other.types);
        if let (Some(ours), Some(theirs)) = (&one.constants, &other.constants) {
            return self.spend(ours.len()) && !ours.keys().any(|text| theirs.contains_key(text));
        }
        if types != TypeSet::OBJECT || depth > MAX_DEPTH {
            return types.is_empty();
        }
        one.required.iter().chain(&other.required).any(|name| {
            let parts = [one, other].map(|allowed| self.property(allowed, name));
            let [Some(ours), Some(theirs)] = parts else { return false };
            let [ours, theirs] = [ours, theirs].map(|part| self.tag(part, depth + 1));
            self.exclude(&ours, &theirs, depth + 1)
        })
    }

    fn property(&mut self, allowed: &AllowedValues<'a>, name: &str) -> Option<&'a Value> {
        let found = self.spend(1 + allowed.properties.len()).then(|| allowed.properties.iter());
        found?.find(|(property, _)| *property == name).map(|(_, part)| *part)
    }

    /// What a property allows. Each is read once, although it is compared with those of all other alternatives.
    fn tag(&mut self, part: &'a Value, depth: usize) -> Rc<AllowedValues<'a>> {
        if let Some(known) = self.tags.get(&std::ptr::from_ref(part)) {
            return known.clone();
        }
        let allowed = Rc::new(self.read(part, depth));
        self.tags.insert(part, allowed.clone());
        allowed
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tagged(tag: &str) -> Value {
        json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": tag}, "x": {"type": "string"}}})
    }

    #[test]
    fn types_constants_and_tags_make_alternatives_disjoint() {
        let root = json!({"$defs": {"cat": tagged("cat"), "dog": {"$ref": "#/$defs/hound"}, "hound": tagged("dog"),
            "loop": {"$ref": "#/$defs/loop"}}});
        let optional = json!({"type": "object", "properties": {"kind": {"const": "bird"}}});
        for (alternatives, disjoint) in [
            (json!([{"type": "string"}, {"type": "null"}, {"type": "integer"}]), true),
            (json!([{"type": "integer"}, {"type": "number"}]), false),
            (json!([{"type": ["string", "null"]}, {"type": "null"}]), false),
            (json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "string"}]), true),
            (json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}]), false),
            // An object without the tag matches only the second alternative.
            (json!([tagged("cat"), optional]), true),
            (json!([optional, {"type": "object", "properties": {"kind": {"const": "cat"}}}]), false),
            (json!([tagged("cat"), {"required": ["kind"], "properties": {"kind": {"const": "dog"}}}]), true),
            (
                json!([{"required": ["a"], "properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]),
                false,
            ),
            (json!([{"const": "a"}, {"const": "b"}, {"enum": ["c", 1, null]}, {"const": 2}]), true),
            (json!([{"type": "string", "enum": ["a", "b"]}, {"type": "string", "enum": ["c"]}]), true),
            (json!([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]), false),
            (json!([{"const": 1}, {"const": 1.0}]), false),
            (json!([{"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}]), false),
            (json!([{"const": [1]}, {"const": [2]}, {"const": {"a": 1}}, {"const": {"a": 2}}]), true),
            (json!([{"const": "a"}, {"type": "string"}]), false),
            (json!([{"const": "a"}, {"type": "integer"}]), true),
            (json!([{"enum": ["a", 5], "type": "string"}, {"type": "integer"}]), true),
            (json!([{"const": 5}, {"type": "integer"}]), false),
            (json!([{"const": 5}, {"type": "integer", "const": 6, "title": "six"}]), true),
            (json!([{"type": "string", "nullable": true}, {"type": "null"}]), false),
            (json!([{"const": "a", "nullable": true}, {"const": "b"}]), true),
            (json!([{"const": "a", "nullable": true}, {"const": "b", "nullable": true}]), false),
            (json!([{"allOf": [{"type": ["string", "null"]}, {"enum": ["a", null, 3]}]}, {"enum": ["b", 3]}]), true),
            (json!([{"anyOf": [{"const": "a"}, {"const": "b"}]}, {"anyOf": [{"const": "c"}, {"type": "null"}]}]), true),
            (json!([{"anyOf": [{"const": "a"}, {"const": "b"}]}, {"oneOf": [{"const": "b"}]}]), false),
            (json!([false, {"type": "string"}, false]), true),
            (json!([{"not": {}}, {"type": "string"}, {"not": true}]), true),
            (json!([true, {"type": "string"}]), false),
            (json!([{"$ref": "#/$defs/loop"}, {"type": "string"}]), false),
            (json!([{"const": 9007199254740993i64}, {"const": 9007199254740992i64}]), false),
            (json!([{"minimum": 1}, {"type": "string"}]), false),
            (json!([]), true),
        ] {
            assert_eq!(
                are_disjoint(alternatives.as_array().unwrap(), &Document::new(&root), &mut MAX_STEPS.clone()),
                disjoint,
                "{alternatives}"
            );
        }
    }

    /// Alternatives that would take many steps: large enums whose only common value is the last, nested objects, and
    /// many references to one enum.
    #[test]
    fn work_for_alternatives_is_limited() {
        let numbers = |from: usize| (from..from + 9999).chain([7]).collect::<Vec<_>>();
        let node = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"$ref": "#/$defs/node"}},
            "required": ["a", "b"]});
        let root = json!({"$defs": {"x": {"enum": numbers(10_000)}, "y": {"enum": numbers(30_000)}, "node": node}});
        let names: Vec<String> = (0..100).map(|n| format!("p{n}")).collect();
        let tagged = |target: &str| {
            let part = json!({"$ref": target});
            let parts: serde_json::Map<_, _> = names.iter().map(|name| (name.clone(), part.clone())).collect();
            json!({"type": "object", "properties": parts, "required": names})
        };
        let many = |target: &str| json!({"anyOf": vec![json!({"$ref": target}); 5000]});
        for (alternatives, steps_left) in [
            ([tagged("#/$defs/x"), tagged("#/$defs/y")], MAX_STEPS / 2),
            ([json!({"$ref": "#/$defs/node"}), json!({"$ref": "#/$defs/node"})], 0),
            ([many("#/$defs/x"), many("#/$defs/y")], 0),
        ] {
            let mut steps = MAX_STEPS;
            assert!(!are_disjoint(&alternatives, &Document::new(&root), &mut steps));
            assert!(steps >= steps_left && (steps == 0) == (steps_left == 0), "{steps}");
        }
    }

    #[test]
    fn last_property_tells_many_alternatives_apart() {
        let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
        let alternative = |n: usize| {
            let mut parts: serde_json::Map<_, _> =
                names.iter().map(|name| (name.clone(), json!({"type": "string"}))).collect();
            parts.insert(names[19].clone(), json!({"const": n}));
            json!({"type": "object", "properties": parts, "required": names})
        };
        let alternatives: Vec<Value> = (0..120).map(alternative).collect();
        assert!(are_disjoint(&alternatives, &Document::new(&Value::Null), &mut MAX_STEPS.clone()));
    }
}
