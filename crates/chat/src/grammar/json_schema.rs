//! A client's JSON schema, prepared for llguidance and for [`tool_calls`](super::tool_calls). The prepared schema is
//! bounded and has no keywords that do not affect validity. Parts that references lead to are in its `$defs`, and each
//! `$ref` is a pointer to one of them. Errors name the path of the part that causes them.

use super::{
    disjoint, equivalents,
    expressions::{LengthChecker, MAX_LENGTH, can_enforce},
    format::FormatError,
    look_ahead,
    schema_references::{self, subschemas},
    string_formats,
};
use crate::schema::{Document, TypeSet, ValueType, allows_nothing, without_nulls};
use llguidance::{derivre::RegexAst, regex_to_lark};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const MAX_BYTES: usize = 512 << 10;
const MAX_SUBSCHEMAS: usize = 20_000;
/// Maximum number of properties of all objects together. Compiling takes about a millisecond per property.
const MAX_PROPERTIES: usize = 1000;
/// A pattern counts as one property for each pattern of its object, up to this number, because each is compared with all
/// others.
pub const PATTERN_PROPERTIES: usize = 16;
const MAX_DEPTH: usize = 64;

/// White space between the parts of JSON: none, a space, or a new line and its indentation. Without a bound, a model
/// could write white space up to its token limit.
const WHITESPACE: &str = r" |\n[ \t]{0,40}";

/// Largest absolute value of an integer for which the schema sets no bounds. Many JSON readers only hold 64 bits, and
/// without a bound a model could write digits until its token limit. This is also the largest bound that can be
/// compiled for a number that is not an integer.
const MAX_INTEGER: i64 = 10i64.pow(18);
/// Largest bound that can be compiled for an integer.
const MAX_INTEGER_BOUND: f64 = 9e18;

/// Keywords that apply other schemas to the same value.
const COMBINING: [&str; 8] = ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"];

/// Keywords that restrict the valid values in a way that a token mask cannot enforce.
const UNSUPPORTED: [&str; 14] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Formats that can be enforced. Every other format is an annotation, as in the JSON Schema specification.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Formats that become patterns. llguidance's expressions for them allow a 61st second in every minute, the year 0 and 29
/// February in every year.
const AS_PATTERNS: [&str; 3] = ["time", "date", "date-time"];

const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "string", "integer"];

/// Returns the schema to compile.
///
/// # Errors
/// The schema is malformed or over a limit, or `strict` is set and a keyword cannot be enforced.
pub fn prepare(schema: &Value, strict: bool) -> Result<Value, FormatError> {
    let bytes = schema.to_string().len();
    if bytes > MAX_BYTES {
        return Err(FormatError::new("", format!("the schema has {bytes} bytes; the limit is {MAX_BYTES}")));
    }
    let schema = &without_nulls(schema);
    let mut preparation = Preparation {
        document: Document::new(schema),
        strict,
        subschemas_left: MAX_SUBSCHEMAS,
        properties_left: MAX_PROPERTIES,
        steps_left: disjoint::MAX_STEPS,
        lengths: LengthChecker::new(),
        definition_names: HashMap::new(),
        pending: Vec::new(),
    };
    let prepared = preparation.subschema(schema, "", 0)?;
    let mut definitions = Map::new();
    while let Some((name, part)) = preparation.pending.pop() {
        definitions.insert(name.clone(), preparation.subschema(part, &format!(".{name}"), 1)?);
    }
    let prepared = complete(prepared, definitions, strict);
    schema_references::check(&prepared)?;
    Ok(prepared)
}

/// Adds definitions and llguidance's options to a prepared schema.
fn complete(mut schema: Value, definitions: Map<String, Value>, strict: bool) -> Value {
    if let (Value::Object(fields), false) = (&mut schema, definitions.is_empty()) {
        fields.insert("$defs".into(), definitions.into());
    }
    let mut options = json!({"whitespace_pattern": WHITESPACE, "coerce_one_of": !strict, "lenient": !strict});
    if strict && has_names_beside_listed(&schema) && !schema.to_string().contains("\\u00") {
        // With the escape `\u`, a model could spell a listed name so that llguidance takes it for another name.
        options["json_allowed_escapes"] = "nrbtf\\\"".into();
    }
    if let Value::Object(fields) = &mut schema {
        fields.insert("x-guidance".into(), options);
    }
    schema
}

/// True if an object in the schema may have names other than those that it lists.
fn has_names_beside_listed(schema: &Value) -> bool {
    let lists = ["properties", "patternProperties"].iter().any(|key| schema.get(key).is_some());
    let is_open = lists && schema.get("additionalProperties") != Some(&Value::Bool(false));
    is_open || subschemas(schema).into_iter().any(|(_, _, part)| has_names_beside_listed(part))
}

struct Preparation<'a> {
    document: Document<'a>,
    strict: bool,
    subschemas_left: usize,
    properties_left: usize,
    /// Steps that are left to read values and to compare alternatives.
    steps_left: usize,
    lengths: LengthChecker,
    /// Names in the prepared `$defs` of the parts that references lead to, by the address of the part.
    definition_names: HashMap<*const Value, String>,
    /// Definitions that are not prepared yet.
    pending: Vec<(String, &'a Value)>,
}

impl<'a> Preparation<'a> {
    fn subschema(&mut self, whole: &'a Value, path: &str, depth: usize) -> Result<Value, FormatError> {
        let error = |reason: String| Err(FormatError::new(path, reason));
        self.spend(1, path)?;
        if depth > MAX_DEPTH {
            return error(format!("the schema is more than {MAX_DEPTH} levels deep"));
        }
        let schema = match whole {
            _ if allows_nothing(whole) || self.document.target(whole).is_some_and(allows_nothing) => {
                return Ok(Value::Bool(false));
            }
            Value::Bool(_) => return Ok(whole.clone()),
            Value::Object(schema) => schema,
            _ => return error("a schema is an object or a boolean".into()),
        };
        let mut prepared = Map::new();
        let mut patterns = Vec::new();
        for (key, value) in schema {
            let inner = format!("{path}.{key}");
            let malformed = |kind: &str| Err(FormatError::new(&inner, format!("{key} must be {kind}")));
            let value = match (key.as_str(), value) {
                ("const", _) => value.clone(),
                ("$ref", _) => self.reference(whole, &inner)?.into(),
                ("unevaluatedProperties", Value::Bool(false))
                    if !COMBINING.iter().any(|key| schema.contains_key(*key)) =>
                {
                    prepared.entry("additionalProperties").or_insert(Value::Bool(false));
                    continue;
                }
                ("type", _) => match check_type(value, self.strict, &inner)? {
                    Some(value) => value,
                    None => continue,
                },
                // In draft 3, a property says whether it is required.
                ("required", Value::Bool(_)) if !self.strict => continue,
                ("required", _) if !is_string_array(value) => return malformed("an array of names"),
                ("pattern", _) => {
                    let Value::String(pattern) = value else { return malformed("a string") };
                    for part in look_ahead::split(pattern).unwrap_or_else(|| vec![pattern.clone()]) {
                        patterns.extend(self.can_enforce_pattern(&part, &inner)?.then_some(part));
                    }
                    continue;
                }
                ("format", Value::String(format)) if FORMATS.contains(&format.as_str()) => value.clone(),
                ("propertyNames", _) => {
                    // Checks the schema of the names.
                    self.subschema(value, &inner, depth + 1)?;
                    continue;
                }
                ("enum", _) if !value.is_array() => return malformed("an array"),
                // In draft 4, this is a flag of `minimum` or `maximum`.
                ("exclusiveMinimum" | "exclusiveMaximum", Value::Bool(_)) => value.clone(),
                ("multipleOf" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _)
                    if !value.is_number() =>
                {
                    return malformed("a number");
                }
                ("enum" | "required" | "multipleOf", _)
                | ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _) => value.clone(),
                ("minItems" | "maxItems" | "minProperties" | "maxProperties" | "minLength" | "maxLength", _) => {
                    count(value, &inner)?
                }
                ("properties" | "patternProperties", Value::Object(parts)) => {
                    let count = if key == "properties" {
                        parts.len()
                    } else {
                        parts.len() * parts.len().min(PATTERN_PROPERTIES)
                    };
                    self.spend_properties(count, &inner)?;
                    let mut prepared = Map::new();
                    for (name, part) in parts {
                        let inner = format!("{inner}.{name}");
                        if key == "properties" || self.can_enforce_pattern(name, &inner)? {
                            prepared.insert(name.clone(), self.subschema(part, &inner, depth + 1)?);
                        }
                    }
                    prepared.into()
                }
                ("properties" | "patternProperties", _) => return malformed("an object"),
                ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(parts)) => {
                    let part = |(index, part)| self.subschema(part, &format!("{inner}[{index}]"), depth + 1);
                    parts.iter().enumerate().map(part).collect::<Result<_, _>>().map(Value::Array)?
                }
                ("anyOf" | "oneOf" | "allOf" | "prefixItems", _) => return malformed("an array"),
                ("items" | "additionalItems" | "additionalProperties", _) => {
                    self.subschema(value, &inner, depth + 1)?
                }
                (word, _) if self.strict && UNSUPPORTED.contains(&word) && !allows_everything(word, value) => {
                    return Err(FormatError::new(&inner, format!("`{key}` cannot be enforced in a strict schema")));
                }
                // Definitions, and annotations, which do not affect which values are valid.
                _ => continue,
            };
            prepared.insert(key.clone(), value);
        }
        if !self.strict {
            if prepared.get("maxLength").and_then(Value::as_u64).is_some_and(|max| max > MAX_LENGTH) {
                prepared.shift_remove("maxLength");
            }
            if self.lengths.is_complex(&patterns, &prepared) {
                ["minLength", "maxLength"].iter().for_each(|key| _ = prepared.shift_remove(*key));
            }
        }
        if patterns.len() > 1 {
            let all = prepared.entry("allOf").or_insert_with(|| json!([])).as_array_mut();
            all.into_iter().for_each(|all| all.extend(patterns.drain(..).map(|pattern| json!({"pattern": pattern}))));
        }
        prepared.extend(patterns.pop().map(|pattern| ("pattern".to_owned(), pattern.into())));
        self.replace_one_of(schema, &mut prepared, path)?;
        self.replace_keywords(schema, &mut prepared, path)?;
        self.check_large_constants(&mut prepared, path)?;
        self.limit_bounds(&mut prepared, path)?;
        bound_integer(&mut prepared);
        let format = prepared.get("format").and_then(Value::as_str).filter(|format| AS_PATTERNS.contains(format));
        let is_limited = ["pattern", "enum", "const"].iter().any(|key| prepared.contains_key(*key));
        if let Some(expression) = format.and_then(string_formats::expression).filter(|_| !is_limited) {
            prepared.insert("pattern".into(), format!("^({expression})$").into());
            prepared.shift_remove("format");
        }
        if self.strict {
            check_min_properties(&prepared, path)?;
        }
        // OpenAPI 3.0 writes a type that may be null in this way.
        if schema.get("nullable") == Some(&Value::Bool(true)) {
            return Ok(json!({"anyOf": [prepared, {"type": "null"}]}));
        }
        Ok(Value::Object(prepared))
    }

    /// Counts parts of the schema.
    fn spend(&mut self, parts: usize, path: &str) -> Result<(), FormatError> {
        let error = || FormatError::new(path, format!("the schema has more than {MAX_SUBSCHEMAS} parts"));
        self.subschemas_left = self.subschemas_left.checked_sub(parts).ok_or_else(error)?;
        Ok(())
    }

    fn spend_properties(&mut self, count: usize, path: &str) -> Result<(), FormatError> {
        let error = || FormatError::new(path, format!("the schema has more than {MAX_PROPERTIES} properties"));
        self.properties_left = self.properties_left.checked_sub(count).ok_or_else(error)?;
        Ok(())
    }

    /// Replaces a strict `oneOf` by alternatives of which only one can match. Each one for objects requires
    /// OpenAPI's `discriminator`, which Pydantic does not list in `required` if it has a default.
    fn replace_one_of(
        &mut self,
        schema: &'a Map<String, Value>,
        prepared: &mut Map<String, Value>,
        path: &str,
    ) -> Result<(), FormatError> {
        let tag = schema.get("discriminator").and_then(|discriminator| discriminator.get("propertyName")?.as_str());
        let one_of = schema.get("oneOf").and_then(Value::as_array).filter(|_| self.strict || tag.is_some());
        let Some(one_of) = one_of else { return Ok(()) };
        let is_alone = !schema.contains_key("anyOf");
        let mut are_disjoint = |tag| disjoint::are_disjoint(one_of, tag, &self.document, &mut self.steps_left);
        if !(self.strict && is_alone && are_disjoint(None)) {
            let tag = tag.filter(|tag| !self.strict || are_disjoint(Some(*tag)));
            let parts = match tag {
                Some(tag) => {
                    let part = json!({"type": "object", "required": [tag]});
                    let may_be_object =
                        |one| self.values(one).is_none_or(|values| values.others.has_any(TypeSet::OBJECT));
                    Some(one_of.iter().map(may_be_object).map(|is| is.then(|| part.clone())).collect())
                }
                None => equivalents::excluding_parts(one_of, &self.document)
                    .map(|parts| parts.into_iter().map(Some).collect::<Vec<_>>()),
            };
            self.spend(parts.as_ref().map_or(0, |parts| parts.len().pow(2)), path)?;
            let alternatives = prepared.get_mut("oneOf").and_then(Value::as_array_mut).zip(parts);
            let Some((alternatives, parts)) = alternatives.filter(|_| is_alone) else {
                if !self.strict {
                    return Ok(());
                }
                let reason = "`oneOf` can be enforced in a strict schema only if types, constants, a tag or required \
                              properties tell its alternatives apart; use `anyOf`";
                return Err(FormatError::new(&format!("{path}.oneOf"), reason));
            };
            for (alternative, part) in alternatives.iter_mut().zip(parts) {
                if let Some(part) = part {
                    *alternative = json!({"allOf": [alternative.take(), part]});
                }
            }
        }
        let renamed = std::mem::take(prepared).into_iter();
        prepared.extend(renamed.map(|(key, value)| (if key == "oneOf" { "anyOf".into() } else { key }, value)));
        Ok(())
    }

    /// Replaces keywords that llguidance does not have. One that has no equivalent is an error if the schema is strict.
    fn replace_keywords(
        &mut self,
        schema: &'a Map<String, Value>,
        prepared: &mut Map<String, Value>,
        path: &str,
    ) -> Result<(), FormatError> {
        let mut unenforced = Vec::new();
        if schema.get("uniqueItems") == Some(&Value::Bool(true)) {
            let items = schema.get("items").and_then(|items| self.values(items));
            if equivalents::replace_unique_items(prepared, items.as_ref()) {
                self.spend(prepared.get("enum").and_then(Value::as_array).map_or(0, Vec::len), path)?;
            } else {
                unenforced
                    .push(("uniqueItems", "few constants, such as an `enum` of five words, or with `maxItems` of 1"));
            }
        }
        if let Some(names) = schema.get("propertyNames") {
            let values = match schema.get("additionalProperties") {
                Some(part) if allows_nothing(part) => Value::Bool(false),
                Some(part @ Value::Object(_)) => json!({"$ref": self.definition(part, "additionalProperties")}),
                other => other.cloned().unwrap_or(Value::Bool(true)),
            };
            let names = self.values(names).filter(|names| names.words.len() <= self.properties_left);
            let can_enforce = |pattern: &str| self.can_enforce_pattern(pattern, path) == Ok(true);
            let words = names.as_ref().map_or(0, |names| names.words.len());
            if names.is_some_and(|names| equivalents::replace_property_names(prepared, &names, &values, can_enforce)) {
                self.spend_properties(words, path)?;
            } else {
                unenforced.push((
                    "propertyNames",
                    "an `enum`, or one `pattern` or length for an object without `properties`",
                ));
            }
        }
        match unenforced.first().filter(|_| self.strict) {
            Some((keyword, condition)) => {
                let reason = format!("`{keyword}` can be enforced in a strict schema only for {condition}");
                Err(FormatError::new(&format!("{path}.{keyword}"), reason))
            }
            None => Ok(()),
        }
    }

    /// The values that a part of the schema allows. `None` if there are too many.
    fn values(&mut self, part: &Value) -> Option<ValueType> {
        let values = ValueType::at_most(&[part], &self.document, &mut self.steps_left);
        values.is_complete.then_some(values)
    }

    /// The reference to the definition of the part that the `$ref` of `schema` leads to.
    fn reference(&mut self, schema: &'a Value, path: &str) -> Result<String, FormatError> {
        let reference = &schema["$ref"];
        let Some(target) = self.document.target(schema) else {
            return Err(FormatError::new(path, format!("`$ref` {reference} leads to no part of the schema")));
        };
        let path = reference.as_str().unwrap_or_default().trim_start_matches(['#', '/']).replace('/', ".");
        Ok(self.definition(target, &path))
    }

    /// The reference to the definition of a part of the schema, whose name is close to `path`.
    fn definition(&mut self, target: &'a Value, path: &str) -> String {
        let name = self.definition_names.get(&std::ptr::from_ref(target)).cloned().unwrap_or_else(|| {
            // The name needs no escapes in a pointer.
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "$._-".contains(c);
            let mut name: String = path.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
            while name.is_empty() || self.definition_names.values().any(|taken| *taken == name) {
                name = format!("{name}_{}", self.definition_names.len());
            }
            self.definition_names.insert(target, name.clone());
            self.pending.push((name.clone(), target));
            name
        });
        format!("#/$defs/{name}")
    }

    fn can_enforce_pattern(&self, pattern: &str, path: &str) -> Result<bool, FormatError> {
        can_enforce(&RegexAst::SearchRegex(regex_to_lark(pattern, "dw")), self.strict.then_some("schema"), path)
    }

    /// Handles constants with an integer that the compiler would round to an `f64`. Such a constant is an error if the
    /// schema is strict, and is left out otherwise.
    fn check_large_constants(&self, schema: &mut Map<String, Value>, path: &str) -> Result<(), FormatError> {
        for key in ["const", "enum"] {
            if !schema.get(key).is_some_and(has_rounded_integer) {
                continue;
            }
            if self.strict {
                let reason = "an integer with more digits than an f64 holds cannot be enforced in a strict schema";
                return Err(FormatError::new(&format!("{path}.{key}"), reason));
            }
            schema.shift_remove(key);
        }
        Ok(())
    }

    /// Handles bounds that cannot be compiled because they are beyond the limit (too far from zero). A large maximum or
    /// a small minimum is set to the limit. A large minimum or a small maximum would allow only numbers beyond the
    /// limit. Such a bound is an error if the schema is strict, and is left out otherwise. An integer that the compiler
    /// would round to a number outside of the bound becomes the next number inside.
    fn limit_bounds(&self, schema: &mut Map<String, Value>, path: &str) -> Result<(), FormatError> {
        let limit = if is_integer(schema) { MAX_INTEGER_BOUND } else { MAX_INTEGER as f64 };
        for (key, sign) in [("minimum", -1.0), ("exclusiveMinimum", -1.0), ("maximum", 1.0), ("exclusiveMaximum", 1.0)]
        {
            let Some(rounded) = schema.get(key).and_then(Value::as_f64) else { continue };
            let exact = schema.get(key).and_then(exact_integer).unwrap_or(rounded as i128);
            let mut bound = sign * rounded;
            if sign * (rounded as i128 - exact) as f64 > 0.0 {
                bound = bound.next_down();
                schema.insert(key.into(), (sign * bound).into());
            }
            if bound >= limit {
                schema.insert(key.into(), (limit * sign).into());
            } else if bound <= -limit {
                if self.strict {
                    let reason = "a number this far from zero cannot be enforced in a strict schema";
                    return Err(FormatError::new(&format!("{path}.{key}"), reason));
                }
                schema.shift_remove(key);
            }
        }
        Ok(())
    }
}

/// A count that JSON may write with decimals.
fn count(value: &Value, path: &str) -> Result<Value, FormatError> {
    match value.as_f64() {
        Some(count) if count >= 0.0 && count.fract() == 0.0 && count < 1e15 => Ok((count as u64).into()),
        _ => Err(FormatError::new(path, format!("{value} is not a number of parts"))),
    }
}

/// True if an unsupported keyword with this value restricts nothing.
fn allows_everything(keyword: &str, value: &Value) -> bool {
    match keyword {
        "not" => *value == false,
        "then" | "else" | "unevaluatedItems" | "unevaluatedProperties" => *value == true,
        "dependencies" | "dependentRequired" | "dependentSchemas" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}

/// A model may repeat a name that the schema does not list, and a name that is repeated counts once.
fn check_min_properties(schema: &Map<String, Value>, path: &str) -> Result<(), FormatError> {
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    let is_open = !is_closed || schema.contains_key("patternProperties");
    match schema.get("minProperties").and_then(Value::as_u64) {
        Some(min) if is_open && min > required + 1 => {
            let reason = "`minProperties` above 1 cannot be enforced in a strict schema for names that are not listed";
            Err(FormatError::new(&format!("{path}.minProperties"), reason))
        }
        _ => Ok(()),
    }
}

fn exact_integer(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or(value.as_u64().map(i128::from))
}

/// True if an integer in `value` changes when it becomes an `f64`, or may have been changed when it was read.
fn has_rounded_integer(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_rounded_integer),
        Value::Object(fields) => fields.values().any(has_rounded_integer),
        Value::Number(number) => match exact_integer(value) {
            Some(integer) => (integer as f64) as i128 != integer,
            None => number.as_f64().is_some_and(|number| number.abs() >= u64::MAX as f64),
        },
        _ => false,
    }
}

fn is_integer(schema: &Map<String, Value>) -> bool {
    match schema.get("type") {
        Some(Value::Array(names)) => names.iter().any(|name| name == "integer") && !names.iter().any(|n| n == "number"),
        Some(name) => name == "integer",
        None => false,
    }
}

/// Adds the bounds that an integer lacks.
fn bound_integer(schema: &mut Map<String, Value>) {
    if !is_integer(schema) || schema.contains_key("enum") || schema.contains_key("const") {
        return;
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    let min = number("minimum").or(number("exclusiveMinimum"));
    let max = number("maximum").or(number("exclusiveMaximum"));
    if min.is_none() && max.is_none_or(|max| max > -MAX_INTEGER as f64) {
        schema.insert("minimum".into(), (-MAX_INTEGER).into());
    }
    if max.is_none() && min.is_none_or(|min| min < MAX_INTEGER as f64) {
        schema.insert("maximum".into(), MAX_INTEGER.into());
    }
}

/// The types of a schema by their names in JSON Schema. If the schema is not strict, another name for one of them is
/// replaced, and an unknown name is left out. The value is `None` if no name is left.
fn check_type(value: &Value, strict: bool, path: &str) -> Result<Option<Value>, FormatError> {
    let standard = |name: &Value| {
        let types = TypeSet::named(name.as_str()?);
        TYPES.into_iter().find(|known| TypeSet::named(known) == types).map(Value::from)
    };
    let known = match value {
        Value::Array(names) => Some(names.iter().filter_map(standard).collect::<Vec<_>>())
            .filter(|names| strict || !names.is_empty())
            .map(Value::Array),
        _ => standard(value),
    };
    let is_well_formed = value.is_string() || is_string_array(value);
    if is_well_formed && (known.as_ref() == Some(value) || !strict) {
        return Ok(known);
    }
    Err(FormatError::new(path, format!("type is {value}; the types are {}", TYPES.join(", "))))
}

fn is_string_array(value: &Value) -> bool {
    value.as_array().is_some_and(|names| names.iter().all(Value::is_string))
}

/// Finds the smallest part of a prepared schema for which `compile_error` returns an error. `reason` is the error of
/// the whole schema. Returns the path and the error of the part, or an empty path and `reason` if no part fails alone.
pub fn locate(schema: &Value, reason: String, compile_error: impl Fn(&Value) -> Option<String>) -> (String, String) {
    let mut path = String::new();
    let mut reason = reason;
    let mut part = schema;
    // Each step compiles the parts of one level. All levels together are at most as large as the schema.
    'down: for _ in 0..MAX_DEPTH {
        for (key, name, child) in subschemas(part) {
            // Skips booleans, which always compile. References are not followed, because the target of a reference is
            // checked where it is defined.
            let Value::Object(alone) = child else { continue };
            let mut alone = alone.clone();
            for key in ["$defs", "x-guidance"] {
                if let Some(value) = schema.get(key) {
                    alone.insert(key.into(), value.clone());
                }
            }
            if let Some(cause) = compile_error(&Value::Object(alone)) {
                path += &if key == "$defs" { name } else { format!(".{key}{name}") };
                reason = cause;
                part = child;
                continue 'down;
            }
        }
        break;
    }
    (path, reason)
}

/// Turns `schema` into a schema that can be compiled alone, with the definitions of `root` that it refers to.
pub fn with_definitions(schema: Value, root: &Value, strict: bool) -> Value {
    let mut definitions = Map::new();
    let mut parts = vec![schema.to_string()];
    while let Some(text) = parts.pop() {
        for (name, definition) in root.get("$defs").and_then(Value::as_object).into_iter().flatten() {
            if !definitions.contains_key(name) && text.contains(&format!("\"#/$defs/{name}\"")) {
                definitions.insert(name.clone(), definition.clone());
                parts.push(definition.to_string());
            }
        }
    }
    complete(schema, definitions, strict)
}
