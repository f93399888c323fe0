//! Translates messages of Anthropic's API and their blocks.

use crate::http::{
    ApiError,
    anthropic::renderer::omitted_thinking,
    quote,
    request::{
        ImagePart, PartFormat,
        messages::{call_arguments, call_name},
    },
};
use moestro_chat::{Content, Message, Part, Role, ToolCall};
use serde_json::{Value, json};
use std::mem;

pub const BLOCKS: PartFormat = PartFormat { types: &["text"], separator: "\n\n" };

/// Translates one message. A tool result becomes a separate message. An earlier message of an unknown role becomes a user
/// message.
pub fn push(messages: &mut Vec<Message<ImagePart>>, message: &Value, at: &str, is_new: bool) -> Result<(), ApiError> {
    let name = match &message["role"] {
        Value::String(role) => role.as_str(),
        _ if !is_new => "",
        Value::Null => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
        _ => return Err(ApiError::wrong_type(format!("{at}.role"), "must be a string.")),
    };
    let role = match name {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ if !is_new => Role::User,
        other => {
            let problem = format!("is `{}`; the roles are user and assistant.", quote(other));
            return Err(ApiError::wrong_value(format!("{at}.role"), problem));
        }
    };
    let at = format!("{at}.content");
    let single;
    let content = match &message["content"] {
        block @ Value::Object(_) if !is_new => {
            single = json!([block]);
            &single
        }
        content => content,
    };
    match (role, content) {
        // The message only configures the answer.
        (Role::System, Value::String(text)) if text.is_empty() => {}
        (Role::System, Value::Null) if !is_new || message["output_config"].is_object() => {}
        (_, Value::String(text)) => messages.push(Message::new(role, text.clone())),
        (Role::User, Value::Array(blocks)) => push_user(messages, blocks, &at, is_new)?,
        (Role::Assistant, Value::Array(blocks)) => push_assistant(messages, blocks, &at)?,
        (_, Value::Array(blocks)) => push_system(messages, blocks, &at)?,
        (_, other) if !is_new => messages.push(Message::new(role, BLOCKS.text(other, &at, false)?)),
        _ => return Err(ApiError::wrong_type(at, "must be a string or an array of blocks.")),
    }
    Ok(())
}

fn push_user(messages: &mut Vec<Message<ImagePart>>, blocks: &[Value], at: &str, is_new: bool) -> Result<(), ApiError> {
    let mut content = Content::default();
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if block["type"] != "tool_result" {
            BLOCKS.push(block, &at, is_new, &mut content)?;
            continue;
        }
        push_content(messages, &mut content);
        let result = BLOCKS.content(&block["content"], &format!("{at}.content"), false)?;
        messages.push(Message::tool_result(block["tool_use_id"].clone(), result));
    }
    push_content(messages, &mut content);
    Ok(())
}

/// Translates the blocks of a system message. Sentences also replace new blocks that cannot be read, because the client
/// adds such a message, not the user.
fn push_system(messages: &mut Vec<Message<ImagePart>>, blocks: &[Value], at: &str) -> Result<(), ApiError> {
    let mut content = Content::default();
    for (index, block) in blocks.iter().enumerate() {
        let tool = &block["tool"];
        let is_client_tool = tool["type"].is_null() || tool["type"] == "tool_reference";
        match (block["type"].as_str(), tool["name"].as_str().filter(|_| is_client_tool)) {
            (Some("tool_addition"), Some(name)) => content.parts.push(Part::Tool(name.to_owned())),
            (Some("tool_removal"), Some(name)) => {
                let text = format!("[The tool `{}` was removed. Do not call it]", quote(name));
                content.push_text(text, BLOCKS.separator);
            }
            _ => {
                let text = BLOCKS.part_text(block, &format!("{at}[{index}]"), false)?;
                content.push_text(text, BLOCKS.separator);
            }
        }
    }
    if !content.parts.is_empty() {
        messages.push(Message::new(Role::System, content));
    }
    Ok(())
}

/// Moves `content` to a new user message, unless it is empty.
fn push_content(messages: &mut Vec<Message<ImagePart>>, content: &mut Content<ImagePart>) {
    if !content.parts.is_empty() {
        messages.push(Message::new(Role::User, mem::take(content)));
    }
}

/// Translates the assistant's blocks to one message. The result of a tool search that Anthropic's servers ran is a
/// separate message, so that the definitions of the tools stand outside of the assistant's text.
fn push_assistant(messages: &mut Vec<Message<ImagePart>>, blocks: &[Value], at: &str) -> Result<(), ApiError> {
    let mut content = String::new();
    let mut reasoning = String::new();
    let mut calls = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match block["type"].as_str() {
            Some("thinking") => match block["thinking"].as_str() {
                Some(text) if !text.is_empty() => reasoning += text,
                _ => reasoning += &omitted_thinking(&block["signature"]),
            },
            // The block is encrypted. Only Anthropic can read the text.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let input = call_arguments(&block["input"]);
                calls.push(ToolCall::new(block["id"].clone(), call_name(&block["name"]), input));
            }
            Some("server_tool_use") if is_search(&block["name"]) => {
                let name = block["name"].as_str().unwrap_or_default();
                calls.push(ToolCall::new(block["id"].clone(), name, call_arguments(&block["input"])));
            }
            Some("tool_search_tool_result") => {
                let before =
                    Message::assistant(mem::take(&mut content), mem::take(&mut reasoning), mem::take(&mut calls));
                messages.push(before);
                let mut found = Content::default();
                let error = std::slice::from_ref(&block["content"]);
                for reference in block["content"]["tool_references"].as_array().map_or(error, Vec::as_slice) {
                    BLOCKS.push(reference, &at, false, &mut found)?;
                }
                messages.push(Message::tool_result(block["tool_use_id"].clone(), found));
            }
            Some(kind) if is_server_call(kind) => {}
            // Anthropic's API does not show these blocks to the model. Without content, a compaction has failed.
            Some("fallback" | "mcp_tool_listing") => {}
            Some("compaction") if block["content"].is_null() => {}
            _ => content += &BLOCKS.part_text(block, &at, false)?,
        }
    }
    messages.push(Message::assistant(content, reasoning, calls));
    Ok(())
}

/// True for the type or the name of a tool search that Anthropic's servers run.
pub fn is_search(kind: &Value) -> bool {
    kind.as_str().is_some_and(|kind| kind.starts_with("tool_search_tool_"))
}

/// True for calls and results of tools that Anthropic's servers ran. They are left out, because the text after them says
/// what was found.
fn is_server_call(kind: &str) -> bool {
    kind == "server_tool_use" || kind == "mcp_tool_use" || kind.ends_with("_tool_result")
}
