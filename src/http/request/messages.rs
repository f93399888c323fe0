//! Chat messages: checks them and normalizes them for chat templates.
//!
//! Contents without images become plain strings, because not every template understands OpenAI's content parts. The
//! role `developer` becomes `system`, the older name of the role.
//!
//! Templates accept one system message, at the start. System messages that directly follow the first system message are
//! joined to it. A later system message becomes a user message.

use crate::http::{
    ApiError,
    request::{
        ImagePart, PartFormat,
        content_parts::{MessageOrigin, new_messages},
    },
};
use moestro_chat::json_numbers;
use serde_json::{Map, Value, json};

const PARTS: PartFormat = PartFormat { types: &["text", "refusal"], separator: "" };

/// Checks and normalizes all messages, and collects the images of the messages. `translated` has the images of messages
/// that were translated from another API. The contents of translated messages are normalized already.
pub fn checked(
    mut messages: Vec<Value>,
    translated: Option<Vec<ImagePart>>,
) -> Result<(Vec<Value>, Vec<ImagePart>), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::wrong_value("messages", "is empty; it must have at least one message."));
    }
    let are_new = new_messages(&messages, |message| match message["role"].as_str() {
        Some("assistant") => MessageOrigin::Assistant,
        Some("user") => MessageOrigin::User,
        Some("tool" | "function") => MessageOrigin::Tool,
        _ => MessageOrigin::Other,
    });
    let is_translated = translated.is_some();
    let mut images = translated.unwrap_or_default();
    for (index, (message, is_new)) in messages.iter_mut().zip(are_new).enumerate() {
        let at = format!("messages[{index}]");
        let Value::Object(message) = message else {
            return Err(ApiError::wrong_type(at, "must be an object."));
        };
        let images = (!is_translated).then_some(&mut images);
        normalize(message, &at, is_new, images)?;
    }
    Ok((join_system_messages(messages), images))
}

/// Creates an assistant message. Empty reasoning and an empty list of calls are left out.
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

/// Arguments of a truncated call, which are not valid JSON. The text of the arguments gets the name that Anthropic's
/// API uses in this case.
pub fn invalid_arguments(text: &str) -> Value {
    json!({"INVALID_JSON": text})
}

/// Joins the system messages at the start to one message. Later system messages become user messages.
fn join_system_messages(messages: Vec<Value>) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::with_capacity(messages.len());
    for mut message in messages {
        if message["role"] == "system" && !kept.is_empty() {
            // The text is appended in place, because a body may have thousands of system messages.
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

/// Checks and normalizes one message. Without `images`, the content is normalized already.
fn normalize(
    message: &mut Map<String, Value>,
    at: &str,
    is_new: bool,
    images: Option<&mut Vec<ImagePart>>,
) -> Result<(), ApiError> {
    let role = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(_) => return Err(ApiError::wrong_type(format!("{at}.role"), "must be a string.")),
        None => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
    };
    match role.as_str() {
        "system" | "user" | "assistant" | "tool" => {}
        "developer" => {
            message.insert("role".into(), "system".into());
        }
        // `function` is the deprecated role of a message with the result of a function.
        "function" => {
            message.insert("role".into(), "tool".into());
        }
        other => {
            let known = "system, developer, user, assistant, tool and function";
            return Err(ApiError::wrong_value(format!("{at}.role"), format!("is `{other}`; the roles are {known}.")));
        }
    }
    // `function_call` is the deprecated field for a single call.
    if let Some(call) = message.remove("function_call").filter(|call| !call.is_null()) {
        message.entry("tool_calls").or_insert(json!([{"type": "function", "function": call}]));
    }
    if let Some(calls) = message.get_mut("tool_calls").filter(|calls| !calls.is_null()) {
        check_tool_calls(calls, at)?;
    }
    match message.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(_)) if images.is_none() => {}
        Some(content @ Value::Array(_)) => {
            let at = format!("{at}.content");
            let content = match images {
                Some(images) if !matches!(role.as_str(), "system" | "developer") => {
                    PARTS.content(content, &at, is_new, images)?
                }
                _ => PARTS.text(content, &at, is_new)?.into(),
            };
            message.insert("content".into(), content);
        }
        None | Some(Value::Null) if role == "assistant" => {}
        None | Some(Value::Null) => {
            let text = format!("{at} has no content; a message with role {role} must have one.");
            return Err(ApiError::invalid(format!("{at}.content"), text));
        }
        Some(_) => {
            return Err(ApiError::wrong_type(format!("{at}.content"), "must be a string or an array of parts."));
        }
    }
    Ok(())
}

/// Checks earlier calls of the assistant. Each call needs a name and arguments. The arguments are an object, or JSON
/// text.
fn check_tool_calls(calls: &mut Value, at: &str) -> Result<(), ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::wrong_type(format!("{at}.tool_calls"), "must be an array."));
    };
    for (index, call) in calls.iter_mut().enumerate() {
        let at = format!("{at}.tool_calls[{index}].function");
        let function = &mut call["function"];
        if !function["name"].is_string() {
            return Err(ApiError::wrong_type(format!("{at}.name"), "must be a string."));
        }
        match function.get("arguments") {
            Some(Value::Object(_) | Value::Null) => {}
            Some(Value::String(json)) if json.trim().is_empty() => {}
            Some(Value::String(json)) => {
                if serde_json::from_str::<Map<String, Value>>(&json_numbers::quote_huge(json)).is_err() {
                    function["arguments"] = invalid_arguments(json);
                }
            }
            _ => {
                return Err(ApiError::wrong_value(
                    format!("{at}.arguments"),
                    "must be a JSON object in a string; use `{}` for no arguments.",
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field that an error names.
    fn param(result: Result<(Vec<Value>, Vec<ImagePart>), ApiError>) -> String {
        let body = result.unwrap_err().body();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    #[test]
    fn content_parts_become_strings() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let given = vec![json!({"role": "developer", "content": "d"}), json!({"role": "user", "content": parts})];
        let expected = [json!({"role": "system", "content": "d"}), json!({"role": "user", "content": "ab"})];
        assert_eq!(checked(given, None).unwrap().0, expected);
    }

    #[test]
    fn many_system_messages_join_in_linear_time() {
        let one = json!({"role": "system", "content": "x".repeat(100)});
        let given = vec![one; 30_000];
        let start = std::time::Instant::now();
        let kept = checked(given, None).unwrap().0;
        assert_eq!((kept.len(), kept[0]["content"].as_str().unwrap().len()), (1, 30_000 * 102 - 2));
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }

    #[test]
    fn assistant_content_is_optional_with_calls() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        for content in [json!("x"), Value::Null] {
            let message = json!({"role": "assistant", "content": content, "tool_calls": [call]});
            assert!(checked(vec![message], None).is_ok());
        }
        assert!(checked(vec![json!({"role": "assistant", "tool_calls": [call]})], None).is_ok());
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
            (json!({"role": "assistant", "tool_calls": {}}), "messages[0].tool_calls"),
            (json!({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0].function.name"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            assert_eq!(param(checked(vec![message], None)), at);
        }
        assert_eq!(param(checked(Vec::new(), None)), "messages");
    }

    #[test]
    fn truncated_call_arguments_are_kept_as_text() {
        let call = |arguments: Value| json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
        let message = json!({"role": "assistant", "tool_calls": [call(json!("{\"city\": \"Os"))]});
        let expected = call(json!({"INVALID_JSON": "{\"city\": \"Os"}));
        assert_eq!(checked(vec![message], None).unwrap().0[0]["tool_calls"], json!([expected]));
    }

    #[test]
    fn images_are_collected_in_order() {
        let part = json!({"type": "image_url", "image_url": {"url": "data:;base64,AA"}});
        let content = json!([{"type": "text", "text": "see "}, part]);
        let user = json!({"role": "user", "content": content});
        let given = vec![
            user.clone(),
            json!({"role": "assistant", "content": "ok"}),
            json!({"role": "tool", "content": content}),
            json!({"role": "assistant", "content": "ok"}),
            user,
        ];
        let (kept, images) = checked(given, None).unwrap();
        for (message, image) in [(0, 0), (2, 1), (4, 2)] {
            let expected = json!([{"type": "text", "text": "see "}, {"type": "image", "image": image}]);
            assert_eq!(kept[message]["content"], expected);
        }
        let found: Vec<_> = images.iter().map(|image| (&*image.at, image.is_new)).collect();
        let expected =
            [("messages[0].content[1]", false), ("messages[2].content[1]", false), ("messages[4].content[1]", true)];
        assert_eq!(found, expected);
    }

    #[test]
    fn system_messages_have_no_images() {
        let content = json!([{"type": "image_url", "image_url": {"url": "data:;base64,AA"}}]);
        let system = json!({"role": "system", "content": content});
        assert_eq!(param(checked(vec![system], None)), "messages[0].content[0]");
    }

    #[test]
    fn late_system_messages_become_user_messages() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let given = ["system a", "developer b", "user c", "system d", "system e"]
            .map(|m| say(&m[..m.len() - 2], &m[m.len() - 1..]));
        let expected = [say("system", "a\n\nb"), say("user", "c"), say("user", "d"), say("user", "e")];
        assert_eq!(checked(given.into(), None).unwrap().0, expected);
        assert_eq!(
            checked(vec![say("user", "a"), say("system", "b")], None).unwrap().0,
            [say("user", "a"), say("user", "b")]
        );
    }
}
