//! Field tables: what the server does with every request field that clients are known to send.
//!
//! A field is supported, ignored because it cannot change the answer, or refused. An unknown field is ignored with a line in
//! the log, unless its name is within one or two edits of a field that changes the answer: then it is refused as a typo.
//! `docs/fields.md` is generated from these tables.

mod tables;

use crate::http::errors::ApiError;
use serde_json::{Map, Value};
use strsim::osa_distance;
pub use tables::{CHAT, COMPLETIONS, MESSAGES, RESPONSES};

/// Most names of unknown fields in one log line.
const MAX_LOGGED_NAMES: usize = 8;
/// Most characters of each of these names.
const MAX_LOGGED_CHARS: usize = 40;

/// OpenAI's limits for `metadata`: number of pairs, and characters of a key and of a value.
pub const METADATA_LIMITS: (usize, usize, usize) = (16, 64, 512);

/// A request field.
pub struct Field {
    pub name: &'static str,
    pub rule: FieldRule,
}

/// What the server does with a field. The text explains it in the documentation.
pub enum FieldRule {
    /// The field has its documented effect.
    Supported(&'static str),
    /// The field cannot change the answer.
    Ignored(&'static str),
    /// Key-value pairs of the client, with OpenAI's limits.
    Metadata(&'static str),
    /// The field would change the answer. Only these values, which have no effect, are accepted.
    Refused(&'static [&'static str], &'static str),
}

/// Checks the fields of a request. `null` counts as absent.
pub fn check(fields: &Map<String, Value>, known: &[Field]) -> Result<(), ApiError> {
    let mut unknown = Vec::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match known.iter().find(|field| field.name == name) {
            Some(Field { rule: FieldRule::Refused(accepted, why), .. }) => {
                if !accepted.iter().any(|word| equals(value, word)) {
                    return Err(ApiError::unsupported(name, format!("{name} is not supported: {why}")));
                }
            }
            Some(Field { rule: FieldRule::Metadata(_), .. }) => check_metadata(name, value)?,
            Some(_) => {}
            None => match nearest(name, known) {
                Some(nearest) => {
                    let text = format!("There is no field `{name}`; did you mean `{nearest}`?");
                    return Err(ApiError::unknown(name, text));
                }
                None => unknown.push(name),
            },
        }
    }
    if !unknown.is_empty() {
        let names = unknown.iter().take(MAX_LOGGED_NAMES);
        let names: Vec<String> = names.map(|name| name.chars().take(MAX_LOGGED_CHARS).collect()).collect();
        tracing::info!(count = unknown.len(), fields = ?names, "ignored unknown fields");
    }
    Ok(())
}

/// Refuses metadata that is too large or not text.
fn check_metadata(name: &str, value: &Value) -> Result<(), ApiError> {
    let (max_pairs, max_key, max_text) = METADATA_LIMITS;
    let Value::Object(pairs) = value else {
        return Err(ApiError::json(Some(name.into()), format!("{name} must be an object.")));
    };
    if pairs.len() > max_pairs {
        let text = format!("{name} has {} pairs; at most {max_pairs} are allowed.", pairs.len());
        return Err(ApiError::invalid(name, text));
    }
    for (key, value) in pairs {
        let length = key.chars().count();
        if length > max_key {
            let text = format!("A key of {name} has {length} characters; at most {max_key} are allowed.");
            return Err(ApiError::invalid(name, text));
        }
        let at = format!("{name}.{key}");
        let Some(length) = value.as_str().map(|value| value.chars().count()) else {
            return Err(ApiError::json(Some(at.clone()), format!("{at} must be a string.")));
        };
        if length > max_text {
            let text = format!("{at} has {length} characters; at most {max_text} are allowed.");
            return Err(ApiError::invalid(&at, text));
        }
    }
    Ok(())
}

/// Whether `value` equals the JSON text `word`. Numbers are compared by value.
fn equals(value: &Value, word: &str) -> bool {
    serde_json::from_str::<Value>(word).is_ok_and(|accepted| match (value.as_f64(), accepted.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => *value == accepted,
    })
}

/// The known field that changes the answer and has almost the same name.
fn nearest<'a>(name: &str, known: &'a [Field]) -> Option<&'a str> {
    let max_distance = match name.len() {
        0..5 => return None,
        5..8 => 1,
        8..40 => 2,
        _ => return None,
    };
    let relevant = known.iter().filter(|field| !matches!(field.rule, FieldRule::Ignored(_)));
    // Comparing the lengths first keeps bodies with very many names fast.
    let similar = relevant.filter(|field| field.name.len().abs_diff(name.len()) <= max_distance);
    let distances = similar.map(|field| (osa_distance(name, field.name), field.name));
    distances.filter(|(distance, _)| *distance <= max_distance).min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fmt::Write;

    fn refused(fields: Value, known: &[Field]) -> Option<Value> {
        let error = check(fields.as_object().unwrap(), known).err()?;
        Some(serde_json::to_value(error.body()).unwrap()["error"].clone())
    }

    #[test]
    fn misspelled_field_error_names_the_nearest() {
        for (wrong, nearest) in [
            ("max_tokes", "max_tokens"),
            ("max_completion_token", "max_completion_tokens"),
            ("temprature", "temperature"),
            ("tempreature", "temperature"),
            ("stops", "stop"),
            ("tool_choise", "tool_choice"),
            ("respose_format", "response_format"),
        ] {
            let error = refused(json!({wrong: 1}), CHAT).unwrap();
            assert_eq!((&error["param"], &error["code"]), (&json!(wrong), &json!("unknown_parameter")));
            assert!(error["message"].as_str().unwrap().contains(&format!("`{nearest}`")), "{error}");
        }
        for unknown in ["frobnicate", "cache_prompt", "users", "x", "a_field_of_a_vendor_that_nobody_knows_and_is_long"]
        {
            assert_eq!(refused(json!({unknown: 1}), CHAT), None, "{unknown}");
        }
    }

    #[test]
    fn refused_field_accepts_values_without_effect() {
        for (fields, fine) in [
            (json!({"modalities": ["text"]}), true),
            (json!({"modalities": ["text", "audio"]}), false),
            (json!({"verbosity": "medium"}), true),
            (json!({"verbosity": "low"}), false),
            (json!({"verbosity": null}), true),
            (json!({"min_tokens": 0}), true),
            (json!({"min_tokens": 5}), false),
            (json!({"bad_words": []}), true),
            (json!({"bad_words": ["x"]}), false),
            (json!({"typical_p": 1}), true),
            (json!({"user": "me", "metadata": {}, "store": true, "service_tier": "flex"}), true),
        ] {
            assert_eq!(refused(fields.clone(), CHAT).is_none(), fine, "{fields}");
        }
    }

    #[test]
    fn many_unknown_names_are_checked_quickly() {
        let names: Map<_, _> = (0..50_000).map(|number| (format!("{number:039}"), json!(0))).collect();
        let start = std::time::Instant::now();
        assert_eq!(refused(names.into(), CHAT), None);
        assert!(start.elapsed().as_millis() < 1000, "{:?}", start.elapsed());
    }

    #[test]
    fn metadata_size_is_limited() {
        let many = |count: usize| (0..count).map(|i| (i.to_string(), json!("x"))).collect::<Map<_, _>>();
        let (key, text) = ("é".repeat(64), "é".repeat(512));
        for (metadata, param) in [
            (json!({}), None),
            (many(16).into(), None),
            (json!({key.as_str(): text}), None),
            (many(17).into(), Some("metadata".to_owned())),
            (json!({key.clone() + "x": "x"}), Some("metadata".to_owned())),
            (json!({key.as_str(): text + "x"}), Some(format!("metadata.{key}"))),
            (json!({"a": 1}), Some("metadata.a".to_owned())),
            (json!(["a"]), Some("metadata".to_owned())),
        ] {
            for known in [CHAT, COMPLETIONS, RESPONSES] {
                let error = refused(json!({"metadata": metadata}), known);
                assert_eq!(error.map(|error| error["param"].clone()), param.clone().map(Value::from), "{metadata}");
            }
        }
        // Anthropic's metadata has no such limits and is ignored.
        assert_eq!(refused(json!({"metadata": {"user_id": "x".repeat(1000)}}), MESSAGES), None);
    }

    /// `MOESTRO_WRITE_DOCS=1 cargo test` writes the page.
    #[test]
    fn documentation_matches_the_tables() {
        let mut page = include_str!("head.md").to_owned();
        for (path, known) in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETIONS),
            ("/v1/responses", RESPONSES),
            ("/v1/messages", MESSAGES),
        ] {
            write!(page, "\n## `POST {path}`\n\n| field | |\n|---|---|\n").unwrap();
            for Field { name, rule } in known {
                let text = match rule {
                    FieldRule::Supported("") => "supported".to_owned(),
                    FieldRule::Supported(how) => format!("supported: {how}"),
                    FieldRule::Ignored(why) => format!("ignored: {why}"),
                    FieldRule::Metadata(what) => {
                        let (pairs, key, text) = METADATA_LIMITS;
                        format!("{what}; at most {pairs} pairs, keys of {key} characters and values of {text}")
                    }
                    FieldRule::Refused([], why) => format!("**refused**: {why}"),
                    FieldRule::Refused(words, why) => {
                        let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
                        format!("**refused** unless {}: {why}", words.join(" or "))
                    }
                };
                writeln!(page, "| `{name}` | {text} |").unwrap();
            }
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fields.md");
        if std::env::var_os("MOESTRO_WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(path).unwrap(),
            page,
            "docs/fields.md is out of date: run MOESTRO_WRITE_DOCS=1 cargo test documentation_matches"
        );
    }
}
