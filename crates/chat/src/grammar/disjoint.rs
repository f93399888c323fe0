//! Finds out whether the alternatives of a `oneOf` exclude each other. llguidance supports only `anyOf`, which means
//! the same as `oneOf` for such alternatives.

use crate::schema::{Document, MAX_PARAMETER_SETS, ParameterSet, TypeSet, ValueType, parameter_sets};
use serde_json::Value;
use std::{collections::HashMap, rc::Rc};

/// Maximum number of alternatives that are compared pairwise.
const MAX_ALTERNATIVES: usize = 256;
/// Maximum number of steps for all alternatives of a schema: parts and constants that are read or compared. Values that
/// are not compared may be equal.
pub const MAX_STEPS: usize = 20_000_000;
/// Number of steps of a comparison, besides one for each constant.
const COMPARISON_STEPS: usize = 50;
/// Number of steps to compile a pattern.
const PATTERN_STEPS: usize = 1000;
/// Maximum number of objects inside of each other that are compared.
const MAX_DEPTH: usize = 32;

/// True if the types, constants and tags of the alternatives show that a value can match only one alternative. A tag is a
/// property that one of two alternatives requires, or that is `required` everywhere, and that has different values in
/// them. `steps_left` is what is left of [`MAX_STEPS`].
pub fn are_disjoint<'a>(
    alternatives: &'a [Value],
    required: Option<&'a str>,
    document: &Document<'a>,
    steps_left: &mut usize,
) -> bool {
    let mut reader = AlternativeReader { document, steps_left, required, known: HashMap::new() };
    let mut excludes = |one: &'a Value, other: &'a Value| reader.exclude(vec![one], vec![other], 0);
    let mut pairs =
        alternatives.iter().enumerate().flat_map(|(at, one)| alternatives[..at].iter().map(move |other| (one, other)));
    alternatives.len() <= MAX_ALTERNATIVES && pairs.all(|(one, other)| excludes(one, other))
}

/// The values and properties that schemas allow together.
struct Allowed<'a> {
    values: ValueType,
    /// The properties of objects.
    sets: Vec<ParameterSet<'a>>,
}

struct AlternativeReader<'d, 'a> {
    document: &'d Document<'a>,
    steps_left: &'d mut usize,
    /// A property that each alternative requires.
    required: Option<&'a str>,
    /// Results of [`AlternativeReader::read`], by the addresses of the schemas.
    known: HashMap<Vec<*const Value>, Rc<Allowed<'a>>>,
}

impl<'a> AlternativeReader<'_, 'a> {
    /// True if no value matches all `ours` and all `theirs`.
    fn exclude(&mut self, ours: Vec<&'a Value>, theirs: Vec<&'a Value>, depth: usize) -> bool {
        let [ours, theirs] = [ours, theirs].map(|schemas| self.read(&schemas));
        let patterns = ours.values.patterns() + theirs.values.patterns();
        let steps = COMPARISON_STEPS + PATTERN_STEPS * patterns + ours.values.listed() + theirs.values.listed();
        let is_enough = steps <= *self.steps_left;
        *self.steps_left = self.steps_left.saturating_sub(steps);
        if !is_enough {
            return false;
        }
        let both = ours.values.and(&theirs.values);
        if both.has_strings() || both.others != TypeSet::OBJECT || depth > MAX_DEPTH {
            return both.is_nothing();
        }
        let tag = self.required.filter(|_| depth == 0);
        ours.sets.iter().all(|ours| {
            theirs.sets.iter().all(|theirs| {
                let mut names = ours.required().chain(theirs.required()).chain(tag);
                names.any(|name| self.exclude(ours.schemas(name), theirs.schemas(name), depth + 1))
            })
        })
    }

    /// Reads schemas. Each is read once, although it is compared with those of all other alternatives.
    fn read(&mut self, schemas: &[&'a Value]) -> Rc<Allowed<'a>> {
        let addresses: Vec<_> = schemas.iter().map(|schema| std::ptr::from_ref(*schema)).collect();
        if let Some(known) = self.known.get(&addresses) {
            return known.clone();
        }
        let values = ValueType::at_most(schemas, self.document, self.steps_left);
        let mut sets = parameter_sets(schemas, self.document);
        if sets.len() > MAX_PARAMETER_SETS {
            sets = vec![ParameterSet::default()];
        }
        let allowed = Rc::new(Allowed { values, sets });
        self.known.insert(addresses, allowed.clone());
        allowed
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
            // Objects that exclude a required property of the other alternative.
            (json!([tagged("cat"), {"type": "object", "properties": {"x": {}}, "additionalProperties": false}]), true),
            (json!([tagged("cat"), {"type": "object", "patternProperties": {"^k": {"type": "integer"}}}]), true),
            (json!([tagged("cat"), {"type": "object", "additionalProperties": {"type": "integer"}}]), true),
            (json!([tagged("cat"), {"type": "object", "patternProperties": {"^x": false}}]), false),
            (json!([tagged("cat"), {"properties": {"x": {}}, "additionalProperties": false}]), true),
            (json!([{"required": ["k"]}, {"properties": {"x": {}}, "additionalProperties": false}]), false),
            (json!([{"anyOf": [tagged("a"), tagged("b")]}, {"anyOf": [tagged("c"), {"type": "null"}]}]), true),
            (json!([{"anyOf": [tagged("a"), tagged("b")]}, {"anyOf": [tagged("c"), tagged("a")]}]), false),
            (json!([]), true),
        ] {
            let all = alternatives.as_array().unwrap();
            let found = are_disjoint(all, None, &Document::new(&root), &mut MAX_STEPS.clone());
            assert_eq!(found, disjoint, "{alternatives}");
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
            ([many("#/$defs/x"), many("#/$defs/y")], MAX_STEPS / 2),
        ] {
            let mut steps = MAX_STEPS;
            assert!(!are_disjoint(&alternatives, None, &Document::new(&root), &mut steps));
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
        assert!(are_disjoint(&alternatives, None, &Document::new(&Value::Null), &mut MAX_STEPS.clone()));
    }
}
