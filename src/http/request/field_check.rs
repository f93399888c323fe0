//! Checks the names of a request's fields against the table of its endpoint.
//!
//! An unknown field is ignored and logged, with two exceptions. It is an error if its name is close to the name of a
//! field that changes the answer, or if another API or another server has a field of this name that changes the answer.

use crate::http::{
    ApiError, quote,
    request::fields::{
        CHAT, COMPLETIONS, Field, FieldTable,
        Handling::{Ignored, Metadata, Rejected, Supported},
        MESSAGES, METADATA_LIMITS, RESPONSES,
    },
};
use serde_json::{Map, Value};
use std::ptr;
use strsim::osa_distance;

/// Maximum number of unknown fields that one log line names.
const LOGGED_NAMES: usize = 8;

/// Names of the fields for one purpose, in this API, in other APIs and on other servers. The first one that an endpoint
/// has is the name to use there.
const SAME_PURPOSE: &[&[&str]] = &[
    &["max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict", "num_predict"],
    &["top_p", "topP"],
    &["top_k", "topK"],
    &["messages", "input", "prompt"],
    &["instructions", "system", "messages"],
    &["stop", "stop_sequences"],
    &["tools", "functions"],
    &["tool_choice", "function_call"],
    &[
        "enable_thinking",
        "thinking",
        "reasoning.effort",
        "think",
        "reasoning",
        "reasoning_effort",
        "thinking_budget_tokens",
        "thinking_budget",
        "max_thinking_tokens",
        "thinking_token_budget",
        "chat_template_kwargs",
    ],
    &[
        "response_format",
        "output_config.format",
        "text.format",
        "format",
        "text",
        "output_config",
        "output_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "grammar",
        "regex",
        "ebnf",
    ],
];

/// Fields with other fields of the request in them. Some clients send them as they stand in the code.
const ENVELOPES: [&str; 2] = ["options", "extra_body"];

/// Values of fields that have no effect, as JSON. A field of another API is accepted with such a value.
const NEUTRAL: &[(&str, &str)] = &[
    ("n", "1"),
    ("logprobs", "false"),
    ("top_logprobs", "0"),
    ("echo", "false"),
    ("presence_penalty", "0"),
    ("frequency_penalty", "0"),
    ("min_p", "0"),
    ("repetition_penalty", "1"),
    ("repeat_penalty", "1"),
    ("parallel_tool_calls", "true"),
    ("tool_choice", "\"auto\""),
    ("response_format", "{\"type\": \"text\"}"),
    ("continue_final_message", "false"),
    ("add_generation_prompt", "true"),
];

/// The APIs whose fields are refused in the other ones, with their paths.
fn apis() -> [(&'static str, FieldTable); 4] {
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
    ]
}

/// The field with this name.
fn find(name: &str, known: FieldTable) -> Option<&'static Field> {
    known.iter().copied().flatten().find(|field| field.name == name)
}

/// Checks the names of fields and drops unknown fields. A null field counts as absent. `parent` starts their paths.
pub fn keep_known(fields: &mut Map<String, Value>, known: FieldTable, parent: &str) -> Result<(), ApiError> {
    let mut unknown = Vec::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let at = || parent.to_owned() + name;
        match find(name, known) {
            Some(Field { handling: Rejected(accepted, why), .. }) => {
                if !accepted.iter().any(|json| equals(value, json)) {
                    return Err(ApiError::unsupported(&at(), format!("{} is not supported: {why}", at())));
                }
            }
            Some(Field { handling: Metadata(_), .. }) => check_metadata(name, value)?,
            Some(_) => {}
            None => match hint(name, value, known) {
                Some(hint) => return Err(ApiError::unknown(&at(), format!("There is no field `{}`; {hint}", at()))),
                None => unknown.push(name),
            },
        }
    }
    if !unknown.is_empty() {
        let names = unknown.iter().take(LOGGED_NAMES).map(|name| quote(name));
        tracing::info!(count = unknown.len(), fields = ?names.collect::<Vec<_>>(), "ignoring unknown fields");
    }
    fields.retain(|name, _| find(name, known).is_some());
    Ok(())
}

/// What to send in place of a field that would change the answer and that is not in `known`. `None` if the field can be
/// ignored.
fn hint(name: &str, value: &Value, known: FieldTable) -> Option<String> {
    let meant = same_purpose(name, known);
    let owners = owners(name, known);
    if let [(path, _), ..] = &*owners {
        let has_effect = !is_neutral(name, value) && owners.iter().all(|(_, field)| changes_answer(field, value));
        let instead = meant.map(|meant| format!(" Use `{meant}`.")).unwrap_or_default();
        return has_effect.then(|| format!("it is a field of {path}.{instead}"));
    }
    match meant.or_else(|| nearest(name, known)) {
        Some(meant) => Some(format!("did you mean `{meant}`?")),
        None => ENVELOPES.contains(&name).then(|| "send its settings as fields of the request.".to_owned()),
    }
}

/// The field of `known` that has the purpose of the field `name` of another API or server.
fn same_purpose(name: &str, known: FieldTable) -> Option<&'static str> {
    let names = SAME_PURPOSE.iter().find(|names| names.contains(&name))?;
    let is_supported = |path: &str| {
        let field = path.split('.').next().and_then(|name| find(name, known));
        field.is_some_and(|field| matches!(field.handling, Supported(_)))
    };
    names.iter().copied().find(|path| is_supported(path))
}

/// The APIs that have a field of this name, if `known` is one of them.
fn owners(name: &str, known: FieldTable) -> Vec<(&'static str, &'static Field)> {
    let apis = apis().into_iter().filter(|_| apis().iter().any(|(_, table)| ptr::eq(*table, known)));
    apis.filter_map(|(path, table)| Some((path, find(name, table)?))).collect()
}

/// True for a value that has no effect in any API.
fn is_neutral(name: &str, value: &Value) -> bool {
    let is_empty = ["[]", "{}", "\"\""].into_iter().any(|empty| equals(value, empty));
    is_empty || NEUTRAL.iter().any(|(neutral, json)| *neutral == name && equals(value, json))
}

/// True if a field with this value changes the answer of an API that has the field.
fn changes_answer(field: &Field, value: &Value) -> bool {
    match field.handling {
        Supported(_) => true,
        Ignored(_) | Metadata(_) => false,
        Rejected(accepted, _) => !accepted.iter().any(|json| equals(value, json)),
    }
}

fn check_metadata(name: &str, value: &Value) -> Result<(), ApiError> {
    let (max_pairs, max_key, max_value) = METADATA_LIMITS;
    let Value::Object(pairs) = value else {
        return Err(ApiError::wrong_type(name, "must be an object."));
    };
    if pairs.len() > max_pairs {
        return Err(ApiError::wrong_value(name, format!("has {} pairs; the limit is {max_pairs}.", pairs.len())));
    }
    for (key, value) in pairs {
        let length = key.chars().count();
        if length > max_key {
            let text = format!("A key of {name} has {length} characters; the limit is {max_key}.");
            return Err(ApiError::invalid(name, text));
        }
        let at = format!("{name}.{key}");
        let Some(length) = value.as_str().map(|value| value.chars().count()) else {
            return Err(ApiError::wrong_type(at, "must be a string."));
        };
        if length > max_value {
            return Err(ApiError::wrong_value(&at, format!("has {length} characters; the limit is {max_value}.")));
        }
    }
    Ok(())
}

/// True if `value` equals the JSON text. Numbers are compared by value.
fn equals(value: &Value, json: &str) -> bool {
    serde_json::from_str::<Value>(json).is_ok_and(|accepted| match (value.as_f64(), accepted.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => *value == accepted,
    })
}

/// Among the fields that change an answer, the field with the name closest to `name`.
fn nearest<'a>(name: &str, known: &'a [&'a [Field]]) -> Option<&'a str> {
    let max_distance = match name.len() {
        0..5 => return None,
        5..8 => 1,
        8..40 => 2,
        _ => return None,
    };
    let matters = known.iter().copied().flatten().filter(|field| !matches!(field.handling, Ignored(_)));
    // Comparing lengths first is cheap. A body may have very many names, and the exact distance is expensive.
    let candidates = matters.filter(|field| field.name.len().abs_diff(name.len()) <= max_distance);
    let distances = candidates.map(|field| (osa_distance(name, field.name), field.name));
    distances.filter(|(distance, _)| *distance <= max_distance).min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::fields::OLLAMA_OPTIONS;
    use serde_json::json;
    use test_support::thread_cpu::cpu_time_of;

    fn refusal(fields: Value, known: FieldTable) -> Option<Value> {
        let error = keep_known(&mut fields.as_object().unwrap().clone(), known, "").err()?;
        Some(error.body()["error"].clone())
    }

    const NAMES: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk/names.json"));

    /// The fields of each API in the SDKs, with the API's table.
    fn sdk_fields() -> Vec<(String, FieldTable)> {
        let names: Value = serde_json::from_str(NAMES).unwrap();
        let apis = [("chat", CHAT), ("completions", COMPLETIONS), ("responses", RESPONSES), ("messages", MESSAGES)];
        let fields = apis.into_iter().flat_map(|(api, table)| {
            let fields = names["fields"][api].as_array().unwrap().clone();
            fields.into_iter().map(move |name| (name.as_str().unwrap().to_owned(), table))
        });
        fields.collect()
    }

    #[test]
    fn every_field_of_the_sdks_is_known() {
        for (name, table) in sdk_fields() {
            assert!(find(&name, table).is_some(), "{name}: add it to the table");
        }
    }

    #[test]
    fn field_of_another_api_is_refused() {
        let fields = sdk_fields();
        let mut refused = 0;
        for (name, own) in &fields {
            let value = json!({"a": ["value"]});
            let is_ignored =
                apis().iter().filter_map(|(_, table)| find(name, table)).any(|field| !changes_answer(field, &value));
            for (path, other) in apis() {
                if find(name, other).is_some() {
                    continue;
                }
                let error = refusal(json!({name.as_str(): value}), other);
                assert_eq!(error.is_none(), is_ignored, "{name} in {path}: {error:?}");
                assert!(find(name, own).is_some());
                refused += usize::from(error.is_some());
                assert_eq!(refusal(json!({name.as_str(): []}), other), None, "{name} in {path}");
            }
        }
        assert!(refused > 50, "{refused}");
    }

    #[test]
    fn refused_field_names_the_right_one() {
        for (known, foreign, hint) in [
            (CHAT, "max_output_tokens", "`max_completion_tokens`"),
            (CHAT, "n_predict", "`max_completion_tokens`"),
            (COMPLETIONS, "num_predict", "`max_tokens`"),
            (RESPONSES, "max_tokens", "`max_output_tokens`"),
            (MESSAGES, "max_completion_tokens", "`max_tokens`"),
            (CHAT, "think", "`enable_thinking`"),
            (CHAT, "system", "`messages`"),
            (CHAT, "stop_sequences", "`stop`"),
            (CHAT, "format", "`response_format`"),
            (CHAT, "output_config", "`response_format`"),
            (CHAT, "options", "as fields of the request"),
            (CHAT, "extra_body", "as fields of the request"),
            (RESPONSES, "think", "`reasoning.effort`"),
            (RESPONSES, "response_format", "`text.format`"),
            (RESPONSES, "functions", "`tools`"),
            (RESPONSES, "system", "`instructions`"),
            (RESPONSES, "chat_template_kwargs", "`reasoning.effort`"),
            (RESPONSES, "top_k", "a field of /v1/chat/completions."),
            (RESPONSES, "seed", "a field of /v1/chat/completions."),
            (RESPONSES, "thread", "a field of /v1/messages."),
            (MESSAGES, "response_format", "`output_config.format`"),
            (MESSAGES, "enable_thinking", "`thinking`"),
            (MESSAGES, "regex", "`output_config.format`"),
            (MESSAGES, "instructions", "`system`"),
            (COMPLETIONS, "text", "a field of /v1/responses."),
            (OLLAMA_OPTIONS, "max_tokens", "`num_predict`"),
        ] {
            let error = refusal(json!({foreign: 1}), known).unwrap();
            assert_eq!(error["param"], foreign);
            assert!(error["message"].as_str().unwrap().contains(hint), "{error}");
        }
    }

    #[test]
    fn neutral_field_of_another_api_is_ignored() {
        for (known, fields) in [
            (RESPONSES, json!({"n": 1, "logprobs": false, "presence_penalty": 0.0, "stop": [], "typical_p": 1})),
            (RESPONSES, json!({"response_format": {"type": "text"}, "verbosity": "low", "chat_template_kwargs": {}})),
            (MESSAGES, json!({"store": true, "stream_options": {"include_usage": true}, "parallel_tool_calls": true})),
            (CHAT, json!({"truncation": "auto", "background": false, "instructions": "", "mcp_servers": []})),
        ] {
            assert_eq!(refusal(fields, known), None);
        }
    }

    #[test]
    fn misspelling_is_refused_with_nearest_name() {
        for (wrong, meant) in [
            ("max_tokes", "max_tokens"),
            ("max_completion_token", "max_completion_tokens"),
            ("temprature", "temperature"),
            ("tempreature", "temperature"),
            ("stops", "stop"),
            ("tool_choise", "tool_choice"),
            ("respose_format", "response_format"),
        ] {
            let error = refusal(json!({wrong: 1}), CHAT).unwrap();
            assert_eq!((&error["param"], &error["code"]), (&json!(wrong), &json!("unknown_parameter")));
            assert!(error["message"].as_str().unwrap().contains(&format!("`{meant}`")), "{error}");
        }
        for unknown in ["frobnicate", "cache_prompt", "users", "x", "a_field_of_a_vendor_that_nobody_knows_and_is_long"]
        {
            assert_eq!(refusal(json!({unknown: 1}), CHAT), None, "{unknown}");
        }
    }

    #[test]
    fn unsupported_field_accepts_neutral_values() {
        let neutral = json!({
            "modalities": ["text"], "verbosity": "low", "typical_p": 1, "grammar": null, "min_tokens": 0, "bad_words": [],
            "user": "me", "metadata": {}, "store": true, "service_tier": "flex",
        });
        assert_eq!(refusal(neutral, CHAT), None);
        assert_eq!(refusal(json!({"typical_p": null}), CHAT), None);
        for fields in [json!({"modalities": ["text", "audio"]}), json!({"min_tokens": 5}), json!({"bad_words": ["x"]})]
        {
            assert!(refusal(fields.clone(), CHAT).is_some(), "{fields}");
        }
    }

    #[test]
    fn many_unknown_names_are_checked_quickly() {
        let names: Map<_, _> = (0..50_000).map(|number| (format!("{number:039}"), json!(0))).collect();
        let time = cpu_time_of(|| assert_eq!(refusal(names.into(), CHAT), None));
        assert!(time.as_secs() < 5, "{time:?}");
    }

    #[test]
    fn metadata_is_limited() {
        let pairs = |count: usize| (0..count).map(|i| (i.to_string(), json!("x"))).collect::<Map<_, _>>();
        let (key, text) = ("é".repeat(64), "é".repeat(512));
        for (metadata, param) in [
            (json!({}), None),
            (pairs(16).into(), None),
            (json!({key.as_str(): text}), None),
            (pairs(17).into(), Some("metadata".to_owned())),
            (json!({key.clone() + "x": "x"}), Some("metadata".to_owned())),
            (json!({key.as_str(): text + "x"}), Some(format!("metadata.{key}"))),
            (json!({"a": 1}), Some("metadata.a".to_owned())),
            (json!(["a"]), Some("metadata".to_owned())),
        ] {
            for known in [CHAT, COMPLETIONS, RESPONSES] {
                let error = refusal(json!({"metadata": metadata}), known);
                assert_eq!(error.map(|error| error["param"].clone()), param.clone().map(Value::from), "{metadata}");
            }
        }
        // Anthropic's `metadata` is a different field, which is ignored.
        assert_eq!(refusal(json!({"metadata": {"user_id": "x".repeat(1000)}}), MESSAGES), None);
    }
}
