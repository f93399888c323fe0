//! Translates items of a Responses conversation into messages. The items of one assistant turn (reasoning, a message,
//! calls) become one message.
//!
//! Calls that a client or an MCP server ran become calls of functions, whatever their type, and their outputs become
//! the results of these calls.
//!
//! A sentence replaces an item of an unknown type, wherever it stands, because a refusal would end the conversation. A
//! request is refused only if its new items are all unknown, or if a part of a message stands among them.

use crate::http::{
    ApiError, quote,
    request::{
        ImagePart, PartFormat,
        content_parts::{MessageOrigin, SUMMARY_INTRODUCTION, new_messages, replacement, take_thoughts},
        messages::{call_arguments, call_name},
    },
};
use moestro_chat::{Content, Message, Part, Role, ToolCall};
use serde_json::{Map, Value};

/// Prefix of this server's `encrypted_content`. The reasoning or the summary follows as plain text.
pub const ENCRYPTED_PREFIX: &str = "moestro:";

/// Items of tools that OpenAI's servers ran. They are left out, because the message after them says what was found.
const SERVER_CALLS: [&str; 5] =
    ["web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"];

/// Fields with the input of a call, except for `arguments`.
const CALL_FIELDS: [&str; 4] = ["action", "actions", "operation", "input"];

/// Fields with the outcome of a call that has no output.
const OUTCOME_FIELDS: [&str; 3] = ["status", "approve", "reason"];

const PARTS: PartFormat = PartFormat { types: &["input_text", "output_text", "text", "refusal"], separator: "" };

/// Type of the item with which a client asks for a compaction of the conversation.
const COMPACTION_TRIGGER: &str = "compaction_trigger";

/// Type of the items with further tools.
const ADDITIONAL_TOOLS: &str = "additional_tools";

/// The items before the first message of the user or the assistant. The tools of `additional_tools` items among them are
/// defined at the start of the prompt. Later items with tools define them where they stand.
pub fn first_items(items: &[Value]) -> &[Value] {
    let is_first =
        |item: &&Value| item["type"] == ADDITIONAL_TOOLS || item["role"] == "developer" || item["role"] == "system";
    &items[..items.iter().take_while(is_first).count()]
}

/// The tools of an item: those that a search has found, or additional ones.
pub fn tools(item: &Value) -> impl Iterator<Item = &Value> {
    let has_tools = item["type"] == ADDITIONAL_TOOLS || item["type"] == "tool_search_output";
    item["tools"].as_array().filter(|_| has_tools).into_iter().flatten()
}

/// The tools in a namespace, or the tool itself.
pub fn members(tool: &Value) -> &[Value] {
    let inner = tool["tools"].as_array().filter(|_| tool["type"] == "namespace");
    inner.map_or(std::slice::from_ref(tool), Vec::as_slice)
}

/// Translates `items` into messages. The last `input` of the items come from the request, and the items before them from
/// earlier responses. An error names the position of its item.
pub fn to_messages(items: &[Value], input: usize) -> Result<Vec<Message<ImagePart>>, ApiError> {
    let earlier = items.len().saturating_sub(input);
    let mut builder = MessageBuilder::default();
    let first = first_items(items).len();
    // A compaction also stands for what the user asked for, so it can be answered.
    let is_answer = |item: &Value| origin(item) == MessageOrigin::Assistant && !is_compaction(item);
    let answered = items.iter().rposition(is_answer).map_or(0, |last| last + 1);
    let only_unknown = items[answered..].iter().all(is_unknown);
    for (index, (item, is_new)) in items.iter().zip(new_messages(items, origin)).enumerate() {
        if index < first && item["type"] == ADDITIONAL_TOOLS {
            continue;
        }
        let at = match index.checked_sub(earlier) {
            Some(index) => format!("input[{index}]"),
            None => format!("previous_response_id: item {index}"),
        };
        // The last item may ask for a compaction. An answer would not be what the client asked for.
        let is_request = item["type"] == COMPACTION_TRIGGER && index + 1 == items.len();
        let is_new = is_new && (only_unknown || !is_unknown(item) || is_part_of_user(item) || is_request);
        builder.push(item, &at, is_new)?;
    }
    builder.close();
    Ok(builder.messages)
}

/// The author of an item, also of an unknown type.
fn origin(item: &Value) -> MessageOrigin {
    let kind = item["type"].as_str().unwrap_or("message");
    match (kind, item["role"].as_str()) {
        (_, Some("assistant")) => MessageOrigin::Assistant,
        ("message", Some("user")) => MessageOrigin::User,
        ("reasoning" | "program" | "mcp_list_tools" | "mcp_approval_request", _) => MessageOrigin::Assistant,
        // The user messages before a compaction are kept from the conversation that it replaces.
        _ if is_compaction(item) => MessageOrigin::Assistant,
        (kind, _) if kind.ends_with("_call") => MessageOrigin::Assistant,
        ("mcp_approval_response", _) => MessageOrigin::Tool,
        (kind, _) if kind.ends_with("_output") => MessageOrigin::Tool,
        _ => MessageOrigin::Other,
    }
}

fn is_compaction(item: &Value) -> bool {
    item["type"] == "compaction" || item["type"] == "compaction_summary"
}

/// True for an item of a type that the server does not know, of unknown origin.
fn is_unknown(item: &Value) -> bool {
    let is_known = |kind| ["message", ADDITIONAL_TOOLS].contains(&kind);
    origin(item) == MessageOrigin::Other && item["type"].as_str().is_some_and(|kind| !is_known(kind))
}

/// True for a part of a user message that stands outside a message, which is a mistake of the client.
fn is_part_of_user(item: &Value) -> bool {
    item["type"].as_str().is_some_and(|kind| kind.starts_with("input_") || kind == "text" || kind == "image_url")
}

#[derive(Default)]
struct MessageBuilder {
    messages: Vec<Message<ImagePart>>,
    /// The assistant message that is being built.
    open: Option<AssistantTurn>,
}

#[derive(Default)]
struct AssistantTurn {
    reasoning: String,
    content: String,
    calls: Vec<ToolCall>,
}

impl MessageBuilder {
    fn push(&mut self, item: &Value, at: &str, is_new: bool) -> Result<(), ApiError> {
        match (item["type"].as_str(), item["role"].as_str()) {
            (Some("message") | None, Some("assistant")) => {
                let mut content = item["content"].clone();
                let thoughts = take_thoughts(&mut content);
                let text = PARTS.text(&content, &format!("{at}.content"), false)?;
                // A second message starts a new turn, unless calls of the open turn still wait for their outputs.
                let turn = self.turn(|turn| turn.content.is_empty() || !turn.calls.is_empty());
                turn.reasoning += &thoughts;
                turn.content += &text;
            }
            (Some("message") | None, Some(role @ ("user" | "system" | "developer"))) => {
                self.close();
                let content = &item["content"];
                let at = format!("{at}.content");
                self.messages.push(match role {
                    "user" => Message::new(Role::User, PARTS.content(content, &at, is_new)?),
                    _ => Message::new(Role::System, PARTS.text(content, &at, is_new)?),
                });
            }
            (Some("message") | None, _) if !is_new => {
                self.close();
                let content = PARTS.content(&item["content"], &format!("{at}.content"), false)?;
                self.messages.push(Message::new(Role::User, content));
            }
            (None, _) if !item.is_object() => return Err(ApiError::wrong_type(at, "must be an object.")),
            (Some("message") | None, _) => {
                return Err(ApiError::wrong_value(
                    format!("{at}.role"),
                    "must be user, assistant, system or developer.",
                ));
            }
            (Some("reasoning"), _) => {
                let text = reasoning(item);
                self.turn(|turn| turn.content.is_empty() && turn.calls.is_empty()).reasoning += &text;
            }
            (Some("function_call" | "custom_tool_call"), _) => self.push_call(item, call_name(&item["name"])),
            (Some("compaction" | "compaction_summary"), _) => {
                self.close();
                // The summary of another server is encrypted.
                let text = item["encrypted_content"].as_str().and_then(|text| text.strip_prefix(ENCRYPTED_PREFIX));
                let content = text.map_or_else(|| replacement(item), |text| format!("{SUMMARY_INTRODUCTION}{text}"));
                self.messages.push(Message::new(Role::User, content));
            }
            (Some(kind), _) if SERVER_CALLS.contains(&kind) => {}
            (Some("tool_search_output" | ADDITIONAL_TOOLS), _) => {
                self.close();
                let names = tools(item).flat_map(members).filter_map(|tool| tool["name"].as_str());
                let parts = names.map(|name| Part::Tool(name.to_owned())).collect();
                self.messages.push(Message::tool_result(call_id(item).clone(), Content { parts }));
            }
            (Some("mcp_call"), _) => {
                self.push_call(item, item["name"].as_str().unwrap_or("mcp"));
                self.push_output(item, at)?;
            }
            (Some(kind), _) if kind.ends_with("_output") || kind == "mcp_approval_response" => {
                self.push_output(item, at)?;
            }
            (Some(kind), _) if kind.ends_with("_call") => {
                self.push_call(item, kind.strip_suffix("_call").unwrap_or(kind));
            }
            // It has the same place in each turn of the conversation.
            (Some(_), _) if !is_new && self.open.is_some() => self.turn(|_| true).content += &replacement(item),
            (Some(_), _) if !is_new => self.messages.push(Message::new(Role::User, replacement(item))),
            (Some(COMPACTION_TRIGGER), _) => {
                let text = format!("{at} asks for a compaction; use /v1/responses/compact.");
                return Err(ApiError::unsupported(at, text));
            }
            (Some(other), _) => {
                let text = format!("{at} has type `{}`, which this server does not support.", quote(other));
                return Err(ApiError::unsupported(at, text));
            }
        }
        Ok(())
    }

    fn push_call(&mut self, item: &Value, name: &str) {
        let arguments = match &item["arguments"] {
            Value::Null => {
                let fields = CALL_FIELDS.into_iter().filter(|name| !item[name].is_null());
                fields.map(|name| (name.to_owned(), item[name].clone())).collect::<Map<_, _>>().into()
            }
            arguments => call_arguments(arguments),
        };
        self.turn(|_| true).calls.push(ToolCall::new(call_id(item).clone(), name, arguments));
    }

    fn push_output(&mut self, item: &Value, at: &str) -> Result<(), ApiError> {
        self.close();
        let output = output(item, at)?;
        self.messages.push(Message::tool_result(call_id(item).clone(), output));
        Ok(())
    }

    /// Returns the open turn if the next piece belongs to that turn. Else starts a new turn.
    fn turn(&mut self, belongs: impl FnOnce(&AssistantTurn) -> bool) -> &mut AssistantTurn {
        if !self.open.as_ref().is_some_and(belongs) {
            self.close();
        }
        self.open.get_or_insert_default()
    }

    fn close(&mut self) {
        let Some(AssistantTurn { reasoning, content, calls }) = self.open.take() else { return };
        self.messages.push(Message::assistant(content, reasoning, calls));
    }
}

/// The id that connects a call and its output. Some types of items have only one id.
fn call_id(item: &Value) -> &Value {
    item.get("call_id").filter(|id| !id.is_null()).unwrap_or(&item["id"])
}

/// The output of a call: text, parts with text and images, or the output of a shell.
fn output(item: &Value, at: &str) -> Result<Content<ImagePart>, ApiError> {
    let mut content = Content::default();
    let at = format!("{at}.output");
    match [&item["output"], &item["result"], &item["error"]].into_iter().find(|output| !output.is_null()) {
        Some(Value::Array(chunks)) if chunks.iter().any(|it| it["stdout"].is_string() || it["outcome"].is_object()) => {
            content.push_text(chunks.iter().map(shell_text).collect(), "");
        }
        Some(output) => content = PARTS.content(output, &at, false)?,
        None => {
            let fields = OUTCOME_FIELDS.into_iter().filter(|name| !item[name].is_null());
            let fields: Map<_, _> = fields.map(|name| (name.to_owned(), item[name].clone())).collect();
            let text = if fields.is_empty() { replacement(item) } else { Value::Object(fields).to_string() };
            content.push_text(text, "");
        }
    }
    Ok(content)
}

/// The output of one command of a shell. A line says if the command failed.
fn shell_text(chunk: &Value) -> String {
    let mut text: String = [&chunk["stdout"], &chunk["stderr"]].into_iter().filter_map(Value::as_str).collect();
    let outcome = &chunk["outcome"];
    let failure = match outcome["exit_code"].as_i64().filter(|code| *code != 0) {
        Some(code) => format!("[exit code {code}]\n"),
        None if outcome["type"] == "timeout" => "[timed out]\n".to_owned(),
        None => return text,
    };
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text + &failure
}

/// The reasoning of an item: its text, or else this server's `encrypted_content`, or else the summary. Some clients
/// keep `encrypted_content` instead of the text.
fn reasoning(item: &Value) -> String {
    let joined = |field: &str| {
        let parts = item[field].as_array().into_iter().flatten();
        parts.filter_map(|part| part["text"].as_str()).collect::<String>()
    };
    let encrypted = item["encrypted_content"].as_str().and_then(|content| content.strip_prefix(ENCRYPTED_PREFIX));
    [joined("content"), encrypted.unwrap_or_default().to_owned(), joined("summary")]
        .into_iter()
        .find(|text| !text.is_empty())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The messages of `items` as a template reads them.
    fn messages(items: &[Value]) -> Vec<Value> {
        let messages = to_messages(items, items.len()).unwrap();
        messages.iter().map(|message| serde_json::to_value(message).unwrap()).collect()
    }

    #[test]
    fn unknown_new_items_are_from_the_user() {
        let [user, odd] = [json!({"role": "user", "content": "x"}), json!({"type": "odd"})];
        for items in [[&user, &odd], [&odd, &user]] {
            let found = messages(&items.map(Value::clone));
            assert!(found.iter().all(|message| message["role"] == "user"), "{found:?}");
            assert_eq!(found.len(), 2);
        }
        let answered = messages(&[user.clone(), odd.clone(), assistant_text("a"), user.clone()]);
        assert_eq!(answered[1]["role"], "user", "as before the answer");
        let beside = messages(&[user.clone(), assistant_text("a"), odd, user]);
        assert_eq!(beside.len(), 3, "{beside:?}");
    }

    fn call(id: &str) -> Value {
        json!({"type": "function_call", "id": "fc", "call_id": id, "name": "f", "arguments": "{\"a\": 1}"})
    }

    fn output(id: &str) -> Value {
        json!({"type": "function_call_output", "call_id": id, "output": "42"})
    }

    fn assistant_text(text: &str) -> Value {
        json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
    }

    fn thought(text: &str) -> Value {
        json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})
    }

    fn chat_call(id: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}})
    }

    #[test]
    fn items_of_a_turn_become_one_message() {
        let items = [
            json!({"role": "user", "content": "Hi"}),
            thought("hm"),
            assistant_text("Well"),
            call("1"),
            call("2"),
            output("1"),
            output("2"),
            thought("so"),
            assistant_text("Done"),
        ];
        let expected = [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "Well", "reasoning_content": "hm",
                   "tool_calls": [chat_call("1"), chat_call("2")]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "42"}),
            json!({"role": "tool", "tool_call_id": "2", "content": "42"}),
            json!({"role": "assistant", "content": "Done", "reasoning_content": "so"}),
        ];
        assert_eq!(messages(&items), expected);
    }

    #[test]
    fn calls_of_server_tools_are_left_out() {
        let search = json!({"type": "web_search_call", "id": "ws", "status": "completed"});
        let list = json!({"type": "mcp_list_tools", "id": "l", "server_label": "x", "tools": []});
        let items = [json!({"role": "user", "content": "Hi"}), list, thought("hm"), search, assistant_text("Found")];
        assert_eq!(messages(&items)[1], json!({"role": "assistant", "content": "Found", "reasoning_content": "hm"}));
    }

    #[test]
    fn calls_of_all_types_keep_their_data() {
        let commands = json!({"commands": ["ls"]});
        let shell_output = json!([{"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}]);
        let shell = json!([
            {"type": "shell_call", "call_id": "c", "action": commands, "status": "completed"},
            {"type": "shell_call_output", "call_id": "c", "output": shell_output},
        ]);
        let local_shell = json!([
            {"type": "local_shell_call", "id": "i", "call_id": "c", "action": commands},
            {"type": "local_shell_call_output", "id": "c", "output": "a"},
        ]);
        let mcp = json!([{"type": "mcp_call", "id": "c", "name": "f", "arguments": "{\"a\": 1}", "output": "o"}]);
        let search = json!([
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"q": "x"}},
            {"type": "tool_search_output", "call_id": "c", "tools": []},
        ]);
        for (items, name, arguments, output) in [
            (shell, "shell", json!({"action": commands}), "a\nb\n[exit code 1]\n"),
            (local_shell, "local_shell", json!({"action": commands}), "a"),
            (mcp, "f", json!("{\"a\": 1}"), "o"),
            (search, "tool_search", json!({"q": "x"}), ""),
        ] {
            let found = messages(items.as_array().unwrap());
            let call = json!({"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}});
            assert_eq!(found[0], json!({"role": "assistant", "content": "", "tool_calls": [call]}));
            assert_eq!(found[1], json!({"role": "tool", "tool_call_id": "c", "content": output}));
            assert_eq!(found.len(), 2);
        }
    }

    #[test]
    fn outcomes_of_calls_reach_the_model() {
        let shell = |outcome: Value| {
            let chunk = json!({"stdout": "", "stderr": "", "outcome": outcome});
            json!({"type": "shell_call_output", "call_id": "c", "output": [chunk]})
        };
        for (item, expected) in [
            (shell(json!({"type": "exit", "exit_code": 1})), "[exit code 1]\n"),
            (shell(json!({"type": "exit", "exit_code": 0})), ""),
            (shell(json!({"type": "timeout"})), "[timed out]\n"),
            (json!({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}), r#"{"status":"failed"}"#),
            (
                json!({"type": "mcp_approval_response", "approval_request_id": "r", "approve": false, "reason": "no"}),
                r#"{"approve":false,"reason":"no"}"#,
            ),
        ] {
            assert_eq!(messages(std::slice::from_ref(&item))[0]["content"], expected, "{item}");
        }
    }

    #[test]
    fn screenshot_of_a_computer_is_an_image() {
        let screenshot = json!({"type": "computer_screenshot", "image_url": "data:;base64,AA"});
        let items = [json!({"type": "computer_call_output", "call_id": "c", "output": screenshot})];
        let found = to_messages(&items, 1).unwrap();
        assert_eq!(found[0].images().map(|image| &*image.at).collect::<Vec<_>>(), ["input[0].output"]);
    }

    #[test]
    fn images_are_collected_from_messages_and_outputs() {
        let image = json!([{"type": "input_image", "image_url": "data:;base64,AA"}]);
        let result = json!({"type": "function_call_output", "call_id": "1", "output": image});
        let items = [json!({"role": "user", "content": image}), call("1"), result];
        let messages = to_messages(&items, items.len()).unwrap();
        let images = messages.iter().flat_map(Message::images);
        let found: Vec<_> = images.map(|image| (&*image.at, image.is_new)).collect();
        assert_eq!(found, [("input[0].content[0]", false), ("input[2].output[0]", false)]);
    }

    #[test]
    fn reasoning_after_a_call_starts_a_turn() {
        let items = [
            assistant_text("a"),
            call("1"),
            assistant_text("b"),
            output("1"),
            thought("x"),
            call("2"),
            thought("y"),
            assistant_text("c"),
            assistant_text("d"),
        ];
        let messages = messages(&items);
        let found = messages.iter().map(|message| (message["role"].as_str(), message["content"].as_str()));
        let expected = [("assistant", "ab"), ("tool", "42"), ("assistant", ""), ("assistant", "c"), ("assistant", "d")];
        assert!(found.eq(expected.map(|(role, content)| (Some(role), Some(content)))), "{messages:?}");
    }

    #[test]
    fn reasoning_is_read_from_three_fields() {
        let encrypted = format!("{ENCRYPTED_PREFIX}secret");
        let summary = json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]});
        let with_encrypted = |text: &str| test_support::with(summary.clone(), json!({"encrypted_content": text}));
        for (item, expected) in [
            (thought("text"), "text"),
            (with_encrypted(&encrypted), "secret"),
            (summary.clone(), "s"),
            (with_encrypted("gAAA"), "s"),
        ] {
            assert_eq!(reasoning(&item), expected);
        }
    }

    #[test]
    fn invalid_item_error_names_the_field() {
        for (item, param) in [
            (json!({"role": "wizard", "content": "x"}), "input[0].role"),
            (json!({"role": "user", "content": 5}), "input[0].content"),
            (json!({"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}), "input[0].content[0]"),
            (json!({"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}), "input[0].content[0]"),
            (json!({"role": "user", "content": ["x"]}), "input[0].content[0]"),
            (json!({"type": "odd"}), "input[0]"),
            (json!("x"), "input[0]"),
            (Value::Null, "input[0]"),
        ] {
            let error = to_messages(&[assistant_text("before"), item.clone()], 1).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{item}");
        }
    }

    #[test]
    fn malformed_outputs_become_text() {
        for (given, expected) in [(json!(5), "5"), (json!(true), "true"), (json!({"a": 1}), "{\"a\":1}")] {
            let items = [call("c"), json!({"type": "function_call_output", "call_id": "c", "output": given})];
            assert_eq!(messages(&items)[1]["content"], expected);
        }
        for item in [json!({"role": "assistant", "content": null}), json!({"type": "message", "role": "assistant"})] {
            assert_eq!(messages(&[item, output("c")])[0], json!({"role": "assistant", "content": ""}));
        }
    }

    #[test]
    fn unknown_items_become_sentences_beside_known_items() {
        let odd = json!({"type": "odd"});
        let user = json!({"role": "user", "content": "x"});
        let answer = assistant_text("a");
        for (items, is_sentence) in [
            (vec![&odd], false),
            (vec![&user, &answer, &odd], false),
            (vec![&odd, &answer, &odd, &odd], false),
            (vec![&user, &odd], true),
            (vec![&odd, &user], true),
            (vec![&user, &odd, &user], true),
            (vec![&user, &answer, &odd, &user], true),
            (vec![&odd, &user, &odd, &answer, &odd, &user, &odd], true),
            (vec![&user, &call("1"), &output("1"), &odd], true),
        ] {
            // The role of an unknown item does not matter.
            let items: Vec<Value> = items.into_iter().cloned().collect();
            let odd_user = json!({"type": "odd", "role": "user", "content": [{"type": "odd"}]});
            let of_user: Vec<_> =
                items.iter().map(|item| if *item == odd { odd_user.clone() } else { item.clone() }).collect();
            assert_eq!(to_messages(&of_user, items.len()).is_ok(), is_sentence, "{of_user:?}");
            let read = to_messages(&items, items.len());
            assert_eq!(read.is_ok(), is_sentence, "{items:?}");
            let unknown = items.iter().filter(|item| **item == odd).count();
            let read = read.unwrap_or_default();
            let texts = read.iter().map(|message| serde_json::to_string(message).unwrap());
            let sentences = texts.map(|text| text.matches("type `odd` is not shown").count()).sum::<usize>();
            assert_eq!(sentences, if is_sentence { unknown } else { 0 }, "{items:?}");
        }
    }

    #[test]
    fn arguments_are_objects_or_text() {
        let arguments = |arguments: &Value| {
            let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments});
            messages(&[call])[0]["tool_calls"][0]["function"]["arguments"].clone()
        };
        for (given, expected) in [
            (json!("null"), json!("null")),
            (json!("{\"a\": 1}"), json!("{\"a\": 1}")),
            (json!({"a": [2]}), json!({"a": [2]})),
            (Value::Null, json!({})),
            (json!([1]), json!("[1]")),
            (json!(5), json!("5")),
        ] {
            assert_eq!(arguments(&given), expected, "{given}");
        }
    }

    #[test]
    fn error_in_earlier_item_names_previous_response() {
        let invalid = json!({"role": "wizard", "content": "x"});
        let param = |items: &[Value], input| {
            let error = to_messages(items, input).unwrap_err();
            error.body()["error"]["param"].as_str().unwrap().to_owned()
        };
        assert_eq!(param(&[assistant_text("a"), assistant_text("b"), invalid.clone()], 2), "input[1].role");
        assert_eq!(param(&[assistant_text("a"), invalid], 0), "previous_response_id: item 1.role");
    }
}
