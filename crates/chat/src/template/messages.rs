//! Converts messages from the format that OpenAI clients send to the format that templates read.

use crate::{error::ChatError, json_repair, message::REASONING};
use serde::Serialize;
use serde_json::{Map, Value};

/// Messages as templates read them. Parses the arguments of tool calls, which OpenAI clients send as a string and
/// templates expect as an object. Copies reasoning to the field that templates read, as transformers does.
pub(super) fn for_template<M: Serialize>(messages: &[M]) -> Result<Vec<Value>, ChatError> {
    messages.iter().enumerate().map(|(i, message)| normalize(i, message)).collect()
}

fn normalize(i: usize, message: &impl Serialize) -> Result<Value, ChatError> {
    let message = serde_json::to_value(message).map_err(|error| ChatError::Conversation(error.to_string()))?;
    let Value::Object(mut fields) = message else {
        return Err(ChatError::Refused(format!("messages[{i}] is not an object")));
    };
    let reasoning = REASONING.iter().find_map(|name| fields.get(*name).filter(|v| !v.is_null())).cloned();
    if let Some(reasoning) = reasoning {
        fields.entry("thinking").or_insert_with(|| reasoning.clone());
        fields.insert("reasoning_content".into(), reasoning);
    }
    if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
        for (j, call) in calls.iter_mut().enumerate() {
            let call = if call.get("function").is_some() { call.get_mut("function") } else { Some(call) };
            if let Some(arguments) = call.and_then(|call| call.get_mut("arguments")) {
                parse_arguments(arguments).map_err(|reason| {
                    ChatError::Refused(format!("messages[{i}].tool_calls[{j}]: the arguments {reason}"))
                })?;
            }
        }
    }
    Ok(Value::Object(fields))
}

/// Parses a string into an object. Leaves an object unchanged. Some clients send an empty string or null if a call has
/// no arguments.
fn parse_arguments(arguments: &mut Value) -> Result<(), String> {
    let parsed = match &*arguments {
        Value::Object(_) => return Ok(()),
        Value::Null => Value::Null,
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => {
            serde_json::from_str(&json_repair::repair(text)).map_err(|e| format!("are not valid JSON: {e}"))?
        }
        _ => return Err("are not a JSON object".into()),
    };
    *arguments = match parsed {
        Value::Object(object) => Value::Object(object),
        Value::Null => Value::Object(Map::new()),
        _ => return Err("are not a JSON object".into()),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn normalize_one(message: Value) -> Result<Value, String> {
        normalize(0, &message).map_err(|error| error.to_string())
    }

    fn with_arguments(arguments: Value) -> Value {
        json!({"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]})
    }

    #[test]
    fn arguments_become_objects() {
        for (sent, read) in [
            (json!("{\"b\": 1, \"a\": 2}"), json!({"b": 1, "a": 2})),
            (json!(""), json!({})),
            (json!(null), json!({})),
            (json!("{\"a\": 1e999}"), json!({"a": "1e999"})),
        ] {
            assert_eq!(normalize_one(with_arguments(sent)).unwrap(), with_arguments(read));
        }
        let flat = normalize_one(json!({"tool_calls": [{"name": "f", "arguments": "{}"}]})).unwrap();
        assert_eq!(flat, json!({"tool_calls": [{"name": "f", "arguments": {}}]}));
    }

    #[test]
    fn arguments_other_than_objects_are_refused() {
        let error = normalize_one(with_arguments(json!("{\"a\": "))).unwrap_err();
        assert!(error.starts_with("messages[0].tool_calls[0]: the arguments are not valid JSON: "), "{error}");
        for arguments in [json!("[1]"), json!("3"), json!([1]), json!(3)] {
            let error = normalize_one(with_arguments(arguments)).unwrap_err();
            assert_eq!(error, "messages[0].tool_calls[0]: the arguments are not a JSON object");
        }
        assert_eq!(normalize_one(json!("hi")).unwrap_err(), "messages[0] is not an object");
    }

    #[test]
    fn reasoning_is_found_under_other_names() {
        let message = normalize_one(json!({"role": "assistant", "reasoning": "hmm"})).unwrap();
        assert_eq!(message["reasoning_content"], "hmm");
        let message = normalize_one(json!({"role": "assistant", "reasoning_content": null, "content": "x"})).unwrap();
        assert_eq!(message["reasoning_content"], json!(null));
    }
}
