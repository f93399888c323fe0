//! A checkpoint's sampling defaults and end-of-sequence tokens, from `generation_config.json` and `config.json`. Flags
//! override these values, and a request overrides both.

use crate::cli;
use moestro_base::{error::StoreError, platform::read_json_file};
use serde_json::Value;
use std::{io, path::Path};

/// Sampling defaults. A field is `None` if its value is not set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<usize>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// End-of-sequence tokens, ascending. Empty if the files name no such token.
    pub eos: Vec<u32>,
}

impl GenerationDefaults {
    /// The values of the command-line flags.
    pub fn from_flags(args: &cli::model_args::SamplingArgs) -> Self {
        Self {
            temperature: args.temp,
            top_p: args.top_p,
            top_k: args.top_k,
            min_p: args.min_p,
            repetition_penalty: args.repeat_penalty,
            eos: Vec::new(),
        }
    }

    /// No defaults, and these end-of-sequence tokens.
    pub fn ending_at(eos: Vec<u32>) -> Self {
        Self { eos, ..Self::default() }
    }

    /// Reads the values of the checkpoint in `dir`. `do_sample: false` means greedy. Either file may be missing. A
    /// `generation_config.json` that cannot be read, and each invalid value in it, is logged and sets nothing: the
    /// weights do not depend on it.
    ///
    /// # Errors
    /// `config.json` cannot be read or is not JSON.
    pub fn read(dir: &Path) -> Result<Self, StoreError> {
        let fields = json(&dir.join("generation_config.json")).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the sampling defaults");
            None
        });
        let mut generation = fields.map(|fields| Self::from_fields(&fields)).unwrap_or_default();
        if let Some(fields) = json(&dir.join("config.json"))? {
            generation.eos.extend(ids(&fields["eos_token_id"]));
            generation.eos.extend(ids(&fields["text_config"]["eos_token_id"]));
        }
        generation.eos.sort_unstable();
        generation.eos.dedup();
        Ok(generation)
    }

    fn from_fields(fields: &Value) -> Self {
        let number = |name: &str, fits: fn(f32) -> bool| {
            let value = fields.get(name).filter(|value| !value.is_null())?;
            let number =
                value.as_f64().map(|number| number as f32).filter(|&number| number.is_finite() && fits(number));
            if number.is_none() {
                tracing::warn!("generation_config.json: {name} is {value}; using no default");
            }
            number
        };
        let is_share = |n| (0.0..=1.0).contains(&n);
        let is_greedy = fields.get("do_sample") == Some(&Value::Bool(false));
        let temperature = number("temperature", |n| n >= 0.0);
        Self {
            temperature: if is_greedy { Some(0.0) } else { temperature },
            top_p: number("top_p", is_share),
            top_k: number("top_k", |n| n >= 0.0).map(|n| n as usize),
            min_p: number("min_p", is_share),
            repetition_penalty: number("repetition_penalty", |n| n > 0.0),
            eos: ids(&fields["eos_token_id"]),
        }
    }

    /// Fills unset values from `other`. Keeps the end-of-sequence tokens of both.
    pub fn or(self, other: Self) -> Self {
        let mut eos = [self.eos, other.eos].concat();
        eos.sort_unstable();
        eos.dedup();
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
            eos,
        }
    }
}

/// Ids of a field with one id, several, or none.
fn ids(value: &Value) -> Vec<u32> {
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    all.iter().filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}

/// Maximum size of a JSON file in bytes.
const MAX_BYTES: u64 = 32 << 20;

/// Reads a JSON object from a file. `None` if the file does not exist.
pub fn json(path: &Path) -> Result<Option<Value>, StoreError> {
    let text = match read_json_file(path, MAX_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StoreError::Io { path: path.into(), source }),
    };
    match serde_json::from_slice(&text) {
        Ok(value @ Value::Object(_)) => Ok(Some(value)),
        Ok(_) => Err(StoreError::NotACheckpoint { path: path.into(), why: "it is not a JSON object".into() }),
        Err(error) => {
            Err(StoreError::NotACheckpoint { path: path.into(), why: format!("it is not valid JSON: {error}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(generation: &str, config: &str) -> Result<GenerationDefaults, StoreError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("generation_config.json", generation), ("config.json", config)] {
            if !text.is_empty() {
                fs::write(dir.path().join(name), text).unwrap();
            }
        }
        GenerationDefaults::read(dir.path())
    }

    #[test]
    fn both_files_are_read() {
        let found = read(
            r#"{"do_sample": true, "eos_token_id": [5, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.95}"#,
            r#"{"eos_token_id": 5, "text_config": {"eos_token_id": [4]}}"#,
        );
        let sampled = GenerationDefaults { temperature: Some(0.6), top_p: Some(0.95), ..GenerationDefaults::default() };
        assert_eq!(found.unwrap(), GenerationDefaults { top_k: Some(20), eos: vec![3, 4, 5], ..sampled });
    }

    #[test]
    fn files_may_be_missing_or_empty() {
        assert_eq!(read("", "").unwrap(), GenerationDefaults::default());
        assert_eq!(read("{}", r#"{"eos_token_id": null}"#).unwrap(), GenerationDefaults::default());
        assert_eq!(read(r#"{"eos_token_id": 7, "temperature": null}"#, "").unwrap().eos, [7]);
    }

    #[test]
    fn no_sampling_is_greedy() {
        assert_eq!(read(r#"{"do_sample": false, "temperature": 0.6}"#, "").unwrap().temperature, Some(0.0));
    }

    #[test]
    fn invalid_values_set_no_default() {
        let config = r#"{"eos_token_id": 7}"#;
        for text in ["[1]", "{", "null", "", "3", "\u{fffd}", r#"{"temperature": NaN}"#] {
            let expected = GenerationDefaults::ending_at(vec![7]);
            assert_eq!(read(if text.is_empty() { " " } else { text }, config).unwrap(), expected, "{text}");
        }
        for value in [
            r#""top_k": -1"#,
            r#""top_k": [20]"#,
            r#""top_p": 3"#,
            r#""temperature": "hot""#,
            r#""temperature": true"#,
            r#""temperature": 1e39"#,
            r#""repetition_penalty": 0"#,
            r#""repetition_penalty": 1e-50"#,
            r#""min_p": {}"#,
        ] {
            let found = read(&format!(r#"{{"eos_token_id": [8, "x", -1], {value}}}"#), config).unwrap();
            assert_eq!(found, GenerationDefaults::ending_at(vec![7, 8]), "{value}");
        }
        // The other values of the file count.
        let found = read(r#"{"top_k": -1, "top_p": 0.9}"#, "").unwrap();
        assert_eq!((found.top_k, found.top_p), (None, Some(0.9)));
        assert!(read("{}", "[1]").unwrap_err().to_string().contains("config.json"));
    }

    #[test]
    fn flags_override_files() {
        let flags = GenerationDefaults { temperature: Some(0.0), min_p: Some(0.1), ..GenerationDefaults::default() };
        let files = read(r#"{"temperature": 0.6, "top_k": 20, "eos_token_id": 5}"#, "").unwrap();
        let both = flags.or(files);
        assert_eq!((both.temperature, both.top_k, both.min_p, both.eos), (Some(0.0), Some(20), Some(0.1), vec![5]));
    }
}
