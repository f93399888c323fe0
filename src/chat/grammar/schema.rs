//! A client's JSON schema, made ready to be compiled: bounded, with what has no effect on validity left out, and with
//! errors that name their place.

use super::FormatError;
use serde_json::{Map, Value, json};

const MOST_BYTES: usize = 512 << 10;
const MOST_SUBSCHEMAS: usize = 20_000;
const MOST_DEPTH: usize = 64;

/// Between the parts of JSON: nothing, a space, or a new line and its indentation. Without a bound, a model could go on
/// with white space for ever.
const SPACE: &str = r" |\n[ \t]{0,40}";

/// The bounds of an integer that has none of its own, on both sides of zero: readers of JSON hold 64 bits, and a model could
/// go on with digits for ever.
const LARGEST: i64 = 10i64.pow(18);

/// Keywords whose value is kept as it is.
const PLAIN: [&str; 20] = [
    "$ref",
    "$id",
    "$anchor",
    "$schema",
    "const",
    "enum",
    "type",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords that hold a schema, an array of them, or an object of them by name.
const HOLDS_ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
const HOLDS_MANY: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
const HOLDS_NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords that say what is valid, and cannot be kept while a token is drawn.
const BEYOND: [&str; 15] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
];

/// Formats that can be kept; another one is an annotation, as the specification has it.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "string", "integer"];

/// The schema as it is compiled. With `strict`, a keyword that cannot be kept is a fault; without, it is left out.
pub fn ready(schema: &Value, strict: bool) -> Result<Value, FormatError> {
    let bytes = schema.to_string().len();
    if bytes > MOST_BYTES {
        return Err(FormatError::new("", format!("the schema has {bytes} bytes; {MOST_BYTES} are the most")));
    }
    let mut walk = Walk { strict, left: MOST_SUBSCHEMAS };
    let mut ready = walk.one(schema, "", 0)?;
    if let Value::Object(ready) = &mut ready {
        ready.insert(
            "x-guidance".into(),
            json!({"whitespace_pattern": SPACE, "coerce_one_of": !strict, "lenient": !strict}),
        );
    }
    Ok(ready)
}

struct Walk {
    strict: bool,
    left: usize,
}

impl Walk {
    fn one(&mut self, schema: &Value, place: &str, depth: usize) -> Result<Value, FormatError> {
        let fault = |why: String| Err(FormatError::new(place, why));
        let Some(left) = self.left.checked_sub(1) else {
            return fault(format!("the schema has more than {MOST_SUBSCHEMAS} parts"));
        };
        self.left = left;
        if depth > MOST_DEPTH {
            return fault(format!("the schema is more than {MOST_DEPTH} levels deep"));
        }
        let schema = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(schema) => schema,
            _ => return fault("a schema is an object or a boolean".into()),
        };
        let mut ready = Map::new();
        for (key, value) in schema {
            let inner = format!("{place}.{key}");
            let word = key.as_str();
            if word == "type" {
                types(value, &inner)?;
            }
            if word == "required" && !strings(value) {
                return Err(FormatError::new(&inner, "required must be an array of names"));
            }
            if word == "format" && value.as_str().is_none_or(|format| !FORMATS.contains(&format)) {
                continue;
            }
            let value = if PLAIN.contains(&word) || word == "format" {
                value.clone()
            } else if HOLDS_NAMED.contains(&word) {
                let Value::Object(parts) = value else {
                    return Err(FormatError::new(&inner, format!("{key} must be an object")));
                };
                let part = |(name, part): (&String, &Value)| {
                    Ok((name.clone(), self.one(part, &format!("{inner}.{name}"), depth + 1)?))
                };
                Value::Object(parts.iter().map(part).collect::<Result<_, _>>()?)
            } else if HOLDS_MANY.contains(&word) || (word == "items" && value.is_array()) {
                let Value::Array(parts) = value else {
                    return Err(FormatError::new(&inner, format!("{key} must be an array")));
                };
                let part = |(index, part): (usize, &Value)| self.one(part, &format!("{inner}[{index}]"), depth + 1);
                Value::Array(parts.iter().enumerate().map(part).collect::<Result<_, _>>()?)
            } else if HOLDS_ONE.contains(&word) {
                self.one(value, &inner, depth + 1)?
            } else if self.strict && BEYOND.contains(&word) && *value != Value::Bool(false) {
                return Err(FormatError::new(&inner, format!("`{key}` cannot be kept while an answer is written")));
            } else {
                // An annotation: it says nothing about what is valid.
                continue;
            };
            ready.insert(key.clone(), value);
        }
        bound(&mut ready);
        if ready.get("format").is_some_and(|format| format == "time" || format == "date-time") {
            // The compiler's expression has a 61st second in every minute.
            ready.entry("pattern").or_insert("^[^:]*:[^:]*:[0-5]".into());
        }
        Ok(Value::Object(ready))
    }
}

/// Gives an integer that is open above or below the bound that it lacks.
fn bound(schema: &mut Map<String, Value>) {
    let integer = match schema.get("type") {
        Some(Value::Array(names)) => names.iter().any(|name| name == "integer") && !names.iter().any(|n| n == "number"),
        Some(name) => name == "integer",
        None => false,
    };
    if !integer || schema.contains_key("enum") || schema.contains_key("const") {
        return;
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    let (least, most) =
        (number("minimum").or(number("exclusiveMinimum")), number("maximum").or(number("exclusiveMaximum")));
    if least.is_none() && most.is_none_or(|most| most > -LARGEST as f64) {
        schema.insert("minimum".into(), (-LARGEST).into());
    }
    if most.is_none() && least.is_none_or(|least| least < LARGEST as f64) {
        schema.insert("maximum".into(), LARGEST.into());
    }
}

fn types(value: &Value, place: &str) -> Result<(), FormatError> {
    let known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    match value {
        Value::Array(names) if names.iter().all(known) => Ok(()),
        Value::String(_) if known(value) => Ok(()),
        _ => Err(FormatError::new(place, format!("type is {value}; the types are {}", TYPES.join(", ")))),
    }
}

fn strings(value: &Value) -> bool {
    value.as_array().is_some_and(|names| names.iter().all(Value::is_string))
}

/// The smallest part of `schema`, made ready, that `fails` to compile, and why. `why` is what the whole says.
pub fn locate(schema: &Value, why: String, fails: impl Fn(&Value) -> Option<String>) -> (String, String) {
    let (mut place, mut why, mut part) = (String::new(), why, schema);
    // Each step compiles the parts of one level: enough to find one place, and no more than a schema's own size of work.
    'down: for _ in 0..MOST_DEPTH {
        for (inner, child) in parts(part) {
            // A reference would lead out of the part, and is looked at where it leads to.
            let Value::Object(alone) = child else { continue };
            let mut alone = alone.clone();
            for key in ["$defs", "definitions", "x-guidance"] {
                if let Some(value) = schema.get(key) {
                    alone.insert(key.into(), value.clone());
                }
            }
            if let Some(cause) = fails(&Value::Object(alone)) {
                place += &inner;
                (why, part) = (cause, child);
                continue 'down;
            }
        }
        break;
    }
    (place, why)
}

/// Subschemas of one level, and their places.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let mut parts = Vec::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        match value {
            Value::Object(named) if HOLDS_NAMED.contains(&key.as_str()) => {
                parts.extend(named.iter().map(|(name, part)| (format!(".{key}.{name}"), part)));
            }
            Value::Array(many) if HOLDS_MANY.contains(&key.as_str()) => {
                parts.extend(many.iter().enumerate().map(|(index, part)| (format!(".{key}[{index}]"), part)));
            }
            Value::Object(_) if HOLDS_ONE.contains(&key.as_str()) => parts.push((format!(".{key}"), value)),
            _ => {}
        }
    }
    parts
}

/// `schema`, a part of `root`, on its own: what it refers to goes with it.
pub fn alone(schema: &Value, root: &Value) -> Value {
    let mut alone = moved(schema);
    if let Value::Object(alone) = &mut alone {
        if schema.to_string().contains("\"$ref\"") {
            alone.insert("$defs".into(), json!({ROOT: moved(root)}));
        }
        if let Some(options) = root.get("x-guidance") {
            alone.insert("x-guidance".into(), options.clone());
        }
    }
    alone
}

const ROOT: &str = "root";

/// A copy whose references into the document lead to `#/$defs/root`.
fn moved(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| match (key.as_str(), value.as_str()) {
                ("x-guidance" | "$id" | "$schema", _) => None,
                ("$ref", Some(reference)) if reference.starts_with('#') => {
                    Some((key.clone(), format!("#/$defs/{ROOT}{}", &reference[1..]).into()))
                }
                ("enum" | "const", _) => Some((key.clone(), value.clone())),
                (name, _) if HOLDS_NAMED.contains(&name) => {
                    let parts = value.as_object().into_iter().flatten();
                    Some((key.clone(), parts.map(|(name, part)| (name.clone(), moved(part))).collect()))
                }
                _ => Some((key.clone(), moved(value))),
            };
            Value::Object(fields.iter().filter_map(field).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(moved).collect()),
        other => other.clone(),
    }
}
