//! Messages and tools, checked and rendered: `messages -> prompt -> ids`.
//!
//! Contents become plain strings on the way, because templates differ in whether they understand OpenAI's parts; this
//! server reads text only. `developer` is OpenAI's newer name for `system`, and templates know the older one.
//!
//! Templates know one system message, the first. Those that follow it at once are joined to it; a later one becomes a
//! user's message, in its place.

use crate::http::{
    LoadedModel,
    errors::ApiError,
    layers::memory::{self, MemoryPermit},
    openai::types::ChatRequest,
    request::continue_final::Mark,
};
use crate::{
    chat::{Conversation, Speaker, json_numbers, message_ends},
    engine::{Boundary, Departure},
};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The checked inputs of a conversation's template.
#[derive(Debug)]
pub struct Chat {
    pub messages: Vec<Value>,
    /// Empty if the model may not call any.
    pub tools: Vec<Value>,
    pub kwargs: Map<String, Value>,
    pub add_generation_prompt: bool,
    /// The end of the last message, if the answer goes on from there.
    pub open: Option<Mark>,
}

impl LoadedModel {
    /// The prompt of a conversation, and the conversation back. `share` then holds the prompt, too.
    pub async fn render(self: &Arc<Self>, permit: &mut MemoryPermit, chat: Chat) -> Result<(String, Chat), ApiError> {
        let held = permit.bytes();
        permit.grow(memory::rendered(chat.messages.iter().chain(&chat.tools).chain(chat.kwargs.values())))?;
        let app = self.clone();
        let (prompt, chat) = permit.run(move || app.render_now(&chat).map(|prompt| (prompt, chat))).await??;
        permit.resize(held + prompt.capacity())?;
        Ok((prompt, chat))
    }

    fn render_now(&self, chat: &Chat) -> Result<String, ApiError> {
        let Some(template) = &self.template else {
            let message = "This model has no chat template. Use /v1/completions.";
            return Err(ApiError::unsupported("messages", message));
        };
        let mut kwargs = chat.kwargs.clone();
        if let Some(thinking) = self.thinking {
            kwargs.entry("enable_thinking").or_insert(thinking.into());
        }
        let tools = (!chat.tools.is_empty()).then_some(&*chat.tools);
        let conversation = Conversation {
            messages: &chat.messages,
            tools,
            kwargs: &kwargs,
            add_generation_prompt: chat.add_generation_prompt,
        };
        let prompt = template.render(&conversation)?;
        match &chat.open {
            Some(mark) => mark.cut(prompt),
            None => Ok(prompt),
        }
    }

    /// The tokens of a prompt. One that cannot fit into the context is refused by its length, and one that does not fit as
    /// soon as that shows. `param` names the prompt.
    pub async fn encode(&self, permit: &mut MemoryPermit, text: String, param: &str) -> Result<Vec<u32>, ApiError> {
        let context = self.engine.context();
        let least = self.tokenizer.min_tokens(&text);
        if least > context {
            return Err(ApiError::over_context_by(least, context, param));
        }
        let (ids, whole) = self.tokenize(permit, text, context).await?;
        match whole {
            true => Ok(ids),
            false => Err(ApiError::over_context_by(ids.len(), context, param)),
        }
    }

    /// The tokens of a text, piece by piece; `share` holds them. If there are more than `most`, the rest is left out, and
    /// the answer is false.
    pub async fn tokenize(
        &self,
        permit: &mut MemoryPermit,
        text: String,
        most: usize,
    ) -> Result<(Vec<u32>, bool), ApiError> {
        let (text, mut ids, mut start) = (Arc::new(text), Vec::new(), 0);
        while start < text.len() && ids.len() <= most {
            let (tokenizer, text) = (self.tokenizer.clone(), text.clone());
            let end = start + tokenizer.piece_len(&text[start..]);
            // A long word needs more than what is set aside for each step.
            let held = permit.bytes();
            permit.grow((end - start).saturating_sub(memory::PIECE) * memory::TOKENIZING)?;
            let more = permit.run(move || tokenizer.encode_piece(&text[start..end])).await??;
            permit.resize(held + more.len() * size_of::<u32>() * 2)?;
            ids.extend(more);
            start = end;
        }
        Ok((ids, start == text.len()))
    }

    /// The places where other prompts may depart from this one.
    pub fn boundaries(&self, ids: &[u32]) -> Vec<Boundary> {
        let ends = message_ends(&self.tokenizer, ids).into_iter();
        let departure = |speaker| match speaker {
            Speaker::System => Departure::System,
            Speaker::User => Departure::Query,
            Speaker::Other => Departure::Message,
        };
        ends.map(|(at, speaker)| Boundary { at, departure: departure(speaker) }).collect()
    }
}

/// Checks every message and puts it into the form that templates expect.
pub fn messages(mut messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty; there must be at least one."));
    }
    for (index, message) in messages.iter_mut().enumerate() {
        let at = format!("messages[{index}]");
        let Value::Object(message) = message else {
            return Err(ApiError::json(Some(at.clone()), format!("{at} must be an object.")));
        };
        one_message(message, &at)?;
    }
    Ok(one_system(messages))
}

/// Leaves at most one system message, the first.
fn one_system(messages: Vec<Value>) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::with_capacity(messages.len());
    for mut message in messages {
        if message["role"] == "system" && !kept.is_empty() {
            // In place: there may be as many as a body has room for.
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

/// Puts OpenAI's deprecated `functions` and `function_call` into the fields that replaced them.
pub fn functions(request: &mut ChatRequest) -> Result<(), ApiError> {
    if let Some(functions) = request.functions.take() {
        if request.tools.is_some() {
            let message = "functions is the older name of tools; send one of them.";
            return Err(ApiError::invalid("functions", message));
        }
        let tool = |function| serde_json::json!({"type": "function", "function": function});
        request.tools = Some(functions.into_iter().map(tool).collect());
    }
    if let Some(call) = request.function_call.take().filter(|call| !call.is_null()) {
        request.tool_choice = Some(match call {
            Value::Object(_) => serde_json::json!({"type": "function", "function": call}),
            word => word,
        });
    }
    Ok(())
}

fn one_message(message: &mut Map<String, Value>, at: &str) -> Result<(), ApiError> {
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
        // Deprecated: the answer of a function.
        "function" => {
            message.insert("role".into(), "tool".into());
        }
        other => {
            let known = "system, developer, user, assistant, tool and function";
            let text = format!("{at}.role is `{other}`; the roles are {known}.");
            return Err(ApiError::invalid(format!("{at}.role"), text));
        }
    }
    // Deprecated: one call.
    if let Some(call) = message.remove("function_call").filter(|call| !call.is_null()) {
        message.entry("tool_calls").or_insert(serde_json::json!([{"type": "function", "function": call}]));
    }
    let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
    if calls {
        tool_calls(&message["tool_calls"], at)?;
    }
    match message.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = joined(parts, &format!("{at}.content"))?;
            message.insert("content".into(), text.into());
        }
        None | Some(Value::Null) if role == "assistant" => {}
        None | Some(Value::Null) => {
            let text = format!("{at} has no content; a message of role {role} must have one.");
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
                return Err(ApiError::json(
                    Some(at.clone()),
                    format!("{at} must be {{\"type\": \"text\", \"text\": ...}}."),
                ));
            }
            (Some(kind), _) => {
                let text = format!("{at} is of type `{kind}`; this server reads text only.");
                return Err(ApiError::unsupported(&at, text));
            }
        }
    }
    Ok(joined)
}

/// The calls an assistant made earlier: each needs a name and arguments, as JSON in a string or as an object.
fn tool_calls(calls: &Value, at: &str) -> Result<(), ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::json(Some(format!("{at}.tool_calls")), format!("{at}.tool_calls must be an array.")));
    };
    for (index, call) in calls.iter().enumerate() {
        let at = format!("{at}.tool_calls[{index}].function");
        let function = &call["function"];
        if !function["name"].is_string() {
            return Err(ApiError::json(Some(format!("{at}.name")), format!("{at}.name must be a string.")));
        }
        let sound = match function.get("arguments") {
            Some(Value::Object(_) | Value::Null) => true,
            Some(Value::String(json)) => {
                json.trim().is_empty()
                    || serde_json::from_str::<Map<String, Value>>(&json_numbers::quote_huge(json)).is_ok()
            }
            _ => false,
        };
        if !sound {
            let text = format!("{at}.arguments must be a JSON object in a string; a call without any has `{{}}`.");
            return Err(ApiError::invalid(format!("{at}.arguments"), text));
        }
    }
    Ok(())
}

/// The tools that the model may call: none if `choice` is `"none"`.
pub fn tools(tools: Option<Vec<Value>>, choice: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    let tools = tools.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool["type"] != "function" {
            return Err(ApiError::invalid(format!("{at}.type"), format!("{at}.type must be `function`.")));
        }
        let function = &tool["function"];
        if !function["name"].as_str().is_some_and(is_name) {
            let text =
                format!("{at}.function.name must be 1 to {MOST_NAME} letters, digits, dots, dashes or underscores.");
            return Err(ApiError::invalid(format!("{at}.function.name"), text));
        }
        if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
            let text = format!("{at}.function.parameters must be a JSON schema, which is an object.");
            return Err(ApiError::invalid(format!("{at}.function.parameters"), text));
        }
    }
    // `form` knows what else may stand here.
    Ok(if choice.is_some_and(|choice| choice == "none") { Vec::new() } else { tools })
}

/// OpenAI takes names of 64 characters, Anthropic of 128; neither takes dots, which other clients send.
const MOST_NAME: usize = 128;

fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=MOST_NAME).contains(&name.len()) && name.chars().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn param(result: Result<Vec<Value>, ApiError>) -> String {
        let body = serde_json::to_value(result.unwrap_err().body()).unwrap();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    #[test]
    fn contents_become_strings() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let given = vec![json!({"role": "developer", "content": "d"}), json!({"role": "user", "content": parts})];
        let wanted = [json!({"role": "system", "content": "d"}), json!({"role": "user", "content": "ab"})];
        assert_eq!(messages(given).unwrap(), wanted);
    }

    #[test]
    fn system_messages_without_number_take_no_time_without_measure() {
        let one = json!({"role": "system", "content": "x".repeat(100)});
        let given = vec![one; 30_000];
        let begun = std::time::Instant::now();
        let kept = messages(given).unwrap();
        assert_eq!((kept.len(), kept[0]["content"].as_str().unwrap().len()), (1, 30_000 * 102 - 2));
        assert!(begun.elapsed().as_millis() < 1000, "{:?}", begun.elapsed());
    }

    #[test]
    fn an_assistant_may_say_nothing_but_call() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        for content in [json!("x"), Value::Null] {
            let message = json!({"role": "assistant", "content": content, "tool_calls": [call]});
            assert!(messages(vec![message]).is_ok());
        }
        assert!(messages(vec![json!({"role": "assistant", "tool_calls": [call]})]).is_ok());
    }

    #[test]
    fn what_is_wrong_with_a_message_is_named() {
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
            assert_eq!(param(messages(vec![message])), at);
        }
        assert_eq!(param(messages(Vec::new())), "messages");
    }

    #[test]
    fn tools_are_offered_unless_forbidden() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let offered = || Some(vec![tool.clone()]);
        assert_eq!(tools(offered(), None).unwrap().len(), 1);
        assert_eq!(tools(offered(), Some(&json!("auto"))).unwrap().len(), 1);
        assert!(tools(offered(), Some(&json!("none"))).unwrap().is_empty());
        assert_eq!(tools(offered(), Some(&json!("required"))).unwrap().len(), 1);
        assert_eq!(param(tools(Some(vec![json!({"type": "web_search"})]), None)), "tools[0].type");
        assert_eq!(param(tools(Some(vec![json!({"type": "function"})]), None)), "tools[0].function.name");
        for name in [String::new(), "a b".into(), "a>".into(), "ä".into(), "a".repeat(129)] {
            let tool = json!({"type": "function", "function": {"name": name}});
            assert_eq!(param(tools(Some(vec![tool]), None)), "tools[0].function.name");
        }
    }

    #[test]
    fn one_system_message_comes_first() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let given = ["system a", "developer b", "user c", "system d", "system e"]
            .map(|m| say(&m[..m.len() - 2], &m[m.len() - 1..]));
        let wanted = [say("system", "a\n\nb"), say("user", "c"), say("user", "d"), say("user", "e")];
        assert_eq!(messages(given.into()).unwrap(), wanted);
        assert_eq!(messages(vec![say("user", "a"), say("system", "b")]).unwrap(), [say("user", "a"), say("user", "b")]);
    }
}
