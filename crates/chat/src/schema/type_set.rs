//! Types of JSON values.

use serde_json::{Map, Value};

/// A set of types. A field `others` never has strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TypeSet(u8);

impl TypeSet {
    pub const NULL: Self = Self(1);
    pub const TRUE: Self = Self(1 << 1);
    pub const FALSE: Self = Self(1 << 2);
    pub const BOOLEAN: Self = Self::TRUE.or(Self::FALSE);
    pub const INTEGER: Self = Self(1 << 3);
    /// Integers and other numbers.
    pub const NUMBER: Self = Self::INTEGER.or(Self(1 << 4));
    pub const ARRAY: Self = Self(1 << 5);
    pub const OBJECT: Self = Self(1 << 6);
    pub const STRING: Self = Self(1 << 7);
    /// Every type except strings.
    pub const OTHERS: Self = Self((1 << 7) - 1);

    /// The names of types in JSON Schema.
    pub const NAMES: [&str; 7] = ["null", "boolean", "object", "array", "number", "string", "integer"];

    /// The names of these types in JSON Schema.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let is_named = move |name: &&str| match Self::named(name) {
            numbers if numbers.has(Self::INTEGER) => self.and(Self::NUMBER) == numbers,
            types => self.has_any(types),
        };
        Self::NAMES.into_iter().filter(is_named)
    }

    /// The types that a schema calls `name`. Schemas for Gemini have upper case, and those written by hand also Python's
    /// names. Empty if there is no such type.
    pub fn named(name: &str) -> Self {
        match name.to_ascii_lowercase().as_str() {
            "null" | "none" => Self::NULL,
            "boolean" | "bool" => Self::BOOLEAN,
            "integer" | "int" => Self::INTEGER,
            "number" | "float" | "double" => Self::NUMBER,
            "string" | "str" => Self::STRING,
            "object" | "dict" => Self::OBJECT,
            "array" | "list" => Self::ARRAY,
            _ => Self::default(),
        }
    }

    /// The types that the keyword `type` of a schema names.
    pub fn named_by(schema: &Map<String, Value>) -> Self {
        let names = match schema.get("type") {
            Some(Value::Array(names)) => names,
            name => name.map_or(&[][..], std::slice::from_ref),
        };
        names.iter().filter_map(Value::as_str).map(Self::named).fold(Self::default(), Self::or)
    }

    /// The types of a value. A whole number may be an integer or not.
    pub fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(true) => Self::TRUE,
            Value::Bool(false) => Self::FALSE,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True if the set has all of `types`.
    pub fn has(self, types: Self) -> bool {
        self.and(types) == types
    }

    /// True if the set has one of `types`.
    pub fn has_any(self, types: Self) -> bool {
        !self.and(types).is_empty()
    }

    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}
