//! The request of the Responses API, checked and translated into a chat request.

use crate::http::{
    ApiError, ServerState,
    layers::{MemoryPermit, value_bytes},
    openai::{
        ChatRequest, CommonFields, ResponseFormat,
        responses::{items, store::ResponseStore},
    },
    request::{ChatPrompt, FieldNames, GenerationRequest, Thinking, body, fields, tools},
};
use axum::body::Body;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Pairs of a field name in chat completions and the field's name in the Responses API, for error messages.
const NAMES: FieldNames = &[
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("].function", "]"),
];

/// The same pairs for the fields within `text.format`.
const FORMAT_NAMES: FieldNames = &[("json_schema", "text.format"), ("", "text.format.")];

/// Value of `include` for the log-probabilities of the text.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Value of `include` for the `encrypted_content` of reasoning items.
pub const ENCRYPTED_REASONING: &str = "reasoning.encrypted_content";

/// Maximum number of characters of an unknown tool's type in the log.
const LOGGED_CHARS: usize = 40;

#[derive(Debug, Default, Deserialize)]
pub struct ResponsesRequest {
    /// The fields that have the same name in chat completions.
    #[serde(skip)]
    pub common: CommonFields,
    input: Option<Value>,
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub store: Option<bool>,
    pub max_output_tokens: Option<i64>,
    pub top_logprobs: Option<i64>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Option<ResponsesReasoning>,
    pub text: Option<TextFields>,
    pub include: Option<Vec<String>>,
    pub metadata: Option<Map<String, Value>>,
    pub user: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub struct ResponsesReasoning {
    pub effort: Option<String>,
    pub summary: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub struct TextFields {
    pub format: Option<Value>,
    pub verbosity: Option<String>,
}

/// Reads a request. Returns the request, the items of earlier responses, the items of the input, and a permit for the
/// memory of all items.
pub async fn read(
    state: &ServerState,
    body: Body,
) -> Result<(ResponsesRequest, Vec<Value>, Vec<Value>, MemoryPermit), ApiError> {
    let (common, request, mut permit) = body::request::<_, ResponsesRequest>(state, body, fields::RESPONSES).await?;
    // In the Responses API, `stream_options` only controls obfuscation, which this server does not have.
    let mut request = ResponsesRequest { common: CommonFields { stream_options: None, ..common }, ..request };
    // Memory for translating the request, and for copying and translating the items of earlier responses.
    let mut reserve = |bytes: usize| permit.grow(permit.bytes() + 2 * bytes);
    let history = match &request.previous_response_id {
        Some(id) => {
            let history = state.responses.history(id, reserve)?;
            history.ok_or_else(|| ApiError::no_such_response(id, "previous_response_id"))?
        }
        None => {
            reserve(0)?;
            Vec::new()
        }
    };
    let input = request.take_input(&state.responses, &mut permit)?;
    Ok((request, history, input, permit))
}

impl ResponsesRequest {
    /// The functions that are offered to the model, including the functions in namespaces.
    fn functions(&self) -> Result<Vec<Value>, ApiError> {
        let mut functions = Vec::new();
        for (index, it) in self.tools.iter().flatten().enumerate() {
            let at = format!("tools[{index}]");
            match it["tools"].as_array().filter(|_| it["type"] == "namespace") {
                Some(inner) => {
                    for (index, it) in inner.iter().enumerate() {
                        functions.extend(tool(it, &format!("{at}.tools[{index}]"))?);
                    }
                }
                None => functions.extend(tool(it, &at)?),
            }
        }
        Ok(functions)
    }

    /// Maps the name of each function that is in a namespace to the name of the namespace.
    pub fn namespaces(&self) -> BTreeMap<String, String> {
        let spaces = self.tools.iter().flatten().filter(|tool| tool["type"] == "namespace");
        let pairs = spaces.flat_map(|space| {
            let functions = space["tools"].as_array().into_iter().flatten();
            functions.filter_map(|tool| Some((tool["name"].as_str()?.to_owned(), space["name"].as_str()?.to_owned())))
        });
        pairs.collect()
    }

    /// Changes the request so that the answer is a single text, without calls, reasoning, text format,
    /// log-probabilities or stream.
    pub fn answer_as_text(&mut self) {
        self.tool_choice = Some("none".into());
        self.reasoning = Some(ResponsesReasoning { effort: Some("none".into()), summary: None });
        (self.text, self.common.stream) = (None, None);
        (self.include, self.top_logprobs) = (None, None);
    }

    /// True if `include` names this part of the answer. Names other than [`LOGPROBS`] and [`ENCRYPTED_REASONING`]
    /// concern tools that OpenAI's servers run.
    pub fn includes(&self, part: &str) -> bool {
        self.include.iter().flatten().any(|name| name == part)
    }

    /// Takes the items of `input`. The tools of `additional_tools` items, which Codex sends, move to `tools`.
    /// References to items are replaced by copies of the items. `permit` grows by the memory of the copies and of their
    /// translation.
    pub fn take_input(&mut self, store: &ResponseStore, permit: &mut MemoryPermit) -> Result<Vec<Value>, ApiError> {
        let mut items = match self.input.take() {
            Some(Value::String(text)) => vec![json!({"type": "message", "role": "user", "content": text})],
            Some(Value::Array(items)) => items,
            None if self.previous_response_id.is_some() => Vec::new(),
            None => return Err(ApiError::json(Some("input".into()), "missing field `input`")),
            Some(_) => {
                return Err(ApiError::wrong_type("input", "must be a string or an array of items."));
            }
        };
        for item in items.extract_if(.., |item| item["type"] == "additional_tools") {
            self.tools.get_or_insert_default().extend(item["tools"].as_array().cloned().unwrap_or_default());
        }
        let resolve = |(index, item): (usize, Value)| {
            // A reference may omit its type.
            let is_bare = item.get("type").is_none_or(Value::is_null) && item.get("role").is_none();
            match item["id"].as_str() {
                Some(id) if item["type"] == "item_reference" || is_bare => {
                    let item = store.item(id);
                    let item = item.ok_or_else(|| ApiError::no_such_item(id, &format!("input[{index}]")))?;
                    permit.grow(3 * value_bytes(&item))?;
                    Ok(item)
                }
                _ => Ok(item),
            }
        };
        items.into_iter().enumerate().map(resolve).collect()
    }

    /// Translates the request. `history` has the items of earlier responses, and `input` has the items of this request.
    pub fn into_generation(self, history: Vec<Value>, input: Vec<Value>) -> Result<GenerationRequest, ApiError> {
        let (common, chat) = self.into_chat(history, input)?;
        GenerationRequest::from_chat(common, chat, NAMES)
    }

    /// Returns only the conversation, so that its tokens can be counted.
    pub fn into_prompt(self, history: Vec<Value>, input: Vec<Value>) -> Result<ChatPrompt, ApiError> {
        let (_, mut chat) = self.into_chat(history, input)?;
        let prompt = Thinking::of(&chat).and_then(|thinking| {
            chat.enable_thinking = thinking.enabled;
            ChatPrompt::from_chat(chat)
        });
        prompt.map_err(|error| error.renamed(NAMES))
    }

    fn into_chat(self, mut items: Vec<Value>, input: Vec<Value>) -> Result<(CommonFields, ChatRequest), ApiError> {
        let has_logprobs = self.includes(LOGPROBS);
        let top_logprobs = self.top_logprobs.filter(|&top| has_logprobs || top != 0);
        if top_logprobs.is_some() && !has_logprobs {
            return Err(ApiError::wrong_value("top_logprobs", format!("is only allowed if include has `{LOGPROBS}`.")));
        }
        let tools = self.functions()?;
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.filter(|text| !text.is_empty()) {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        let new = input.len();
        items.extend(input);
        let (translated, images) = items::to_messages(&items, new)?;
        messages.extend(translated);
        let format = self.text.and_then(|text| text.format).filter(|format| !format.is_null());
        let effort = self.reasoning.and_then(|reasoning| reasoning.effort);
        let chat = ChatRequest {
            messages,
            images: Some(images),
            max_completion_tokens: self.max_output_tokens,
            logprobs: Some(has_logprobs),
            top_logprobs,
            tools: (!tools.is_empty()).then_some(tools),
            tool_choice: self.tool_choice.filter(|choice| !choice.is_null()).map(tool_choice).transpose()?,
            parallel_tool_calls: self.parallel_tool_calls,
            response_format: format.map(response_format).transpose()?,
            reasoning_effort: effort,
            ..ChatRequest::default()
        };
        Ok((self.common, chat))
    }
}

/// Translates a function. Returns `None` for `custom` tools and for tools that OpenAI's servers run. The API allows
/// this, because a model need not call a tool.
fn tool(tool: &Value, at: &str) -> Result<Option<Value>, ApiError> {
    match tool["type"].as_str() {
        Some("function") => {
            let fields = ["name", "description", "parameters"].into_iter();
            let mut function: Map<_, _> = fields
                .filter_map(|name| Some((name.to_owned(), tool.get(name).filter(|value| !value.is_null())?.clone())))
                .collect();
            tools::copy_strict(tool, &mut function);
            Ok(Some(json!({"type": "function", "function": function})))
        }
        Some(kind) => {
            let kind: String = kind.chars().take(LOGGED_CHARS).collect();
            tracing::info!(kind, "tool ignored: the server supports only tools of type function");
            Ok(None)
        }
        None => Err(ApiError::wrong_value(format!("{at}.type"), "must be `function`.")),
    }
}

/// Translates `tool_choice`. In chat completions, the name of a function is one level deeper.
fn tool_choice(choice: Value) -> Result<Value, ApiError> {
    let function = |tool: &Value| json!({"type": "function", "function": {"name": tool["name"]}});
    match choice["type"].as_str() {
        None if choice.is_string() => Ok(choice),
        Some("function") => Ok(function(&choice)),
        Some("allowed_tools") => {
            let tools: Vec<_> = choice["tools"].as_array().into_iter().flatten().map(function).collect();
            Ok(json!({"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}))
        }
        other => {
            let kind = other.unwrap_or("missing");
            let text = format!(
                "tool_choice.type is {kind}; tool_choice must be `auto`, `none`, `required` or name a function."
            );
            Err(ApiError::unsupported("tool_choice", text))
        }
    }
}

fn response_format(format: Value) -> Result<ResponseFormat, ApiError> {
    if !format.is_object() {
        return Err(ApiError::wrong_type("text.format", "must be an object."));
    }
    body::typed(nested_schema(format)).map_err(|error: ApiError| error.renamed(FORMAT_NAMES))
}

/// Translates `{type, name, schema, strict}`. In chat completions, all of these fields except `type` are one level
/// deeper.
fn nested_schema(mut format: Value) -> Value {
    let Some(fields) = format.as_object_mut().filter(|fields| fields.contains_key("schema")) else { return format };
    let kind = fields.shift_remove("type").unwrap_or_default();
    json!({"type": kind, "json_schema": format})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::layers::memory::RequestMemory;
    use moestro_base::metrics::Metrics;

    fn request(more: Value) -> ResponsesRequest {
        let mut body = json!({"input": "Hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let common = serde_json::from_value(body.clone()).unwrap();
        ResponsesRequest { common, ..serde_json::from_value(body).unwrap() }
    }

    fn permit() -> MemoryPermit {
        RequestMemory::new(&Metrics::new("0", "cpu")).permit()
    }

    /// The chat request that these fields are translated into.
    fn chat(more: Value) -> (CommonFields, ChatRequest) {
        let mut request = request(more);
        let items = request.take_input(&ResponseStore::default(), &mut permit()).unwrap();
        request.into_chat(Vec::new(), items).unwrap()
    }

    #[test]
    fn instructions_become_the_system_message() {
        let (_, chat) = chat(json!({"instructions": "Be kind."}));
        let expected = [json!({"role": "system", "content": "Be kind."}), json!({"role": "user", "content": "Hi"})];
        assert_eq!(chat.messages, expected);
    }

    #[test]
    fn sampling_fields_are_copied() {
        let set = json!({"model": "m", "stream": true, "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 7});
        let (common, chat) = chat(set);
        assert_eq!((common.model.as_deref(), common.stream), (Some("m"), Some(true)));
        assert_eq!((common.temperature, common.top_p, chat.max_completion_tokens), (Some(0.25), Some(0.5), Some(7)));
    }

    #[test]
    fn tools_are_nested_one_level_deeper() {
        let schema = json!({"type": "object"});
        let f = json!({"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": true});
        let tools = json!({"tools": [f, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "f"}});
        let (_, chat) = chat(tools);
        let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
        assert_eq!(chat.tools.unwrap(), [json!({"type": "function", "function": function})]);
        assert_eq!(chat.tool_choice.unwrap(), json!({"type": "function", "function": {"name": "f"}}));
        let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]});
        let functions = json!([{"type": "function", "function": {"name": "f"}}]);
        assert_eq!(tool_choice(allowed).unwrap()["allowed_tools"], json!({"mode": "auto", "tools": functions}));
        assert!(tool_choice(json!({"type": "web_search"})).is_err());
    }

    #[test]
    fn schema_is_nested_one_level_deeper() {
        let format = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true});
        let expected =
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": true}});
        assert_eq!(nested_schema(format), expected);
        assert_eq!(nested_schema(json!({"type": "text"})), json!({"type": "text"}));
    }

    #[test]
    fn custom_tools_are_ignored() {
        let tools = json!({"tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]});
        assert!(request(tools).functions().unwrap().is_empty());
    }

    #[test]
    fn additional_tools_items_are_offered() {
        let function = json!({"type": "function", "name": "f"});
        let input = json!([{"type": "additional_tools", "tools": [function]}, {"role": "user", "content": "Hi"}]);
        let (_, chat) = chat(json!({"input": input, "tools": [{"type": "function", "name": "g"}]}));
        assert_eq!(chat.messages, [json!({"role": "user", "content": "Hi"})]);
        let names: Vec<_> = chat.tools.unwrap().iter().map(|tool| tool["function"]["name"].clone()).collect();
        assert_eq!(names, ["g", "f"]);
    }

    #[test]
    fn functions_in_a_namespace_are_offered() {
        let f = |name: &str| json!({"type": "function", "name": name});
        let tools = json!({"tools": [f("a"), {"type": "namespace", "name": "n", "tools": [f("b"), f("c")]}]});
        let request = request(tools);
        assert_eq!(request.namespaces(), BTreeMap::from([("b".into(), "n".into()), ("c".into(), "n".into())]));
        let offered = request.functions().unwrap();
        let names: Vec<_> = offered.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "c"]);
    }

    #[test]
    fn item_reference_is_replaced_by_the_item() {
        let store = ResponseStore::default();
        let message = json!({"id": "msg_1", "type": "message", "role": "assistant", "content": []});
        store.insert(None, Vec::new(), &json!({"id": "resp_1", "output": [message]}));
        let ask = |item: Value| request(json!({"input": [item]})).take_input(&store, &mut permit());
        assert_eq!(ask(json!({"type": "item_reference", "id": "msg_1"})).unwrap(), std::slice::from_ref(&message));
        assert_eq!(ask(json!({"id": "msg_1"})).unwrap(), [message]);
        assert_eq!(ask(json!({"type": "item_reference", "id": "msg_2"})).unwrap_err().status, 404);
    }

    #[test]
    fn repeated_references_each_count_toward_memory() {
        let (store, mut permit) = (ResponseStore::default(), permit());
        store.insert(None, Vec::new(), &json!({"id": "r", "output": [{"id": "m", "text": "x".repeat(100_000)}]}));
        let mut ask =
            |times: usize| request(json!({"input": vec![json!({"id": "m"}); times]})).take_input(&store, &mut permit);
        assert_eq!(ask(2).unwrap().len(), 2);
        assert_eq!(ask(1000).unwrap_err().status, 413);
        assert!((600_000..200_000_000).contains(&permit.bytes()), "{}", permit.bytes());
    }
}
