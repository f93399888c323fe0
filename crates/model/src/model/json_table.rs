//! [`JsonTable`]: checked access to the values of a JSON object, such as `config.json`.

use crate::error::ModelError;
use serde_json::Value;

pub fn refuse<T>(why: String) -> Result<T, ModelError> {
    Err(ModelError::Config(why))
}

/// A JSON object with checked access to its values.
#[derive(Clone, Copy)]
pub struct JsonTable<'a>(pub &'a Value);

impl JsonTable<'_> {
    /// A whole number from 1 to `max`.
    pub fn count(self, key: &str, max: usize) -> Result<usize, ModelError> {
        match self.0.get(key) {
            None => refuse(format!("{key} is missing")),
            Some(value) => match value.as_u64() {
                Some(count) if count >= 1 && count <= max as u64 => Ok(count as usize),
                _ => refuse(format!("{key} is {value}, not a whole number from 1 to {max}")),
            },
        }
    }

    pub fn number(self, key: &str) -> Result<f64, ModelError> {
        match self.0.get(key).map(|value| (value, value.as_f64())) {
            Some((_, Some(number))) => Ok(number),
            Some((value, None)) => refuse(format!("{key} is {value}, not a number")),
            None => refuse(format!("{key} is missing")),
        }
    }

    /// [`JsonTable::number`] of a key that may be absent.
    pub fn number_or(self, key: &str, default: f64) -> Result<f64, ModelError> {
        if self.0.get(key).is_none_or(Value::is_null) { Ok(default) } else { self.number(key) }
    }

    pub fn flag(self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => refuse(format!("{key} is {value}, not true or false")),
        }
    }

    /// [`JsonTable::count`] of a key that may be absent.
    pub fn count_or(self, key: &str, max: usize, default: usize) -> Result<usize, ModelError> {
        if self.0.get(key).is_none_or(Value::is_null) { Ok(default) } else { self.count(key, max) }
    }
}

/// The constant `rms_norm_eps` of norms.
pub fn epsilon(number: f64) -> Result<f32, ModelError> {
    let eps = number as f32;
    if eps > 0.0 && eps < 0.1 {
        return Ok(eps);
    }
    refuse(format!("rms_norm_eps is {number}, not a small positive number"))
}
