//! Every field that clients send, and what becomes of it: obeyed, accepted because it changes no answer, or refused. A field
//! that nobody knows is accepted with a line in the log, unless it is one letter or two away from one that would change the
//! answer. `docs/fields.md` is made of these tables.

mod tables;

use crate::http::errors::ApiError;
use serde_json::{Map, Value};
use strsim::osa_distance;
pub use tables::{CHAT, COMPLETIONS, MESSAGES, RESPONSES};

/// Names of unknown fields in one line of the log, and characters of each.
const TOLD: (usize, usize) = (8, 40);

/// The most pairs of notes, and characters of a key and of a text.
pub const NOTES: (usize, usize, usize) = (16, 64, 512);

/// A field of a request.
pub struct Field {
    pub name: &'static str,
    pub does: Does,
}

/// The treatment of a field.
pub enum Does {
    /// It is obeyed; the text says how, where that is not plain.
    Obeyed(&'static str),
    /// It changes no answer, because of this.
    Accepted(&'static str),
    /// The client's own notes, as few and as short as OpenAI has them; the text says what becomes of them.
    Notes(&'static str),
    /// It would change the answer and is not done here: only these values, which change nothing, are accepted.
    Refused(&'static [&'static str], &'static str),
}

/// Looks through the names of a request's fields. `null` counts as absent.
pub fn check(fields: &Map<String, Value>, known: &[Field]) -> Result<(), ApiError> {
    let mut unknown = Vec::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match known.iter().find(|field| field.name == name) {
            Some(Field { does: Does::Refused(accepted, why), .. }) => {
                if !accepted.iter().any(|word| is(value, word)) {
                    return Err(ApiError::unsupported(name, format!("{name} is not supported: {why}")));
                }
            }
            Some(Field { does: Does::Notes(_), .. }) => notes(name, value)?,
            Some(_) => {}
            None => match nearest(name, known) {
                Some(meant) => {
                    let text = format!("There is no field `{name}`; did you mean `{meant}`?");
                    return Err(ApiError::unknown(name, text));
                }
                None => unknown.push(name),
            },
        }
    }
    if !unknown.is_empty() {
        let names = unknown.iter().take(TOLD.0).map(|name| name.chars().take(TOLD.1).collect::<String>());
        tracing::info!(count = unknown.len(), fields = ?names.collect::<Vec<_>>(), "unknown fields are ignored");
    }
    Ok(())
}

/// Refuses notes that are too many, too long, or anything but text.
fn notes(name: &str, value: &Value) -> Result<(), ApiError> {
    let (pairs, key, text) = NOTES;
    let Value::Object(notes) = value else {
        return Err(ApiError::json(Some(name.into()), format!("{name} must be an object.")));
    };
    if notes.len() > pairs {
        return Err(ApiError::invalid(name, format!("{name} has {} pairs; {pairs} are the most.", notes.len())));
    }
    for (note, value) in notes {
        let length = note.chars().count();
        if length > key {
            return Err(ApiError::invalid(
                name,
                format!("A key of {name} has {length} characters; {key} are the most."),
            ));
        }
        let at = format!("{name}.{note}");
        let Some(length) = value.as_str().map(|value| value.chars().count()) else {
            return Err(ApiError::json(Some(at.clone()), format!("{at} must be a string.")));
        };
        if length > text {
            return Err(ApiError::invalid(&at, format!("{at} has {length} characters; {text} are the most.")));
        }
    }
    Ok(())
}

/// True if `value` equals the JSON `word`; numbers are compared by value.
fn is(value: &Value, word: &str) -> bool {
    serde_json::from_str::<Value>(word).is_ok_and(|accepted| match (value.as_f64(), accepted.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => *value == accepted,
    })
}

/// The known field that changes an answer and is spelled almost like `name`.
fn nearest<'a>(name: &str, known: &'a [Field]) -> Option<&'a str> {
    let most = match name.len() {
        0..5 => return None,
        5..8 => 1,
        8..40 => 2,
        _ => return None,
    };
    let matters = known.iter().filter(|field| !matches!(field.does, Does::Accepted(_)));
    // A body may have very many names, and comparing takes its time.
    let alike = matters.filter(|field| field.name.len().abs_diff(name.len()) <= most);
    let close = alike.map(|field| (osa_distance(name, field.name), field.name)).filter(|(far, _)| *far <= most);
    close.min().map(|(_, name)| name)
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
    fn a_misspelling_gets_the_nearest_name() {
        for (wrong, meant) in [
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
            assert!(error["message"].as_str().unwrap().contains(&format!("`{meant}`")), "{error}");
        }
        for unknown in ["frobnicate", "cache_prompt", "users", "x", "a_field_of_a_vendor_that_nobody_knows_and_is_long"]
        {
            assert_eq!(refused(json!({unknown: 1}), CHAT), None, "{unknown}");
        }
    }

    #[test]
    fn what_is_not_done_is_refused_unless_it_changes_nothing() {
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
    fn names_without_number_take_no_time_without_measure() {
        let names: Map<_, _> = (0..50_000).map(|number| (format!("{number:039}"), json!(0))).collect();
        let begun = std::time::Instant::now();
        assert_eq!(refused(names.into(), CHAT), None);
        assert!(begun.elapsed().as_millis() < 1000, "{:?}", begun.elapsed());
    }

    #[test]
    fn notes_are_few_and_short() {
        let many = |count: usize| (0..count).map(|i| (i.to_string(), json!("x"))).collect::<Map<_, _>>();
        let (key, text) = ("é".repeat(64), "é".repeat(512));
        for (notes, param) in [
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
                let error = refused(json!({"metadata": notes}), known);
                assert_eq!(error.map(|error| error["param"].clone()), param.clone().map(Value::from), "{notes}");
            }
        }
        // Anthropic's are other notes, and are not kept.
        assert_eq!(refused(json!({"metadata": {"user_id": "x".repeat(1000)}}), MESSAGES), None);
    }

    /// The page that the tables make. `MOESTRO_WRITE_DOCS=1 cargo test` writes it anew.
    #[test]
    fn the_page_says_what_the_tables_say() {
        let mut page = include_str!("head.md").to_owned();
        for (path, known) in [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETIONS),
            ("/v1/responses", RESPONSES),
            ("/v1/messages", MESSAGES),
        ] {
            write!(page, "\n## `POST {path}`\n\n| field | |\n|---|---|\n").unwrap();
            for Field { name, does } in known {
                let says = match does {
                    Does::Obeyed("") => "obeyed".to_owned(),
                    Does::Obeyed(how) => format!("obeyed: {how}"),
                    Does::Accepted(why) => format!("accepted: {why}"),
                    Does::Notes(what) => {
                        let (pairs, key, text) = NOTES;
                        format!("{what}; at most {pairs} pairs, keys of {key} characters and strings of {text}")
                    }
                    Does::Refused([], why) => format!("**refused**: {why}"),
                    Does::Refused(words, why) => {
                        let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
                        format!("**refused** unless {}: {why}", words.join(" or "))
                    }
                };
                writeln!(page, "| `{name}` | {says} |").unwrap();
            }
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fields.md");
        if std::env::var_os("MOESTRO_WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), page, "docs/fields.md is out of date");
    }
}
