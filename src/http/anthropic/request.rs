//! Anthropic's request, checked and translated.

use crate::http::{
    ApiError,
    anthropic::{
        client_tools,
        message_blocks::{BLOCKS, is_search, push},
    },
    openai::{CommonFields, OneOrMany},
    quote,
    request::{
        ChatPrompt, GenerationRequest, PromptInput, RequestedFormat,
        content_parts::{MessageOrigin, new_messages},
        continue_final,
        response_format::FormatField,
        sampling_params as params, thinking,
        tools::{self, ToolChoice, without_deferral},
    },
};
use moestro_chat::{Message, Role, grammar::ContentFormat};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Start of the first system block that Claude Code sends. The block changes with every turn, so it would make the
/// prompt cache useless. The block means nothing to a model.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

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
    /// `omitted` if the answer has no text in its thinking blocks, else `summarized`.
    display: Option<String>,
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

    /// True if the answer has no text in its thinking blocks.
    pub fn omits_thinking(&self) -> bool {
        self.thinking.as_ref().is_some_and(|thinking| thinking.display.as_deref() == Some("omitted"))
    }

    pub fn into_generation(mut self, keep_billing_header: bool) -> Result<GenerationRequest, ApiError> {
        let mut prompt = self.conversation(keep_billing_header)?;
        let choice = self.tool_choice.as_ref();
        let parallel = !choice.and_then(|choice| choice.disable_parallel_tool_use).unwrap_or(false);
        let choice = choice
            .map_or(Ok(ToolChoice::Auto(None)), |choice| choice.translate(&prompt.tools, self.tools.as_deref()))?;
        prompt.forbids_calls = choice == ToolChoice::None;
        let OutputConfigFields { effort, format } = self.output_config.unwrap_or_default();
        let content = format.or(self.output_format).map(OutputFormatFields::translate).transpose()?;
        let format = RequestedFormat::new(content, &prompt.tools, &choice, parallel, tool_path);
        let common = CommonFields {
            stop: self.stop_sequences.map(OneOrMany::Many),
            user: self.metadata.and_then(|mut metadata| metadata.get_mut("user_id").map(Value::take)),
            ..self.common
        };
        common.check()?;
        let max_tokens = params::token_limit("max_tokens", common.max_tokens, 1)?;
        let budget = self.thinking.as_ref().and_then(|thinking| thinking.budget_tokens);
        let budget = params::token_count("thinking.budget_tokens", budget, 0)?;
        let effort = effort.map(|word| thinking::effort("output_config.effort", &word)).transpose()?;
        if format.is_some() {
            continue_final::check_new_message(prompt.end_marker.is_some())?;
        }
        let stops = common.stops("stop_sequences")?;
        Ok(GenerationRequest {
            max_tokens,
            format,
            thinking_budget: budget.or(effort.and_then(|effort| effort.budget)),
            parallel_tool_calls: parallel,
            ..GenerationRequest::new(common, stops, PromptInput::Chat(prompt))
        })
    }

    /// Translates the conversation.
    fn conversation(&mut self, keep_billing_header: bool) -> Result<ChatPrompt, ApiError> {
        let mut messages = Vec::new();
        if let Some(system) = self.system.take().filter(|system| !system.is_null()) {
            let is_answered = self.messages.iter().any(|message| message["role"] == "assistant");
            let text = system_text(&system, keep_billing_header, !is_answered)?;
            if !text.is_empty() {
                messages.push(Message::new(Role::System, text));
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
        let last_user = self.messages.iter().rposition(|message| message["role"] == "user");
        for (index, (message, is_new)) in self.messages.iter().zip(are_new).enumerate() {
            let ends_with_turn = message["role"] == "system" && message["clear_at"] == "next_user_message";
            if ends_with_turn && last_user > Some(index) {
                continue;
            }
            push(&mut messages, message, &format!("messages[{index}]"), is_new)?;
        }
        let continues = self.messages.last().is_some_and(|message| message["role"] == "assistant");
        let thinking = self.thinking.as_ref().map(|thinking| thinking.kind.as_str());
        if continues && thinking == Some("enabled") {
            // Anthropic's API also refuses thinking together with a continued answer.
            let text = "The answer continues the last message, which leaves no place for thinking: remove thinking, or \
                        end with a user message.";
            return Err(ApiError::invalid("thinking", text));
        }
        let tools = self.tools.iter().flatten().enumerate().map(|(index, it)| tool(it, index));
        let mut tools = tools.collect::<Result<Vec<_>, _>>()?;
        // A search that Anthropic's servers would run is not needed if the model reads all tools from the start.
        let count = tools.len();
        tools.retain(|tool| !tool.is_null());
        if tools.len() < count {
            tools.iter_mut().for_each(|tool| *tool = without_deferral(tool));
        }
        if let Some(other) = thinking.filter(|kind| !["enabled", "adaptive", "disabled"].contains(kind)) {
            return Err(ApiError::not_allowed("thinking.type", other, "`enabled`, `adaptive` or `disabled`"));
        }
        let display = self.thinking.as_ref().and_then(|thinking| thinking.display.as_deref());
        if let Some(other) = display.filter(|display| !["summarized", "omitted"].contains(display)) {
            return Err(ApiError::not_allowed("thinking.display", other, "`summarized` or `omitted`"));
        }
        let mut prompt = ChatPrompt::new(messages, continues, tools, tool_path)?;
        match thinking {
            None => prompt.default_thinking = Some(false),
            Some(kind) => prompt.set_thinking(Some(kind != "disabled")),
        }
        Ok(prompt)
    }
}

/// Path of a tool's field in Anthropic's API.
fn tool_path(index: usize, field: &str) -> String {
    format!("tools[{index}].{}", if field == "parameters" { "input_schema" } else { field })
}

impl OutputFormatFields {
    fn translate(self) -> Result<FormatField, ApiError> {
        if self.kind != "json_schema" {
            return Err(ApiError::not_allowed("output_config.format.type", &self.kind, "`json_schema`"));
        }
        let at = "output_config.format.schema";
        let missing = || ApiError::wrong_value(at, "is missing; the type `json_schema` requires it.");
        Ok((at.to_owned(), ContentFormat::Json { schema: self.schema.ok_or_else(missing)?, strict: true }))
    }
}

impl AnthropicToolChoice {
    /// Translates the choice. `tools` has the functions, and `sent` all tools of the request.
    fn translate(&self, tools: &[Value], sent: Option<&[Value]>) -> Result<ToolChoice, ApiError> {
        let at = "tool_choice.name";
        let is_ignored =
            |name: &String| sent.iter().copied().flatten().any(|it| is_search(&it["type"]) && it["name"] == **name);
        let choice = match (self.kind.as_str(), &self.name) {
            ("auto", _) => ToolChoice::Auto(None),
            ("any", _) => ToolChoice::Required(None),
            ("none", _) => ToolChoice::None,
            ("tool", Some(name)) if is_ignored(name) => {
                let text = format!(
                    "{at} is `{}`, but this server runs no tools: the model reads all tools from the start.",
                    quote(name)
                );
                return Err(ApiError::unsupported(at, text));
            }
            ("tool", Some(name)) => ToolChoice::function(&name.as_str().into(), tools, at)?,
            ("tool", None) => return Err(ApiError::wrong_value(at, "is missing; the type `tool` requires it.")),
            (other, _) => {
                return Err(ApiError::not_allowed("tool_choice.type", other, "`auto`, `any`, `tool` or `none`"));
            }
        };
        choice.with_tools(tools)
    }
}

/// The system prompt: a string, or text blocks. A billing header in the first block is dropped. After the first answer,
/// sentences replace blocks that cannot be read.
fn system_text(system: &Value, keep_billing_header: bool, is_new: bool) -> Result<String, ApiError> {
    let is_billing = |block: &Value| block["text"].as_str().is_some_and(|text| text.starts_with(BILLING_HEADER));
    match system {
        Value::Array(blocks) if !keep_billing_header && blocks.first().is_some_and(is_billing) => {
            BLOCKS.text(&Value::Array(blocks[1..].to_vec()), "system", is_new)
        }
        Value::Array(_) => BLOCKS.text(system, "system", is_new),
        other => BLOCKS.text(other, "system", true),
    }
}

/// Translates a tool that the client runs. Tools that Anthropic's servers run are refused, except for a tool search, which
/// becomes null.
fn tool(tool: &Value, index: usize) -> Result<Value, ApiError> {
    if is_search(&tool["type"]) {
        return Ok(Value::Null);
    }
    let mut function = Map::new();
    for (theirs, ours) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
        if let Some(value) = tool.get(theirs).filter(|value| !value.is_null()) {
            function.insert(ours.into(), value.clone());
        }
    }
    if let Some(Value::Object(schema)) = function.get_mut("parameters")
        && let Some(examples) = tool["input_examples"].as_array().filter(|examples| !examples.is_empty())
    {
        schema.insert("examples".into(), examples.clone().into());
    }
    let has_schema = function.contains_key("parameters");
    if let Some(kind) = tool["type"].as_str().filter(|&kind| kind != "custom" && !has_schema) {
        let Some((description, parameters)) = client_tools::definition(tool) else {
            let text = format!(
                "tools[{index}] has type `{}`, but this server runs no tools. Send tools that the client runs: with an \
                 input_schema, or `bash`, `text_editor`, `memory` or `computer` with a date.",
                quote(kind)
            );
            return Err(ApiError::unsupported(&format!("tools[{index}]"), text));
        };
        function.insert("description".into(), description.into());
        function.insert("parameters".into(), parameters);
    }
    Ok(tools::with_function(tool, function))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use test_support::with;

    fn request(body: Value) -> MessagesRequest {
        let common = serde_json::from_value(body.clone()).unwrap();
        MessagesRequest { common, ..serde_json::from_value(body).unwrap() }
    }

    /// The conversation that a body is translated into.
    fn chat(body: Value) -> ChatPrompt {
        request(body).conversation(false).unwrap()
    }

    /// The messages as a template reads them.
    fn messages(chat: &ChatPrompt) -> Vec<Value> {
        chat.messages.iter().map(|message| serde_json::to_value(message).unwrap()).collect()
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
        assert_eq!(messages(&chat), expected);
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
                {"type": "mcp_tool_listing", "mcp_server_name": "x", "tools": []},
                {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
                {"type": "compaction", "content": null},
                {"type": "compaction"},
                {"type": "text", "text": " Found."}]},
            {"role": "user", "content": "And?"},
        ]}));
        assert_eq!(messages(&chat)[1], json!({"role": "assistant", "content": "I search. Found."}));
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
        let placed = json!({"type": "image", "image": true});
        let messages = messages(&chat);
        assert_eq!(messages[0]["content"], json!([{"type": "text", "text": "x"}, placed]));
        assert_eq!(messages[2]["content"], json!([placed]));
        assert_eq!(messages[3]["content"], json!([{"type": "text", "text": "y"}, placed]));
        let images = chat.messages.iter().flat_map(Message::images);
        let found: Vec<_> = images.map(|image| (&*image.at, image.is_new)).collect();
        let expected = [
            ("messages[0].content[1]", false),
            ("messages[2].content[0].content[0]", false),
            ("messages[2].content[2]", false),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn system_messages_change_tools() {
        let user = json!({"role": "user", "content": "Hi"});
        let call = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "42"});
        let system = |content: Value| json!({"role": "system", "content": content});
        let change = |kind: &str, tool: Value| system(json!([{"type": kind, "tool": tool}]));
        let reference = json!({"type": "tool_reference", "name": "f"});
        let definition = json!({"type": "tool_definition", "definition": {"name": "f", "input_schema": {}}});
        let image = json!({"type": "image", "source": {"type": "base64", "data": "AA"}});
        let effort = json!({"role": "system", "output_config": {"effort": "low"}});
        for (message, expected) in [
            (change("tool_removal", reference.clone()), Some("[The tool `f` was removed. Do not call it]")),
            (change("tool_addition", definition), Some("[A block of type `tool_addition` is not shown")),
            (change("odd", Value::Null), Some("[A block of type `odd` is not shown")),
            (system(json!([image])), Some("[image not shown")),
            (
                change("tool_removal", json!({"type": "mcp_tool_reference", "name": "f"})),
                Some("[A block of type `tool_removal`"),
            ),
            (system(json!([])), None),
            (system(json!("")), None),
            (effort, None),
        ] {
            for head in [
                vec![&user],
                vec![
                    &user,
                    &json!({"role": "assistant", "content": [call]}),
                    &json!({"role": "user", "content": [result]}),
                ],
            ] {
                let count = head.len();
                let all: Vec<Value> = head.into_iter().chain([&message]).cloned().collect();
                let read = messages(&chat(json!({"messages": all})));
                let text = read.get(count).map(|message| message["content"].as_str().unwrap());
                assert_eq!(text.is_some(), expected.is_some(), "{message}");
                assert!(text.unwrap_or_default().starts_with(expected.unwrap_or_default()), "{text:?}");
            }
        }
        let addition = change("tool_addition", reference);
        let body = json!({"system": "s", "messages": [addition, user]});
        for body in [body, json!({"messages": [user, addition]})] {
            let chat = chat(body);
            assert_eq!(chat.messages.iter().flat_map(Message::tools).collect::<Vec<_>>(), ["f"]);
        }
        let empty = json!({"messages": [user, {"role": "system"}]});
        assert!(request(empty).conversation(false).is_err());
    }

    #[test]
    fn system_message_of_earlier_turn_is_dropped() {
        let user = json!({"role": "user", "content": "u"});
        let note = |clear: &str| json!({"role": "system", "content": "n", "clear_at": clear});
        for (clear, expected) in [("next_user_message", "uau"), ("never", "unau")] {
            let answer = json!({"role": "assistant", "content": "a"});
            let read = messages(&chat(json!({"messages": [user, note(clear), answer, user]})));
            let texts = read.iter().map(|message| message["content"].as_str().unwrap());
            assert_eq!(texts.collect::<String>(), expected);
            let read = messages(&chat(json!({"messages": [user, note(clear)]})));
            assert_eq!(read.len(), 2, "{read:?}");
        }
    }

    #[test]
    fn leading_billing_header_is_dropped() {
        let header = json!({"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"});
        let rule = json!({"type": "text", "text": "Be kind."});
        let system = |blocks: Value, keep| {
            let body = json!({"system": blocks, "messages": [{"role": "user", "content": "Hi"}]});
            let chat = request(body).conversation(keep).unwrap();
            chat.messages[0].content.as_ref().unwrap().text().unwrap().to_owned()
        };
        assert_eq!(system(json!([header, rule]), false), "Be kind.");
        assert!(system(json!([header, rule]), true).starts_with("x-anthropic-billing-header:"));
        assert!(system(json!([rule, header]), false).contains("x-anthropic-billing-header:"));
        assert!(system(header["text"].clone(), false).starts_with("x-anthropic-billing-header:"));
    }

    #[test]
    fn thinking_is_off_by_default() {
        let thinks = |thinking: Value, server: Option<bool>| {
            let body = json!({"thinking": thinking, "messages": [{"role": "user", "content": "Hi"}]});
            let mut chat = request(body).conversation(false).unwrap();
            chat.set_thinking(server.or(chat.default_thinking));
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
        let examples = json!([{"a": 1}]);
        let tool = json!({"name": "f", "description": "d", "input_schema": schema, "strict": true,
                          "cache_control": cache, "input_examples": examples});
        let ask = |choice: Value| {
            let messages = json!([{"role": "user", "content": "Hi"}]);
            request(json!({"messages": messages, "tools": [tool], "tool_choice": choice}))
        };
        let schema = with(schema, json!({"examples": examples}));
        let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
        let chat = ask(json!({"type": "auto"})).conversation(false).unwrap();
        assert_eq!(chat.tools, [json!({"type": "function", "function": function})]);
        let choice = |choice: Value| ask(choice).tool_choice.unwrap().translate(&chat.tools, None).unwrap();
        assert_eq!(choice(json!({"type": "any"})), ToolChoice::Required(None));
        assert_eq!(choice(json!({"type": "none"})), ToolChoice::None);
        assert_eq!(choice(json!({"type": "tool", "name": "f"})), ToolChoice::Required(Some(vec!["f".into()])));
        let one = ask(json!({"type": "auto", "disable_parallel_tool_use": true}));
        assert!(!one.into_generation(false).unwrap().parallel_tool_calls);
    }

    #[test]
    fn output_format_and_effort_are_translated() {
        let ask = |more: Value| {
            request(with(json!({"messages": [{"role": "user", "content": "Hi"}]}), more))
                .into_generation(false)
                .unwrap()
        };
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        for body in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
            let format = format!("{:?}", ask(body).format);
            assert!(format.contains("strict: true") && format.contains("output_config.format.schema"), "{format}");
        }
        assert_eq!(ask(json!({"output_config": {"effort": "low"}})).thinking_budget, Some(1024));
    }

    #[test]
    fn invalid_request_error_names_the_field() {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let search = json!({"type": "tool_search_tool_regex_20251119", "name": "s"});
        let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (body, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"content": "Hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "tool", "content": "Hi"}]}), "messages[0].role"),
            (json!({"messages": [messages[0], {"role": 5, "content": "x"}]}), "messages[1].role"),
            (user(json!(5)), "messages[0].content"),
            (user(json!([{"type": "audio", "source": {}}])), "messages[0].content[0]"),
            (user(json!([{"type": "text"}])), "messages[0].content[0]"),
            (json!({"messages": [{"role": "assistant", "content": "I"}], "thinking": {"type": "enabled"}}), "thinking"),
            (json!({"messages": messages, "system": 5}), "system"),
            (json!({"messages": messages, "tools": [{"type": "web_search_20250305", "name": "w"}]}), "tools[0]"),
            (json!({"messages": messages, "tool_choice": {"type": "maybe"}}), "tool_choice.type"),
            (json!({"messages": messages, "tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"messages": messages, "tool_choice": {"type": "tool", "name": "g"}}), "tool_choice.name"),
            (
                json!({"messages": messages, "tools": [search], "tool_choice": {"type": "tool", "name": "s"}}),
                "tool_choice.name",
            ),
            (json!({"messages": messages, "tools": [search], "tool_choice": {"type": "any"}}), "tool_choice"),
            (json!({"messages": messages, "thinking": {"type": "hard"}}), "thinking.type"),
            (json!({"messages": messages, "output_format": {"type": "xml"}}), "output_config.format.type"),
        ] {
            let error = request(body.clone()).into_generation(false).err().unwrap_or_else(|| panic!("{body}"));
            assert_eq!(error.body()["error"]["param"], param, "{body}");
        }
    }
}
