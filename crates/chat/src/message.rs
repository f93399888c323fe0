//! A message of a conversation, in the same type for every API.
//!
//! A message serializes to the message of OpenAI's chat completions that chat templates read.

use crate::json_repair;
use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value, json};
use std::mem;

/// Names of the field in which clients send an assistant's reasoning back. Templates read the first name.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

/// A message whose images have type `I`.
#[derive(Debug, Clone, PartialEq)]
pub struct Message<I> {
    pub role: Role,
    /// `None` if the message has no content, or null.
    pub content: Option<Content<I>>,
    /// The assistant's reasoning, which is not empty.
    pub reasoning: Option<String>,
    pub calls: Vec<ToolCall>,
    /// Other fields, which templates may read. A field above may be here, too, if the client sent it: its value does not
    /// count, but its place in the order does.
    pub extra: Map<String, Value>,
}

/// The content of a message: text, or text, images and tools. Adjacent texts are one part.
#[derive(Debug, Clone, PartialEq)]
pub struct Content<I> {
    pub parts: Vec<Part<I>>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Part<I> {
    Text(String),
    Image(I),
    /// Name of a tool. [`Message::define_tools`] replaces the part by the definition of the tool.
    Tool(String),
}

/// A call in an assistant's message: `{"id", "type", "function": {"name", "arguments"}}`. The arguments are an object,
/// or JSON text.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ToolCall(pub Value);

impl ToolCall {
    pub fn new(id: Value, name: &str, arguments: Value) -> Self {
        Self(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
    }

    /// Arguments as an object, from their JSON text. Some clients send an empty text or `null` for none.
    ///
    /// The arguments of a truncated call are not valid JSON. Their text gets the name that Anthropic's API uses in this
    /// case.
    pub fn read_arguments(text: &str) -> Value {
        if text.trim().is_empty() {
            return json!({});
        }
        match serde_json::from_str(&json_repair::repair(text)) {
            Ok(Value::Null) => json!({}),
            Ok(object @ Value::Object(_)) => object,
            _ => json!({"INVALID_JSON": text}),
        }
    }
}

impl<I> Message<I> {
    pub fn new(role: Role, content: impl Into<Content<I>>) -> Self {
        Self { role, content: Some(content.into()), reasoning: None, calls: Vec::new(), extra: Map::new() }
    }

    /// A message of the assistant. Empty reasoning is left out.
    pub fn assistant(content: String, reasoning: String, calls: Vec<ToolCall>) -> Self {
        let reasoning = Some(reasoning).filter(|text| !text.is_empty());
        Self { reasoning, calls, ..Self::new(Role::Assistant, content) }
    }

    /// The result of the call with this id.
    pub fn tool_result(call_id: Value, content: impl Into<Content<I>>) -> Self {
        let extra = Map::from_iter([("role".into(), Value::Null), ("tool_call_id".into(), call_id)]);
        Self { extra, ..Self::new(Role::Tool, content) }
    }

    /// A message with the fields of chat completions. `content` replaces the field of this name if it is not `None`. The
    /// first reasoning that is not empty counts.
    pub fn from_fields(role: Role, content: Option<Content<I>>, mut fields: Map<String, Value>) -> Self {
        let reasoning = REASONING.into_iter().find_map(|name| match fields.get_mut(name)? {
            Value::String(text) if !text.is_empty() => Some(mem::take(text)),
            _ => None,
        });
        if reasoning.is_some() {
            REASONING[1..].iter().for_each(|name| drop(fields.shift_remove(*name)));
        }
        let calls = fields.get_mut("tool_calls").and_then(Value::as_array_mut).map(mem::take).unwrap_or_default();
        Self { role, content, reasoning, calls: calls.into_iter().map(ToolCall).collect(), extra: fields }
    }

    fn parts(&self) -> impl Iterator<Item = &Part<I>> {
        self.content.iter().flat_map(|content| &content.parts)
    }

    pub fn images(&self) -> impl Iterator<Item = &I> {
        self.parts().filter_map(|part| if let Part::Image(image) = part { Some(image) } else { None })
    }

    /// Names of the tools that the message defines.
    pub fn tools(&self) -> impl Iterator<Item = &str> {
        self.parts().filter_map(|part| if let Part::Tool(name) = part { Some(&**name) } else { None })
    }

    /// Replaces each tool by the text that `define` returns for its name, on separate lines.
    pub fn define_tools(&mut self, mut define: impl FnMut(&str) -> String) {
        let Some(content) = &mut self.content else { return };
        for part in mem::take(&mut content.parts) {
            match part {
                Part::Tool(name) => content.push_text(define(&name), "\n"),
                Part::Text(text) => content.push_text(text, "\n"),
                image @ Part::Image(_) => content.parts.push(image),
            }
        }
    }
}

impl<I> Content<I> {
    /// Appends text. If the last part is text, the new text is joined to it after `separator`.
    pub fn push_text(&mut self, text: String, separator: &str) {
        match self.parts.last_mut() {
            Some(Part::Text(last)) => *last += &[separator, &text].concat(),
            _ => self.parts.push(Part::Text(text)),
        }
    }

    /// The text of a content without images.
    pub fn text(&self) -> Option<&str> {
        match &*self.parts {
            [] => Some(""),
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }
}

impl<I> Default for Content<I> {
    fn default() -> Self {
        Self { parts: Vec::new() }
    }
}

impl<I> From<String> for Content<I> {
    fn from(text: String) -> Self {
        Self { parts: vec![Part::Text(text)] }
    }
}

impl<I> Serialize for Message<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { role, content, reasoning, calls, extra } = self;
        let typed = ["role", "content", REASONING[0], "tool_calls"].into_iter();
        let missing = typed.filter(|name| !extra.contains_key(*name));
        let mut fields = serializer.serialize_map(None)?;
        for name in extra.keys().map(String::as_str).chain(missing) {
            match (name, extra.get(name)) {
                ("role", _) => fields.serialize_entry(name, role)?,
                ("content", _) if content.is_some() => fields.serialize_entry(name, content)?,
                ("tool_calls", _) if !calls.is_empty() => fields.serialize_entry(name, calls)?,
                (known, _) if known == REASONING[0] && reasoning.is_some() => {
                    fields.serialize_entry(name, reasoning)?
                }
                (_, Some(value)) => fields.serialize_entry(name, value)?,
                _ => {}
            }
        }
        fields.end()
    }
}

/// A string, or an array of parts if there are images.
impl<I> Serialize for Content<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.text() {
            Some(text) => serializer.serialize_str(text),
            None => serializer.collect_seq(self.parts.iter().map(|part| match part {
                Part::Text(text) | Part::Tool(text) => json!({"type": "text", "text": text}),
                Part::Image(_) => json!({"type": "image", "image": true}),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Message<u8> {
        let Value::Object(fields) = fields else { panic!("an object") };
        Message::from_fields(Role::Assistant, None, fields)
    }

    fn json(message: &Message<u8>) -> String {
        serde_json::to_string(message).unwrap()
    }

    #[test]
    fn fields_keep_their_order_and_values() {
        for fields in [
            json!({"x": 1, "content": null, "tool_calls": [{"function": {"name": "f"}, "id": 1}], "role": "assistant"}),
            json!({"thinking": null, "role": "assistant", "tool_calls": []}),
            json!({"role": "assistant", "reasoning_content": ["no text"], "thinking": "", "tool_calls": null}),
        ] {
            assert_eq!(json(&read(fields.clone())), fields.to_string());
        }
    }

    #[test]
    fn first_reasoning_with_text_counts() {
        let odd = [Value::Null, json!(""), json!({}), json!([]), json!(5)];
        for (name, text) in REASONING.into_iter().flat_map(|name| odd.iter().map(move |odd| (name, odd))) {
            for other in REASONING.into_iter().filter(|other| *other != name) {
                let message = read(json!({name: text, other: "r", "role": "assistant"}));
                assert_eq!(
                    serde_json::to_value(&message).unwrap(),
                    json!({"reasoning_content": "r", "role": "assistant"})
                );
            }
        }
        let all = read(json!({"reasoning": "c", "thinking": "b", "reasoning_content": "a", "role": "assistant"}));
        assert_eq!(json(&all), r#"{"reasoning_content":"a","role":"assistant"}"#);
    }

    #[test]
    fn typed_fields_replace_sent_fields() {
        let mut message =
            read(json!({"content": [1], "name": "n", "thinking": "t", "role": "developer", "tool_calls": [1]}));
        message.content = Some(Content::from("c".to_owned()));
        message.reasoning.as_mut().unwrap().push('!');
        message.calls.push(ToolCall(json!(2)));
        let expected =
            json!({"content": "c", "name": "n", "role": "assistant", "tool_calls": [1, 2], "reasoning_content": "t!"});
        assert_eq!(json(&message), expected.to_string());
        let mut message = read(json!({"name": "n"}));
        message.content = Some(Content::default());
        assert_eq!(json(&message), r#"{"name":"n","role":"assistant","content":""}"#);
    }

    #[test]
    fn new_message_has_fields_of_its_role() {
        let call = ToolCall::new("1".into(), "f", json!({"a": 1}));
        let assistant = Message::assistant("c".to_owned(), "r".to_owned(), vec![call]);
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let expected = json!({"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [call]});
        assert_eq!(json(&assistant), expected.to_string());
        let plain = Message::assistant("c".to_owned(), String::new(), Vec::new());
        assert_eq!(json(&plain), r#"{"role":"assistant","content":"c"}"#);
        let result = Message::tool_result("1".into(), "2".to_owned());
        assert_eq!(json(&result), r#"{"role":"tool","tool_call_id":"1","content":"2"}"#);
    }

    #[test]
    fn content_with_images_is_an_array() {
        let mut content = Content::default();
        content.push_text("a".to_owned(), "+");
        content.push_text("b".to_owned(), "+");
        assert_eq!(content.text(), Some("a+b"));
        content.parts.push(Part::Image(7));
        content.push_text("c".to_owned(), "+");
        assert_eq!(content.text(), None);
        let message = Message::new(Role::User, content);
        assert_eq!(message.images().collect::<Vec<_>>(), [&7]);
        let parts =
            json!([{"type": "text", "text": "a+b"}, {"type": "image", "image": true}, {"type": "text", "text": "c"}]);
        assert_eq!(serde_json::to_value(&message).unwrap()["content"], parts);
    }

    #[test]
    fn definitions_replace_tools() {
        let define = |parts: Vec<Part<u8>>| {
            let mut message = Message::tool_result(Value::Null, Content { parts });
            message.define_tools(|name| format!("<{name}>"));
            serde_json::to_value(&message).unwrap()["content"].clone()
        };
        let text = |text: &str| Part::Text(text.into());
        let tool = |name: &str| Part::Tool(name.into());
        assert_eq!(define(vec![text("a"), tool("f"), tool("g"), text("b")]), "a\n<f>\n<g>\nb");
        assert_eq!(define(vec![tool("f")]), "<f>");
        let parts = define(vec![text("a"), Part::Image(7), tool("f")]);
        assert_eq!((parts[0]["text"].clone(), parts[2]["text"].clone()), (json!("a"), json!("<f>")));
    }
}
