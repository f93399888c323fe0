//! Chat messages: checks them and normalizes them for chat templates.
//!
//! Contents without images become plain strings, because not every template understands OpenAI's content parts. The
//! role `developer` becomes `system`, the older name of the role.
//!
//! Templates accept one system message, at the start. System messages that directly follow the first system message are
//! joined to it, unless they define a tool. A later system message becomes a user message. Templates also require a user message. Without one, the
//! system message becomes the user's.
//!
//! Malformed fields of earlier messages are never an error, because an error would repeat with every later turn.

use crate::http::{
    ApiError, quote,
    request::{
        ImagePart, PartFormat,
        content_parts::{MessageOrigin, new_messages, replacement, take_thoughts},
    },
};
use moestro_chat::{Content, Message, Role, ToolCall};
use serde_json::{Map, Value, json};

/// Separator between the texts of several parts.
pub const SEPARATOR: &str = "";

/// Name of an earlier call that has no name.
const UNNAMED_CALL: &str = "unknown";

const PARTS: PartFormat = PartFormat { types: &["text", "refusal"], separator: SEPARATOR };

/// Checks and translates the messages of chat completions.
pub fn read(messages: Vec<Value>) -> Result<Vec<Message<ImagePart>>, ApiError> {
    read_with(messages, read_message)
}

/// Translates messages that have the roles of chat completions. `read_message` translates the fields of one message, which
/// has this path in the request. Its last argument is the message's value in [`new_messages`].
pub fn read_with(
    messages: Vec<Value>,
    read_message: impl Fn(Map<String, Value>, &str, bool) -> Result<Message<ImagePart>, ApiError>,
) -> Result<Vec<Message<ImagePart>>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::wrong_value("messages", "is empty; it must have at least one message."));
    }
    let are_new = new_messages(&messages, |message| match message["role"].as_str() {
        Some("assistant") => MessageOrigin::Assistant,
        Some("user") => MessageOrigin::User,
        Some("tool" | "function") => MessageOrigin::Tool,
        _ => MessageOrigin::Other,
    });
    let read = |(index, (message, is_new)): (usize, (Value, bool))| {
        let at = format!("messages[{index}]");
        match message {
            Value::Object(fields) => read_message(fields, &at, is_new),
            other if !is_new => Ok(Message::new(Role::User, replacement(&other))),
            _ => Err(ApiError::wrong_type(at, "must be an object.")),
        }
    };
    messages.into_iter().zip(are_new).enumerate().map(read).collect()
}

/// The name of an earlier call.
pub fn call_name(name: &Value) -> &str {
    name.as_str().unwrap_or(UNNAMED_CALL)
}

/// Arguments of an earlier call, as an object or as JSON text. The text is parsed when the prompt is rendered, because its
/// values need far more memory than the text.
pub fn call_arguments(arguments: &Value) -> Value {
    match arguments {
        Value::Object(_) | Value::String(_) => arguments.clone(),
        other => other.to_string().into(),
    }
}

/// Arranges the messages as chat templates require: one system message, at the start, and a user message.
pub fn normalize(messages: Vec<Message<ImagePart>>) -> Vec<Message<ImagePart>> {
    let mut messages = join_system_messages(messages);
    if !messages.iter().any(is_query) {
        match messages.first_mut() {
            Some(first) if first.role == Role::System => first.role = Role::User,
            _ => messages.insert(0, Message::new(Role::User, String::new())),
        }
    }
    messages
}

/// True for a user message. Qwen's templates take a user message that is a tool's response for a message of the tool.
fn is_query(message: &Message<ImagePart>) -> bool {
    let text = message.content.as_ref().and_then(Content::text).unwrap_or_default().trim();
    let is_response = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
    message.role == Role::User && !is_response
}

/// Joins the system messages at the start to one message. Later system messages become user messages.
fn join_system_messages(messages: Vec<Message<ImagePart>>) -> Vec<Message<ImagePart>> {
    let mut kept: Vec<Message<ImagePart>> = Vec::with_capacity(messages.len());
    for mut message in messages {
        if message.role == Role::System && !kept.is_empty() {
            // The text is appended in place, because a body may have thousands of system messages.
            if let [first] = &mut *kept
                && first.role == Role::System
                && let Some(text) = message.content.as_ref().map_or(Some(""), Content::text)
            {
                first.content.get_or_insert_default().push_text(text.to_owned(), "\n\n");
                continue;
            }
            message.role = Role::User;
        }
        kept.push(message);
    }
    kept
}

/// Checks and translates one message. An earlier message of an unknown role becomes a user message.
pub fn read_message(mut fields: Map<String, Value>, at: &str, is_new: bool) -> Result<Message<ImagePart>, ApiError> {
    let name = match fields.get("role") {
        Some(Value::String(role)) => role.clone(),
        _ if !is_new => String::new(),
        Some(_) => return Err(ApiError::wrong_type(format!("{at}.role"), "must be a string.")),
        None => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
    };
    let role = match name.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        // `function` is the deprecated role of a message with the result of a function.
        "tool" | "function" => Role::Tool,
        _ if !is_new => Role::User,
        other => {
            let known = "system, developer, user, assistant, tool and function";
            return Err(ApiError::wrong_value(
                format!("{at}.role"),
                format!("is `{}`; the roles are {known}.", quote(other)),
            ));
        }
    };
    // `function_call` is the deprecated field for a single call.
    if let Some(call) = fields.remove("function_call").filter(|call| !call.is_null()) {
        fields.entry("tool_calls").or_insert(json!([{"type": "function", "function": call}]));
    }
    if let Some(calls) = fields.get_mut("tool_calls") {
        complete_tool_calls(calls);
    }
    let thoughts = fields.get_mut("content").filter(|_| role == Role::Assistant).map(take_thoughts);
    if let Some(thoughts) = thoughts.filter(|thoughts| !thoughts.is_empty()) {
        let reasoning = fields.entry("reasoning_content").or_insert(Value::Null);
        if reasoning.as_str().is_none_or(str::is_empty) {
            *reasoning = thoughts.into();
        }
    }
    let content_at = format!("{at}.content");
    let content = match fields.get_mut("content").map(Value::take) {
        Some(Value::String(text)) => Some(Content::from(text)),
        None | Some(Value::Null) if role == Role::Assistant => None,
        // Also the result of a function that returns nothing.
        None | Some(Value::Null) if !is_new => Some(String::new().into()),
        None | Some(Value::Null) => {
            let text = format!("{at} has no content; a message with role {name} must have one.");
            return Err(ApiError::invalid(content_at, text));
        }
        Some(parts) if role == Role::System => Some(PARTS.text(&parts, &content_at, is_new)?.into()),
        Some(parts) => Some(PARTS.content(&parts, &content_at, is_new)?),
    };
    let is_empty = content.as_ref().is_none_or(|content| content.text() == Some(""));
    let refusal = fields.get("refusal").and_then(Value::as_str).filter(|_| role == Role::Assistant && is_empty);
    let content = refusal.map(|text| text.to_owned().into()).or(content);
    Ok(Message::from_fields(role, content, fields))
}

/// Completes earlier calls of the assistant. Each gets a name and arguments, which are an object or JSON text.
fn complete_tool_calls(calls: &mut Value) {
    *calls = match calls.take() {
        list @ Value::Array(_) => list,
        call @ Value::Object(_) => json!([call]),
        _ => Value::Null,
    };
    for call in calls.as_array_mut().into_iter().flatten() {
        let custom = &call["custom"];
        if call["type"] == "custom" && custom.is_object() {
            let input = json!({"input": custom["input"]});
            *call = ToolCall::new(call["id"].clone(), call_name(&custom["name"]), input).0;
        } else if !call["function"].is_object() {
            // Calls of the other APIs have their fields outside.
            let id = if call["call_id"].is_null() { &call["id"] } else { &call["call_id"] };
            let arguments = match &call["input"] {
                Value::Null => call_arguments(&call["arguments"]),
                input @ Value::Object(_) => input.clone(),
                input => json!({"input": input}),
            };
            *call = ToolCall::new(id.clone(), call_name(&call["name"]), arguments).0;
        }
        let function = &mut call["function"];
        if !function["name"].is_string() {
            function["name"] = UNNAMED_CALL.into();
        }
        if !function["arguments"].is_string() {
            function["arguments"] = call_arguments(&function["arguments"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::thread_cpu::cpu_time_of;

    /// The field that an error names.
    fn param(messages: Vec<Value>) -> String {
        let body = read(messages).unwrap_err().body();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    /// The messages as a template reads them.
    fn checked(messages: Vec<Value>) -> Vec<Value> {
        let messages = normalize(read(messages).unwrap());
        messages.iter().map(|message| serde_json::to_value(message).unwrap()).collect()
    }

    #[test]
    fn content_parts_become_strings() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let given = vec![json!({"role": "developer", "content": "d"}), json!({"role": "user", "content": parts})];
        let expected = [json!({"role": "system", "content": "d"}), json!({"role": "user", "content": "ab"})];
        assert_eq!(checked(given), expected);
    }

    #[test]
    fn conversation_without_user_gets_one() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let system = say("system", "s");
        let assistant = say("assistant", "a");
        let tool = say("tool", "t");
        let response = say("user", " <tool_response>t</tool_response>\n");
        for (given, roles) in [
            (vec![system.clone()], "user"),
            (vec![system.clone(), say("developer", "d"), assistant.clone()], "user assistant"),
            (vec![assistant.clone(), tool.clone()], "user assistant tool"),
            (vec![tool.clone()], "user tool"),
            (vec![assistant.clone(), system.clone()], "assistant user"),
            (vec![assistant.clone(), response.clone()], "user assistant user"),
            (vec![system.clone(), response], "user user"),
            (vec![system, say("user", ""), assistant], "system user assistant"),
        ] {
            let kept = checked(given);
            let found: Vec<_> = kept.iter().map(|message| message["role"].as_str().unwrap()).collect();
            assert_eq!(found.join(" "), roles);
        }
    }

    #[test]
    fn absent_values_of_calls_are_completed() {
        let missing = json!({"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]});
        assert_eq!(checked(vec![missing])[1]["tool_calls"][0]["function"]["arguments"], "null");
        let result = json!({"role": "tool", "tool_call_id": "c", "content": null});
        assert_eq!(checked(vec![result])[1]["content"], "");
    }

    #[test]
    fn refusal_stands_for_absent_content() {
        let [no, yes] = ["No.", "Yes."].map(Value::from);
        let empty = json!([{"type": "text", "text": ""}]);
        for (content, read) in
            [(Value::Null, &no), (json!(""), &no), (json!([]), &no), (empty, &no), (yes.clone(), &yes)]
        {
            let message = json!({"role": "assistant", "content": content, "refusal": "No."});
            assert_eq!(checked(vec![message])[1]["content"], *read);
        }
        let message = json!({"role": "assistant", "content": null, "refusal": null});
        assert_eq!(checked(vec![message])[1]["content"], Value::Null);
    }

    #[test]
    fn custom_call_becomes_a_function_call() {
        let call = json!({"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}});
        let message = json!({"role": "assistant", "tool_calls": [call]});
        let expected =
            json!({"id": "c", "type": "function", "function": {"name": "patch", "arguments": {"input": "x"}}});
        assert_eq!(checked(vec![message])[1]["tool_calls"], json!([expected]));
    }

    #[test]
    fn thinking_parts_become_reasoning() {
        let text_part = |text: &str| json!({"type": "text", "text": text});
        for (part, reasoning) in [
            (json!({"type": "thinking", "thinking": "hm", "signature": "s"}), json!("hm")),
            (json!({"type": "thinking", "thinking": [text_part("h"), text_part("m")]}), json!("hm")),
            (json!({"type": "reasoning", "text": "hm"}), json!("hm")),
            (json!({"type": "redacted_thinking", "data": "x"}), Value::Null),
        ] {
            let read = checked(vec![json!({"role": "assistant", "content": [part, text_part("a")]})]);
            assert_eq!((&read[1]["content"], &read[1]["reasoning_content"]), (&json!("a"), &reasoning), "{part}");
            let content = json!([part, text_part("a")]);
            let beside = json!({"role": "assistant", "content": content, "reasoning_content": ""});
            assert_eq!(
                checked(vec![beside])[1]["reasoning_content"].as_str().unwrap(),
                reasoning.as_str().unwrap_or("")
            );
        }
    }

    #[test]
    fn many_system_messages_join_in_linear_time() {
        let one = json!({"role": "system", "content": "x".repeat(100)});
        let given = vec![one; 30_000];
        let time = cpu_time_of(|| {
            let kept = checked(given);
            assert_eq!((kept.len(), kept[0]["content"].as_str().unwrap().len()), (1, 30_000 * 102 - 2));
        });
        assert!(time.as_secs() < 5, "{time:?}");
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
        ] {
            assert_eq!(param(vec![message]), at);
        }
        assert_eq!(param(Vec::new()), "messages");
    }

    #[test]
    fn malformed_calls_are_completed() {
        let call = |name: &str, arguments: Value| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
        let unnamed = json!({"id": null, "type": "function", "function": {"name": "unknown", "arguments": "null"}});
        let custom =
            json!({"id": 1, "type": "function", "function": {"name": "unknown", "arguments": {"input": null}}});
        for (calls, expected) in [
            (call("f", json!({})), json!([call("f", json!({}))])),
            (json!([call("f", json!(5))]), json!([call("f", json!("5"))])),
            (json!([call("f", json!([1]))]), json!([call("f", json!("[1]"))])),
            (json!([{"id": 1, "type": "custom", "custom": {}}]), json!([custom])),
            (json!(["f", {}, null]), json!([unnamed, unnamed, unnamed])),
            (
                json!([{"type": "tool_use", "name": "f", "input": {"a": 1}}]),
                json!([ToolCall::new(Value::Null, "f", json!({"a": 1})).0]),
            ),
            (
                json!([{"name": "f", "arguments": "{\"a\": 1}"}]),
                json!([ToolCall::new(Value::Null, "f", json!("{\"a\": 1}")).0]),
            ),
        ] {
            let message = json!({"role": "assistant", "content": "", "tool_calls": calls});
            assert_eq!(checked(vec![message])[1]["tool_calls"], expected, "{calls}");
        }
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
        let messages = read(given).unwrap();
        let found: Vec<_> = messages.iter().flat_map(Message::images).map(|image| (&*image.at, image.is_new)).collect();
        let expected =
            [("messages[0].content[1]", false), ("messages[2].content[1]", false), ("messages[4].content[1]", true)];
        assert_eq!(found, expected);
        let image = json!({"type": "image", "image": true});
        let expected = json!([{"type": "text", "text": "see "}, image]);
        for message in [0, 2, 4] {
            assert_eq!(serde_json::to_value(&messages[message]).unwrap()["content"], expected);
        }
    }

    #[test]
    fn system_messages_have_no_images() {
        let content = json!([{"type": "image_url", "image_url": {"url": "data:;base64,AA"}}]);
        let system = json!({"role": "system", "content": content});
        assert_eq!(param(vec![system]), "messages[0].content[0]");
    }

    #[test]
    fn late_system_messages_become_user_messages() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let given = ["system a", "developer b", "user c", "system d", "system e"]
            .map(|m| say(&m[..m.len() - 2], &m[m.len() - 1..]));
        let expected = [say("system", "a\n\nb"), say("user", "c"), say("user", "d"), say("user", "e")];
        assert_eq!(checked(given.into()), expected);
        assert_eq!(checked(vec![say("user", "a"), say("system", "b")]), [say("user", "a"), say("user", "b")]);
    }
}
