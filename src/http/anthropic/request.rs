//! Anthropic's request, translated into a chat request.

use crate::http::{
    ApiError,
    openai::{ChatRequest, CommonFields, JsonSchema, OneOrMany, ResponseFormat},
    request::{
        ChatPrompt, ContentBuilder, FieldNames, GenerationRequest, ImagePart, PartFormat,
        content_parts::{MessageOrigin, new_messages},
        messages, tools,
    },
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Start of the first system block that Claude Code sends. The block changes with every turn, so it would make the
/// prompt cache useless. The block means nothing to a model.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// Pairs of a field name in chat completions and the field's name in Anthropic's API, for error messages.
const NAMES: FieldNames = &[
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_budget", "thinking.budget_tokens"),
    ("stop", "stop_sequences"),
    ("].function.parameters", "].input_schema"),
    ("].function", "]"),
];

const BLOCKS: PartFormat = PartFormat { types: &["text"], separator: "\n\n" };

#[derive(Debug, Deserialize)]
pub struct MessagesRequest {
    /// The fields that have the same name in chat completions.
    #[serde(skip)]
    pub common: CommonFields,
    messages: Vec<Value>,
    system: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<AnthropicToolChoice>,
    thinking: Option<AnthropicThinking>,
    output_config: Option<OutputConfigFields>,
    /// Older name of `output_config.format`.
    output_format: Option<OutputFormatFields>,
    stop_sequences: Option<Vec<String>>,
    metadata: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct AnthropicToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct AnthropicThinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
struct OutputConfigFields {
    effort: Option<String>,
    format: Option<OutputFormatFields>,
}

#[derive(Debug, Deserialize)]
struct OutputFormatFields {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

impl MessagesRequest {
    /// True if the request asks for thinking.
    pub fn thinks(&self) -> bool {
        self.thinking.as_ref().is_some_and(|thinking| ["enabled", "adaptive"].contains(&&*thinking.kind))
    }

    pub fn into_generation(self, keep_billing_header: bool) -> Result<GenerationRequest, ApiError> {
        let (common, chat) = self.into_chat(keep_billing_header)?;
        GenerationRequest::from_chat(common, chat, NAMES)
    }

    /// Returns only the conversation, so that its tokens can be counted.
    pub fn into_prompt(self, keep_billing_header: bool) -> Result<ChatPrompt, ApiError> {
        let (_, chat) = self.into_chat(keep_billing_header)?;
        ChatPrompt::from_chat(chat).map_err(|error| error.renamed(NAMES))
    }

    fn into_chat(self, keep_billing_header: bool) -> Result<(CommonFields, ChatRequest), ApiError> {
        let mut chat = ChatMessages::default();
        if let Some(system) = self.system.filter(|system| !system.is_null()) {
            let text = system_text(&system, keep_billing_header)?;
            if !text.is_empty() {
                chat.messages.push(json!({"role": "system", "content": text}));
            }
        }
        if self.messages.is_empty() {
            return Err(ApiError::wrong_value("messages", "is empty; it must have at least one message."));
        }
        let are_new = new_messages(&self.messages, |message| match (message["role"].as_str(), &message["content"]) {
            (Some("assistant"), _) => MessageOrigin::Assistant,
            (Some("user"), Value::Array(blocks)) if blocks.iter().any(|block| block["type"] == "tool_result") => {
                MessageOrigin::Tool
            }
            (Some("user"), _) => MessageOrigin::User,
            _ => MessageOrigin::Other,
        });
        for (index, (message, is_new)) in self.messages.iter().zip(are_new).enumerate() {
            chat.push(message, &format!("messages[{index}]"), is_new)?;
        }
        let continues = self.messages.last().is_some_and(|message| message["role"] == "assistant");
        if continues && self.thinking.as_ref().is_some_and(|thinking| thinking.kind == "enabled") {
            // Anthropic's API also refuses thinking together with a continued answer.
            let text = "The answer continues the last message, which leaves no place for thinking: remove thinking, or \
                        end with a user message.";
            return Err(ApiError::invalid("thinking", text));
        }
        let tools = self.tools.unwrap_or_default();
        let tools = tools.iter().enumerate().map(|(index, it)| tool(it, index)).collect::<Result<Vec<_>, _>>()?;
        let disables_parallel = self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use);
        let thinks = match self.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            Some("enabled" | "adaptive") => true,
            None | Some("disabled") => false,
            Some(other) => {
                return Err(ApiError::not_allowed("thinking.type", other, "`enabled`, `adaptive` or `disabled`"));
            }
        };
        let OutputConfigFields { effort, format } = self.output_config.unwrap_or_default();
        let common = CommonFields {
            stop: self.stop_sequences.map(OneOrMany::Many),
            user: self.metadata.and_then(|mut metadata| metadata.get_mut("user_id").map(Value::take)),
            ..self.common
        };
        let chat = ChatRequest {
            messages: chat.messages,
            images: Some(chat.images),
            tools: (!tools.is_empty()).then_some(tools),
            tool_choice: self.tool_choice.map(AnthropicToolChoice::translate).transpose()?,
            parallel_tool_calls: disables_parallel.map(|disables| !disables),
            continue_final_message: Some(continues),
            enable_thinking: Some(thinks),
            thinking_is_default: self.thinking.is_none(),
            reasoning_effort: effort,
            response_format: format.or(self.output_format).map(OutputFormatFields::translate).transpose()?,
            thinking_budget: self.thinking.and_then(|thinking| thinking.budget_tokens),
            ..ChatRequest::default()
        };
        Ok((common, chat))
    }
}

impl OutputFormatFields {
    fn translate(self) -> Result<ResponseFormat, ApiError> {
        if self.kind != "json_schema" {
            return Err(ApiError::not_allowed("output_config.format.type", &self.kind, "`json_schema`"));
        }
        let inner = JsonSchema { schema: self.schema, strict: Some(true) };
        Ok(ResponseFormat { kind: self.kind, json_schema: Some(inner), schema: None, regex: None, lark: None })
    }
}

impl AnthropicToolChoice {
    fn translate(self) -> Result<Value, ApiError> {
        match (self.kind.as_str(), self.name) {
            ("auto", _) => Ok("auto".into()),
            ("any", _) => Ok("required".into()),
            ("none", _) => Ok("none".into()),
            ("tool", Some(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
            ("tool", None) => {
                Err(ApiError::wrong_value("tool_choice.name", "is missing; the type `tool` requires it."))
            }
            (other, _) => Err(ApiError::not_allowed("tool_choice.type", other, "`auto`, `any`, `tool` or `none`")),
        }
    }
}

/// The system prompt: a string, or text blocks. A billing header in the first block is dropped.
fn system_text(system: &Value, keep_billing_header: bool) -> Result<String, ApiError> {
    let is_billing = |block: &Value| block["text"].as_str().is_some_and(|text| text.starts_with(BILLING_HEADER));
    match system {
        Value::Array(blocks) if !keep_billing_header && blocks.first().is_some_and(is_billing) => {
            BLOCKS.text(&Value::Array(blocks[1..].to_vec()), "system", true)
        }
        other => BLOCKS.text(other, "system", true),
    }
}

/// The chat messages of a request, and the images in them.
#[derive(Default)]
struct ChatMessages {
    messages: Vec<Value>,
    images: Vec<ImagePart>,
}

impl ChatMessages {
    /// Translates one message into chat messages. A tool result becomes a separate chat message.
    fn push(&mut self, message: &Value, at: &str, is_new: bool) -> Result<(), ApiError> {
        let role = match &message["role"] {
            Value::String(role) => role.as_str(),
            Value::Null => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
            _ => return Err(ApiError::wrong_type(format!("{at}.role"), "must be a string.")),
        };
        let (content, at_content) = (&message["content"], format!("{at}.content"));
        let content = match (role, content) {
            ("user" | "system", Value::String(_)) | ("system", Value::Array(_)) => {
                BLOCKS.text(content, &at_content, is_new)?.into()
            }
            ("assistant", Value::String(_)) => content.clone(),
            ("user", Value::Array(blocks)) => return self.push_user(blocks, &at_content, is_new),
            ("assistant", Value::Array(blocks)) => return self.push_assistant(blocks, &at_content),
            ("user" | "assistant" | "system", _) => {
                return Err(ApiError::wrong_type(at_content, "must be a string or an array of blocks."));
            }
            (other, _) => {
                let problem = format!("is `{other}`; the roles are user and assistant.");
                return Err(ApiError::wrong_value(format!("{at}.role"), problem));
            }
        };
        self.messages.push(json!({"role": role, "content": content}));
        Ok(())
    }

    fn push_user(&mut self, blocks: &[Value], at: &str, is_new: bool) -> Result<(), ApiError> {
        let mut content = ContentBuilder::new(BLOCKS.separator);
        for (index, block) in blocks.iter().enumerate() {
            let at = format!("{at}[{index}]");
            if block["type"] != "tool_result" {
                BLOCKS.push(block, &at, is_new, &mut content, &mut self.images)?;
                continue;
            }
            self.flush(&mut content);
            let Some(id) = block["tool_use_id"].as_str() else {
                return Err(ApiError::wrong_type(format!("{at}.tool_use_id"), "must be a string."));
            };
            let result = match &block["content"] {
                Value::Null => "".into(),
                content => BLOCKS.content(content, &format!("{at}.content"), false, &mut self.images)?,
            };
            self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
        }
        self.flush(&mut content);
        Ok(())
    }

    /// Appends `content` as a user message, unless it is empty.
    fn flush(&mut self, content: &mut ContentBuilder) {
        if !content.is_empty() {
            let content = std::mem::replace(content, ContentBuilder::new(BLOCKS.separator)).finish();
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }

    fn push_assistant(&mut self, blocks: &[Value], at: &str) -> Result<(), ApiError> {
        let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for (index, block) in blocks.iter().enumerate() {
            let at = format!("{at}[{index}]");
            match block["type"].as_str() {
                Some("thinking") => reasoning += block["thinking"].as_str().unwrap_or_default(),
                // The block is encrypted. Only Anthropic can read the text.
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    let (Some(name), Value::Object(input)) = (block["name"].as_str(), &block["input"]) else {
                        return Err(ApiError::wrong_type(at, "must have a name and an input, which is an object."));
                    };
                    let function = json!({"name": name, "arguments": input});
                    calls.push(json!({"id": block["id"], "type": "function", "function": function}));
                }
                Some(kind) if is_server_call(kind) => {}
                _ => content += &BLOCKS.part_text(block, &at, false)?,
            }
        }
        self.messages.push(messages::assistant(content, reasoning, calls));
        Ok(())
    }
}

/// True for calls and results of tools that Anthropic's servers ran. They are left out, because the text after them says
/// what was found.
fn is_server_call(kind: &str) -> bool {
    kind == "server_tool_use" || kind == "mcp_tool_use" || kind.ends_with("_tool_result")
}

/// Translates a tool that the client runs. Tools that Anthropic's servers run have other types and are refused.
fn tool(tool: &Value, index: usize) -> Result<Value, ApiError> {
    if let Some(kind) = tool["type"].as_str().filter(|&kind| kind != "custom") {
        let text =
            format!("tools[{index}] has type `{kind}`, which this server cannot run; send tools with an input_schema.");
        return Err(ApiError::unsupported(&format!("tools[{index}]"), text));
    }
    let mut function = Map::new();
    for (theirs, ours) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
        if let Some(value) = tool.get(theirs).filter(|value| !value.is_null()) {
            function.insert(ours.into(), value.clone());
        }
    }
    tools::copy_strict(tool, &mut function);
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: Value) -> MessagesRequest {
        let common = serde_json::from_value(body.clone()).unwrap();
        MessagesRequest { common, ..serde_json::from_value(body).unwrap() }
    }

    /// The chat request that a body is translated into.
    fn chat(body: Value) -> ChatRequest {
        request(body).into_chat(false).unwrap().1
    }

    #[test]
    fn blocks_become_chat_messages() {
        let call = json!({"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}});
        let result = json!({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]});
        let chat = chat(json!({
            "max_tokens": 5,
            "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Well"}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "Go on"}, {"type": "text", "text": "please"}]},
            ],
        }));
        let calls = json!([{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
        let expected = [
            json!({"role": "system", "content": "One.\n\nTwo."}),
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "Well", "reasoning_content": "hm", "tool_calls": calls}),
            json!({"role": "tool", "tool_call_id": "t1", "content": "42"}),
            json!({"role": "user", "content": "Go on\n\nplease"}),
        ];
        assert_eq!(chat.messages, expected);
    }

    #[test]
    fn calls_of_server_tools_are_left_out() {
        let chat = chat(json!({"messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I search."},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "x", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
                {"type": "text", "text": " Found."}]},
            {"role": "user", "content": "And?"},
        ]}));
        assert_eq!(chat.messages[1], json!({"role": "assistant", "content": "I search. Found."}));
    }

    #[test]
    fn images_are_collected_from_messages_and_results() {
        let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}});
        let call = json!({"type": "tool_use", "id": "t", "name": "Read", "input": {}});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [image]});
        let chat = chat(json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}, image]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "y"}, image]},
        ]}));
        let placed = |index: usize| json!({"type": "image", "image": index});
        assert_eq!(chat.messages[0]["content"], json!([{"type": "text", "text": "x"}, placed(0)]));
        assert_eq!(chat.messages[2]["content"], json!([placed(1)]));
        assert_eq!(chat.messages[3]["content"], json!([{"type": "text", "text": "y"}, placed(2)]));
        let images = chat.images.unwrap();
        let found: Vec<_> = images.iter().map(|image| (&*image.at, image.is_new)).collect();
        let expected = [
            ("messages[0].content[1]", false),
            ("messages[2].content[0].content[0]", false),
            ("messages[2].content[2]", false),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn leading_billing_header_is_dropped() {
        let header = json!({"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"});
        let rule = json!({"type": "text", "text": "Be kind."});
        let system = |blocks: Value, keep| {
            let body = json!({"system": blocks, "messages": [{"role": "user", "content": "Hi"}]});
            request(body).into_chat(keep).unwrap().1.messages[0]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(system(json!([header, rule]), false), "Be kind.");
        assert!(system(json!([header, rule]), true).starts_with("x-anthropic-billing-header:"));
        assert!(system(json!([rule, header]), false).contains("x-anthropic-billing-header:"));
        assert!(system(header["text"].clone(), false).starts_with("x-anthropic-billing-header:"));
    }

    #[test]
    fn thinking_is_off_by_default() {
        let thinks = |thinking: Value, server| {
            let body = json!({"thinking": thinking, "messages": [{"role": "user", "content": "Hi"}]});
            let mut chat = request(body).into_prompt(false).unwrap();
            chat.apply_server_thinking(server);
            chat.kwargs["enable_thinking"].as_bool()
        };
        assert_eq!(thinks(Value::Null, None), Some(false));
        assert_eq!(thinks(Value::Null, Some(true)), Some(true));
        assert_eq!(thinks(json!({"type": "enabled", "budget_tokens": 1024}), None), Some(true));
        assert_eq!(thinks(json!({"type": "disabled"}), Some(true)), Some(false));
    }

    #[test]
    fn tools_and_tool_choice_are_translated() {
        let schema = json!({"type": "object"});
        let cache = json!({"type": "ephemeral"});
        let tool = json!({"name": "f", "description": "d", "input_schema": schema, "strict": true,
                          "cache_control": cache});
        let ask = |choice: Value| {
            let messages = json!([{"role": "user", "content": "Hi"}]);
            chat(json!({"messages": messages, "tools": [tool], "tool_choice": choice}))
        };
        let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
        assert_eq!(ask(json!({"type": "auto"})).tools.unwrap(), [json!({"type": "function", "function": function})]);
        assert_eq!(ask(json!({"type": "any"})).tool_choice.unwrap(), "required");
        assert_eq!(ask(json!({"type": "none"})).tool_choice.unwrap(), "none");
        assert_eq!(ask(json!({"type": "tool", "name": "f"})).tool_choice.unwrap()["function"]["name"], "f");
        let one = json!({"type": "auto", "disable_parallel_tool_use": true});
        assert_eq!(ask(one).parallel_tool_calls, Some(false));
    }

    #[test]
    fn output_format_and_effort_are_translated() {
        let ask = |more: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            chat(body)
        };
        let schema = json!({"type": "object"});
        let format = json!({"type": "json_schema", "schema": schema});
        for body in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
            let inner = ask(body).response_format.unwrap().json_schema.unwrap();
            assert_eq!((inner.schema, inner.strict), (Some(schema.clone()), Some(true)));
        }
        assert_eq!(ask(json!({"output_config": {"effort": "low"}})).reasoning_effort.unwrap(), "low");
    }

    #[test]
    fn invalid_request_error_names_the_field() {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let with = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (body, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"content": "Hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "tool", "content": "Hi"}]}), "messages[0].role"),
            (with(json!(5)), "messages[0].content"),
            (with(json!([{"type": "audio", "source": {}}])), "messages[0].content[0]"),
            (with(json!([{"type": "text"}])), "messages[0].content[0]"),
            (with(json!([{"type": "tool_result", "content": "x"}])), "messages[0].content[0].tool_use_id"),
            (json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}), "messages[0].content[0]"),
            (json!({"messages": [{"role": "assistant", "content": "I"}], "thinking": {"type": "enabled"}}), "thinking"),
            (json!({"messages": messages, "system": 5}), "system"),
            (json!({"messages": messages, "tools": [{"type": "web_search_20250305", "name": "w"}]}), "tools[0]"),
            (json!({"messages": messages, "tool_choice": {"type": "maybe"}}), "tool_choice.type"),
            (json!({"messages": messages, "tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"messages": messages, "thinking": {"type": "hard"}}), "thinking.type"),
            (json!({"messages": messages, "output_format": {"type": "xml"}}), "output_config.format.type"),
        ] {
            let error = request(body.clone()).into_generation(false).err().unwrap_or_else(|| panic!("{body}"));
            assert_eq!(error.body()["error"]["param"], param, "{body}");
        }
    }

    #[test]
    fn sampling_fields_are_copied() {
        let body = json!({
            "max_tokens": 7, "model": "m", "stream": true, "temperature": 0.25, "top_p": 0.5, "top_k": 9, "stop_sequences": ["x"],
            "messages": [{"role": "user", "content": "Hi"}],
        });
        let (common, _) = request(body).into_chat(false).unwrap();
        assert_eq!((common.model.as_deref(), common.stream, common.max_tokens), (Some("m"), Some(true), Some(7)));
        assert_eq!((common.temperature, common.top_p, common.top_k), (Some(0.25), Some(0.5), Some(9)));
    }

    #[test]
    fn invalid_role_error_names_the_message() {
        for (message, reason) in
            [(json!({"content": "x"}), "has no role"), (json!({"role": 5, "content": "x"}), "must be a string")]
        {
            let body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}, message]});
            let error = request(body).into_generation(false).unwrap_err();
            let body = error.body();
            assert_eq!(body["error"]["param"], "messages[1].role");
            assert!(body["error"]["message"].as_str().unwrap().contains(reason), "{body}");
        }
    }
}
