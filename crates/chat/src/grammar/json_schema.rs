//! A client's JSON schema, prepared for llguidance and for [`tool_calls`](super::tool_calls). The prepared schema is
//! bounded and has no keywords that do not affect validity. Parts that references lead to are in its `$defs`, and each
//! `$ref` is a pointer to one of them. Errors name the path of the part that causes them.

use super::{
    disjoint, equivalents,
    expressions::{LengthChecker, MAX_LENGTH, can_enforce},
    format::FormatError,
    integer_formats::{self, MAX_INTEGER},
    look_ahead::{LookAheads, literal_classes},
    schema_references::{self, subschemas},
};
use crate::schema::{Document, TypeSet, ValueType, allows_nothing, format_pattern, normalized};
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

/// Largest bound that can be compiled for an integer.
const MAX_INTEGER_BOUND: f64 = 9e18;

/// Keywords that apply other schemas to the same value.
const COMBINING: [&str; 8] = ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"];

/// Keywords that restrict the valid values in a way that a token mask cannot enforce, each with its JSON that restricts
/// nothing.
const UNSUPPORTED: [(&str, &str); 14] = [
    ("not", "false"),
    ("if", ""),
    ("then", "true"),
    ("else", "true"),
    ("contains", ""),
    ("minContains", ""),
    ("maxContains", ""),
    ("dependencies", "{}"),
    ("dependentRequired", "{}"),
    ("dependentSchemas", "{}"),
    ("unevaluatedItems", "true"),
    ("unevaluatedProperties", "true"),
    ("$dynamicRef", ""),
    ("$recursiveRef", ""),
];

/// Returns the schema to compile.
///
/// # Errors
/// The schema is malformed or over a limit, or `strict` is set and a keyword cannot be enforced.
pub fn prepare(schema: &Value, strict: bool) -> Result<Value, FormatError> {
    let bytes = schema.to_string().len();
    if bytes > MAX_BYTES {
        return Err(FormatError::new("", format!("the schema has {bytes} bytes; the limit is {MAX_BYTES}")));
    }
    let schema = &normalized(schema);
    let mut preparation = Preparation {
        document: Document::new(schema),
        strict,
        subschemas_left: MAX_SUBSCHEMAS,
        properties_left: MAX_PROPERTIES,
        steps_left: disjoint::MAX_STEPS,
        lengths: LengthChecker::new(),
        look_aheads: LookAheads::new(),
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
    look_aheads: LookAheads,
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
        let mut integers = None;
        for (key, value) in schema {
            let inner = format!("{path}.{key}");
            let malformed = |kind: &str| Err(FormatError::new(&inner, format!("{key} must be {kind}")));
            let value = match (key.as_str(), value) {
                ("$ref", _) => self.reference(whole, &inner)?.into(),
                ("unevaluatedProperties", Value::Bool(false)) if !COMBINING.iter().any(|key| schema.contains_key(*key)) => {
                    prepared.entry("additionalProperties").or_insert(Value::Bool(false));
                    continue;
                }
                ("type", _) => match check_type(value, self.strict, &inner)? {
                    Some(value) => value,
                    None => continue,
                },
                // In draft 3, a property says whether it is required.
                ("required", Value::Bool(_)) if !self.strict => continue,
                ("pattern", Value::String(pattern)) => {
                    for part in self.look_aheads.replaced(pattern) {
                        patterns.extend(self.can_enforce_pattern(&part, &inner)?.then_some(part));
                    }
                    continue;
                }
                // A constant has its format already.
                ("format", Value::String(format)) if !["enum", "const"].iter().any(|key| schema.contains_key(*key)) => {
                    patterns.extend(format_pattern(format));
                    if format == "hostname" {
                        patterns.push("^.{1,253}$".into());
                    } else if ["idn-hostname", "regex", "uri-template"].contains(&format.as_str()) {
                        self.ignore(&inner, &format!("`format` `{format}` cannot be enforced in a strict schema"))?;
                    }
                    integers = integer_formats::range(format);
                    continue;
                }
                ("propertyNames", _) => {
                    // Checks the schema of the names.
                    self.subschema(value, &inner, depth + 1)?;
                    continue;
                }
                // The compiler would round it to an `f64`.
                ("const" | "enum", _) if has_rounded_integer(value) => {
                    let reason = "an integer with more digits than an f64 holds cannot be enforced in a strict schema";
                    self.ignore(&inner, reason)?;
                    continue;
                }
                ("const", _)
                | ("enum", Value::Array(_))
                | ("multipleOf" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", Value::Number(_))
                // In draft 4, this is a flag of `minimum` or `maximum`.
                | ("exclusiveMinimum" | "exclusiveMaximum", Value::Bool(_)) => value.clone(),
                ("required", _) if is_string_array(value) => value.clone(),
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
                        let name = if key == "properties" { name.clone() } else { literal_classes(name) };
                        if key == "properties" || self.can_enforce_pattern(&name, &inner)? {
                            prepared.insert(name, self.subschema(part, &inner, depth + 1)?);
                        }
                    }
                    prepared.into()
                }
                ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(parts)) => {
                    let part = |(index, part)| self.subschema(part, &format!("{inner}[{index}]"), depth + 1);
                    let parts = parts.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
                    if key == "oneOf" && let Some(exclusive) = self.exclusive_alternatives(schema, &parts, &inner)? {
                        prepared.insert("anyOf".into(), exclusive);
                        continue;
                    }
                    parts.into()
                }
                ("items" | "additionalItems" | "additionalProperties", _) => {
                    self.subschema(value, &inner, depth + 1)?
                }
                ("required", _) => return malformed("an array of names"),
                ("pattern", _) => return malformed("a string"),
                ("multipleOf" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _) => {
                    return malformed("a number");
                }
                ("properties" | "patternProperties", _) => return malformed("an object"),
                ("enum" | "anyOf" | "oneOf" | "allOf" | "prefixItems", _) => return malformed("an array"),
                _ => {
                    // Other keywords are definitions or annotations, which do not affect which values are valid.
                    let nothing = UNSUPPORTED.iter().find(|(name, _)| name == key).map(|(_, nothing)| *nothing);
                    if nothing.is_some() && nothing != Some(&value.to_string()) {
                        self.ignore(&inner, &format!("`{key}` cannot be enforced in a strict schema"))?;
                    }
                    continue;
                }
            };
            prepared.insert(key.clone(), value);
        }
        // llguidance takes no keywords beside a reference to a part around it.
        if prepared
            .get("type")
            .is_some_and(|kind| self.document.target(whole).and_then(|target| target.get("type")) == Some(kind))
        {
            prepared.shift_remove("type");
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
        self.replace_keywords(schema, &mut prepared, path)?;
        if let Some(range) = integers {
            integer_formats::keep(&mut prepared, range);
        }
        self.bound_numbers(&mut prepared, path)?;
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

    /// `parts`, the prepared alternatives of the `oneOf` of `schema`, changed so that a value matches only one of them.
    /// `None` if that is not possible.
    fn exclusive_alternatives(
        &mut self,
        schema: &'a Map<String, Value>,
        parts: &[Value],
        path: &str,
    ) -> Result<Option<Value>, FormatError> {
        let alternatives = schema.get("oneOf").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let tag = schema.get("discriminator").and_then(|discriminator| discriminator.get("propertyName")?.as_str());
        let mut are_disjoint = |tag| disjoint::are_disjoint(alternatives, tag, &self.document, &mut self.steps_left);
        // Pydantic does not list the tag of OpenAPI's `discriminator` in `required` if the tag has a default.
        let conditions = match tag {
            _ if schema.contains_key("anyOf") => None,
            _ if self.strict && are_disjoint(None) => return Ok(Some(parts.into())),
            Some(tag) if !self.strict || are_disjoint(Some(tag)) => Some(vec![json!({"required": [tag]}); parts.len()]),
            _ if self.strict => equivalents::excluding_parts(alternatives, &self.document),
            _ => None,
        };
        let Some(conditions) = conditions else {
            let reason = "`oneOf` can be enforced in a strict schema only if types, constants, a tag or required \
                          properties tell its alternatives apart; use `anyOf`";
            return self.ignore(path, reason).map(|()| None);
        };
        self.spend(parts.len().pow(2), path)?;
        Ok(Some(parts.iter().zip(conditions).map(|(part, condition)| json!({"allOf": [part, condition]})).collect()))
    }

    /// Replaces keywords that llguidance does not have.
    fn replace_keywords(
        &mut self,
        schema: &'a Map<String, Value>,
        prepared: &mut Map<String, Value>,
        path: &str,
    ) -> Result<(), FormatError> {
        if schema.get("uniqueItems") == Some(&Value::Bool(true)) {
            let items = schema.get("items").and_then(|items| self.values(items));
            if equivalents::replace_unique_items(prepared, items.as_ref()) {
                self.spend(prepared.get("enum").and_then(Value::as_array).map_or(0, Vec::len), path)?;
            } else {
                let reason = "`uniqueItems` can be enforced in a strict schema only for few constants, such as an `enum` \
                              of five words, or with `maxItems` of 1";
                self.ignore(&format!("{path}.uniqueItems"), reason)?;
            }
        }
        let Some(names) = schema.get("propertyNames") else { return Ok(()) };
        // Effect writes the values of a record below the empty pattern, which every name matches.
        let is_record = |patterns: &Map<String, Value>| {
            patterns.len() == 1 && schema.get("properties").is_none_or(|listed| *listed == json!({}))
        };
        let patterns =
            schema.get("patternProperties").and_then(Value::as_object).filter(|patterns| is_record(patterns));
        let record = patterns.and_then(|patterns| patterns.get(""));
        if let Some(mut patterns) = record.and_then(|_| prepared.shift_remove("patternProperties")) {
            prepared.insert("additionalProperties".into(), patterns[""].take());
        }
        let values = match record.or_else(|| schema.get("additionalProperties")) {
            Some(part) if allows_nothing(part) => Value::Bool(false),
            Some(part @ Value::Object(_)) => json!({"$ref": self.definition(part, "additionalProperties")}),
            other => other.cloned().unwrap_or(Value::Bool(true)),
        };
        let names = self.values(names).filter(|names| names.words.len() <= self.properties_left);
        let can_enforce = |pattern: &str| self.can_enforce_pattern(pattern, path) == Ok(true);
        match names {
            Some(names) if equivalents::replace_property_names(prepared, &names, &values, can_enforce) => {
                self.spend_properties(names.words.len(), path)
            }
            _ => {
                let reason = "`propertyNames` can be enforced in a strict schema only for an `enum`, or one `pattern` or \
                              length for an object without `properties`";
                self.ignore(&format!("{path}.propertyNames"), reason)
            }
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

    /// Bounds numbers. A bound that is too far from zero to be compiled is set to the limit if other numbers are on the
    /// side of zero, and is ignored otherwise. An integer that the compiler would round to a number outside of the bound
    /// becomes the next number inside. An integer without constants gets the bounds that it lacks.
    fn bound_numbers(&self, schema: &mut Map<String, Value>, path: &str) -> Result<(), FormatError> {
        let is_integer = is_integer(schema);
        let limit = if is_integer { MAX_INTEGER_BOUND } else { MAX_INTEGER };
        let has_constants = schema.contains_key("enum") || schema.contains_key("const");
        let bounds = [("minimum", "exclusiveMinimum", -1.0), ("maximum", "exclusiveMaximum", 1.0)];
        for (key, sign) in bounds.into_iter().flat_map(|(key, exclusive, sign)| [(key, sign), (exclusive, sign)]) {
            let Some(rounded) = schema.get(key).and_then(Value::as_f64) else { continue };
            let exact = schema.get(key).and_then(exact_integer).unwrap_or(rounded as i128);
            let is_outside = sign * (rounded as i128 - exact) as f64 > 0.0;
            let bound = if is_outside { (sign * rounded).next_down() } else { sign * rounded };
            if bound > -limit {
                schema.insert(key.into(), (sign * bound.min(limit)).into());
            } else {
                let reason = "a number this far from zero cannot be enforced in a strict schema";
                self.ignore(&format!("{path}.{key}"), reason)?;
                schema.shift_remove(key);
            }
        }
        replace_exclusive_integers(schema);
        let number = |key: &str| schema.get(key).and_then(Value::as_f64);
        let [min, max] = bounds.map(|(key, exclusive, _)| number(key).or(number(exclusive)));
        if is_integer && !has_constants && min.is_none() && max.is_none_or(|max| max >= -MAX_INTEGER) {
            schema.insert("minimum".into(), (-MAX_INTEGER).into());
        }
        if is_integer && !has_constants && max.is_none() && min.is_none_or(|min| min <= MAX_INTEGER) {
            schema.insert("maximum".into(), MAX_INTEGER.into());
        }
        Ok(())
    }

    /// A keyword that cannot be enforced is an error if the schema is strict, and is ignored otherwise.
    fn ignore(&self, path: &str, reason: &str) -> Result<(), FormatError> {
        if self.strict { Err(FormatError::new(path, reason)) } else { Ok(()) }
    }
}

/// A count that JSON may write with decimals.
fn count(value: &Value, path: &str) -> Result<Value, FormatError> {
    match value.as_f64() {
        Some(count) if count >= 0.0 && count.fract() == 0.0 && count < 1e15 => Ok((count as u64).into()),
        _ => Err(FormatError::new(path, format!("{value} is not a number of parts"))),
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

/// Between two numbers with the same integer part, llguidance also allows this integer if it is an exclusive bound. The
/// bound becomes the next number inside.
fn replace_exclusive_integers(schema: &mut Map<String, Value>) {
    for (key, inclusive, others, sign) in [
        ("exclusiveMinimum", "minimum", ["maximum", "exclusiveMaximum"], 1.0),
        ("exclusiveMaximum", "maximum", ["minimum", "exclusiveMinimum"], -1.0),
    ] {
        let number = |key: &str| schema.get(key).and_then(Value::as_f64).map(|bound| sign * bound);
        let own = number(inclusive);
        // In draft 4, a flag says that `minimum` or `maximum` is exclusive.
        let Some(bound) = (if schema.get(key) == Some(&Value::Bool(true)) { own } else { number(key) }) else {
            continue;
        };
        let Some(end) = others.into_iter().filter_map(number).reduce(f64::min) else { continue };
        let next = if bound == 0.0 { end * f64::EPSILON } else { bound.next_up() };
        if bound >= 0.0 && bound.fract() == 0.0 && end.trunc() == bound && next < end {
            schema.shift_remove(key);
            schema.insert(inclusive.into(), (sign * own.map_or(next, |own| own.max(next))).into());
        }
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

/// True if every number of the schema is an integer.
fn is_integer(schema: &Map<String, Value>) -> bool {
    let types = TypeSet::named_by(schema);
    types.has(TypeSet::INTEGER) && !types.has(TypeSet::NUMBER)
}

/// The types of a schema by their names in JSON Schema. If the schema is not strict, another name for one of them is
/// replaced, and an unknown name is left out. The value is `None` if no name is left.
fn check_type(value: &Value, strict: bool, path: &str) -> Result<Option<Value>, FormatError> {
    let standard = |name: &Value| TypeSet::named(name.as_str()?).names().next().map(Value::from);
    let known = match value {
        Value::Array(names) => Value::Array(names.iter().filter_map(standard).collect()),
        _ => standard(value).unwrap_or(json!([])),
    };
    if known == *value || !strict && (value.is_string() || is_string_array(value)) {
        return Ok(Some(known).filter(|known| strict || *known != json!([])));
    }
    Err(FormatError::new(path, format!("type is {value}; the types are {}", TypeSet::NAMES.join(", "))))
}

fn is_string_array(value: &Value) -> bool {
    value.as_array().is_some_and(|names| names.iter().all(Value::is_string))
}

/// Finds the smallest part of a prepared schema for which `compile_error` returns an error. `reason` is the error of
/// the whole schema. Returns the path and the error of the part, or an empty path and `reason` if no part fails alone.
pub fn locate(schema: &Value, reason: String, compile_error: impl Fn(&Value) -> Option<String>) -> (String, String) {
    let shared = ["$defs", "x-guidance"].into_iter().filter_map(|key| Some((key.to_owned(), schema.get(key)?.clone())));
    let shared: Map<String, Value> = shared.collect();
    // Booleans are skipped, because they always compile. References are not followed, because the target of a reference
    // is checked where it is defined.
    let error = |part: &Value| {
        let mut alone = part.as_object()?.clone();
        alone.extend(shared.clone());
        compile_error(&alone.into())
    };
    let mut found = (String::new(), reason);
    let mut part = schema;
    // Each step compiles the parts of one level. All levels together are at most as large as the schema.
    while let Some((key, name, child, cause)) =
        subschemas(part).into_iter().find_map(|(key, name, child)| Some((key, name, child, error(child)?)))
    {
        let step = if key == "$defs" { name } else { format!(".{key}{name}") };
        found = (found.0 + &step, cause);
        part = child;
    }
    found
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
