//! Chat messages: checks them and normalizes them for chat templates.
//!
//! Contents become plain strings, because not every template understands OpenAI's content parts and this server reads text
//! only. The role `developer` becomes `system`, its older name.
//!
//! Templates accept one system message, at the start. System messages that directly follow it are joined to it. A later one
//! becomes a user message at its position.

use crate::{chat::json_numbers, http::errors::ApiError};
use serde_json::{Map, Value, json};

/// Checks and normalizes all messages.
pub fn checked(mut messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; it must have at least one message."));
    }
    for (index, message) in messages.iter_mut().enumerate() {
        let at = format!("messages[{index}]");
        let Value::Object(message) = message else {
            return Err(ApiError::json(Some(at.clone()), format!("{at} must be an object.")));
        };
        normalize(message, &at)?;
    }
    Ok(join_system_messages(messages))
}

/// An assistant message. Reasoning and calls are left out if empty.
pub fn assistant(content: String, reasoning: String, calls: Vec<Value>) -> Value {
    let mut message = json!({"role": "assistant", "content": content});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

/// Leaves at most one system message, the first.
fn join_system_messages(messages: Vec<Value>) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::with_capacity(messages.len());
    for mut message in messages {
        if message["role"] == "system" && !kept.is_empty() {
            // Appended in place, because a body may have thousands of system messages.
            if let [first] = &mut *kept
                && first["role"] == "system"
                && let Value::String(text) = &mut first["content"]
            {
                text.push_str("\n\n");
                text.push_str(message["content"].as_str().unwrap_or_default());
                continue;
            }
            message["role"] = "user".into();
        }
        kept.push(message);
    }
    kept
}

fn normalize(message: &mut Map<String, Value>, at: &str) -> Result<(), ApiError> {
    let role = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(_) => return Err(ApiError::json(Some(format!("{at}.role")), format!("{at}.role must be a string."))),
        None => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
    };
    match role.as_str() {
        "system" | "user" | "assistant" | "tool" => {}
        "developer" => {
            message.insert("role".into(), "system".into());
        }
        // Deprecated: the result of a function.
        "function" => {
            message.insert("role".into(), "tool".into());
        }
        other => {
            let known = "system, developer, user, assistant, tool and function";
            let text = format!("{at}.role is `{other}`; the roles are {known}.");
            return Err(ApiError::invalid(format!("{at}.role"), text));
        }
    }
    // Deprecated: a single call.
    if let Some(call) = message.remove("function_call").filter(|call| !call.is_null()) {
        message.entry("tool_calls").or_insert(json!([{"type": "function", "function": call}]));
    }
    if let Some(calls) = message.get("tool_calls").filter(|calls| !calls.is_null()) {
        check_tool_calls(calls, at)?;
    }
    match message.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = joined(parts, &format!("{at}.content"))?;
            message.insert("content".into(), text.into());
        }
        None | Some(Value::Null) if role == "assistant" => {}
        None | Some(Value::Null) => {
            let text = format!("{at} has no content; a message with role {role} must have one.");
            return Err(ApiError::invalid(format!("{at}.content"), text));
        }
        Some(_) => {
            let text = format!("{at}.content must be a string or an array of parts.");
            return Err(ApiError::json(Some(format!("{at}.content")), text));
        }
    }
    Ok(())
}

/// The text of `[{"type": "text", "text": "..."}, ...]`.
fn joined(parts: &[Value], at: &str) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (Some("text"), Some(Value::String(text))) => joined.push_str(text),
            (Some("text") | None, _) => {
                let text = format!("{at} must be {{\"type\": \"text\", \"text\": ...}}.");
                return Err(ApiError::json(Some(at), text));
            }
            (Some(kind), _) => {
                let text = format!("{at} has type `{kind}`; this server reads text only.");
                return Err(ApiError::unsupported(&at, text));
            }
        }
    }
    Ok(joined)
}

/// Earlier calls of the assistant: each needs a name and arguments, either an object or JSON in a string.
fn check_tool_calls(calls: &Value, at: &str) -> Result<(), ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::json(Some(format!("{at}.tool_calls")), format!("{at}.tool_calls must be an array.")));
    };
    for (index, call) in calls.iter().enumerate() {
        let at = format!("{at}.tool_calls[{index}].function");
        let function = &call["function"];
        if !function["name"].is_string() {
            return Err(ApiError::json(Some(format!("{at}.name")), format!("{at}.name must be a string.")));
        }
        let is_valid = match function.get("arguments") {
            Some(Value::Object(_) | Value::Null) => true,
            Some(Value::String(json)) => {
                json.trim().is_empty()
                    || serde_json::from_str::<Map<String, Value>>(&json_numbers::quote_huge(json)).is_ok()
            }
            _ => false,
        };
        if !is_valid {
            let text = format!("{at}.arguments must be a JSON object in a string; use `{{}}` for no arguments.");
            return Err(ApiError::invalid(format!("{at}.arguments"), text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field that an error names.
    fn param(result: Result<Vec<Value>, ApiError>) -> String {
        let body = serde_json::to_value(result.unwrap_err().body()).unwrap();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    #[test]
    fn content_parts_become_strings() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let given = vec![json!({"role": "developer", "content": "d"}), json!({"role": "user", "content": parts})];
        let expected = [json!({"role": "system", "content": "d"}), json!({"role": "user", "content": "ab"})];
        assert_eq!(checked(given).unwrap(), expected);
    }

    #[test]
    fn many_system_messages_join_in_linear_time() {
        let one = json!({"role": "system", "content": "x".repeat(100)});
        let given = vec![one; 30_000];
        let start = std::time::Instant::now();
        let kept = checked(given).unwrap();
        assert_eq!((kept.len(), kept[0]["content"].as_str().unwrap().len()), (1, 30_000 * 102 - 2));
        assert!(start.elapsed().as_millis() < 1000, "{:?}", start.elapsed());
    }

    #[test]
    fn assistant_content_is_optional_with_calls() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        for content in [json!("x"), Value::Null] {
            let message = json!({"role": "assistant", "content": content, "tool_calls": [call]});
            assert!(checked(vec![message]).is_ok());
        }
        assert!(checked(vec![json!({"role": "assistant", "tool_calls": [call]})]).is_ok());
    }

    #[test]
    fn invalid_message_error_names_the_field() {
        for (message, at) in [
            (json!("hi"), "messages[0]"),
            (json!({"content": "hi"}), "messages[0].role"),
            (json!({"role": 1, "content": "hi"}), "messages[0].role"),
            (json!({"role": "wizard", "content": "hi"}), "messages[0].role"),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "user", "content": null}), "messages[0].content"),
            (json!({"role": "user", "content": 5}), "messages[0].content"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": ["hi"]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "messages[0].content[0]"),
            (json!({"role": "assistant", "tool_calls": {}}), "messages[0].tool_calls"),
            (json!({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0].function.name"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            assert_eq!(param(checked(vec![message])), at);
        }
        assert_eq!(param(checked(Vec::new())), "messages");
    }

    #[test]
    fn late_system_messages_become_user_messages() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let given = ["system a", "developer b", "user c", "system d", "system e"]
            .map(|m| say(&m[..m.len() - 2], &m[m.len() - 1..]));
        let expected = [say("system", "a\n\nb"), say("user", "c"), say("user", "d"), say("user", "e")];
        assert_eq!(checked(given.into()).unwrap(), expected);
        assert_eq!(checked(vec![say("user", "a"), say("system", "b")]).unwrap(), [say("user", "a"), say("user", "b")]);
    }
}
