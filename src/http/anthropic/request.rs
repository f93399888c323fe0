//! Anthropic's request, made into a conversation.

use crate::http::{
    errors::ApiError,
    openai::types::{ChatRequest, Common, JsonSchema, OneOrMany, ResponseFormat},
    request::conversation::{Conversation, assistant as message},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Claude Code's line before its system prompt. It changes with every turn, so nothing after it could be reused, and
/// it means nothing to a model.
const BILLING: &str = "x-anthropic-billing-header:";

/// Names of chat completions' fields, and Anthropic's.
const NAMES: &[(&str, &str)] = &[
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_budget", "thinking.budget_tokens"),
    ("stop", "stop_sequences"),
    ("].function.parameters", "].input_schema"),
    ("].function", "]"),
];

/// Between two blocks of text that a client sent apart.
const BETWEEN: &str = "\n\n";

#[derive(Debug, Deserialize)]
pub struct MessagesRequest {
    model: Option<String>,
    messages: Vec<Value>,
    pub max_tokens: Option<i64>,
    system: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<ToolChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// The older place of `output_config.format`.
    output_format: Option<Format>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    /// A stream says how far the prompt is.
    return_progress: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<Format>,
}

#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

impl MessagesRequest {
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub fn tells_progress(&self) -> bool {
        self.return_progress.unwrap_or(false)
    }

    /// The conversation that is meant. `thinking` is what the server was told to do where a request does not say.
    pub fn conversation(self, keep_billing_header: bool, thinking: Option<bool>) -> Result<Conversation, ApiError> {
        let mut messages = Vec::with_capacity(self.messages.len() + 1);
        if let Some(system) = self.system.filter(|system| !system.is_null()) {
            let text = system_text(&system, keep_billing_header)?;
            if !text.is_empty() {
                messages.push(json!({"role": "system", "content": text}));
            }
        }
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "messages is empty; there must be at least one."));
        }
        for (index, message) in self.messages.iter().enumerate() {
            translate(message, &format!("messages[{index}]"), &mut messages)?;
        }
        let goes_on = self.messages.last().is_some_and(|message| message["role"] == "assistant");
        if goes_on && self.thinking.as_ref().is_some_and(|thinking| thinking.kind == "enabled") {
            // Anthropic's rule, too.
            let text = "The answer goes on from the last message, so there is no place to think: set thinking aside.";
            return Err(ApiError::invalid("thinking", text));
        }
        let tools = self.tools.unwrap_or_default();
        let tools = tools.iter().enumerate().map(|(index, it)| tool(it, index)).collect::<Result<Vec<_>, _>>()?;
        let parallel = self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use).map(|not| !not);
        let thinks = match self.thinking.as_ref().map(|thinking| thinking.kind.as_str()) {
            None => thinking.unwrap_or(false),
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            Some(other) => {
                let text = format!("thinking.type is `{other}`; it must be `enabled`, `adaptive` or `disabled`.");
                return Err(ApiError::invalid("thinking.type", text));
            }
        };
        let OutputConfig { effort, format } = self.output_config.unwrap_or_default();
        let common = Common {
            model: self.model,
            stream: self.stream,
            max_tokens: self.max_tokens,
            stop: self.stop_sequences.map(OneOrMany::Many),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            ..Common::default()
        };
        let chat = ChatRequest {
            messages,
            tools: (!tools.is_empty()).then_some(tools),
            tool_choice: self.tool_choice.map(ToolChoice::translate).transpose()?,
            parallel_tool_calls: parallel,
            continue_final_message: Some(goes_on),
            enable_thinking: Some(thinks),
            reasoning_effort: effort,
            response_format: format.or(self.output_format).map(Format::translate).transpose()?,
            thinking_budget: self.thinking.and_then(|thinking| thinking.budget_tokens),
            ..ChatRequest::default()
        };
        Ok(Conversation { common, chat, names: NAMES })
    }
}

impl Format {
    fn translate(self) -> Result<ResponseFormat, ApiError> {
        if self.kind != "json_schema" {
            let text = format!("output_config.format.type is `{}`; it must be `json_schema`.", self.kind);
            return Err(ApiError::invalid("output_config.format.type", text));
        }
        let inner = JsonSchema { schema: self.schema, strict: Some(true) };
        Ok(ResponseFormat { kind: self.kind, json_schema: Some(inner), schema: None, regex: None, lark: None })
    }
}

impl ToolChoice {
    fn translate(self) -> Result<Value, ApiError> {
        match (self.kind.as_str(), self.name) {
            ("auto", _) => Ok("auto".into()),
            ("any", _) => Ok("required".into()),
            ("none", _) => Ok("none".into()),
            ("tool", Some(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
            ("tool", None) => Err(ApiError::invalid("tool_choice.name", "tool_choice of type `tool` needs a name.")),
            (other, _) => {
                let text = format!("tool_choice.type is `{other}`; it must be `auto`, `any`, `tool` or `none`.");
                Err(ApiError::invalid("tool_choice.type", text))
            }
        }
    }
}

/// The system prompt: a string, or blocks of text. A first block that is a billing header is left out, and nothing else.
fn system_text(system: &Value, keep_billing_header: bool) -> Result<String, ApiError> {
    let billed = |block: &Value| block["text"].as_str().is_some_and(|text| text.starts_with(BILLING));
    match system {
        Value::Array(blocks) if !keep_billing_header && blocks.first().is_some_and(billed) => {
            text(&Value::Array(blocks[1..].to_vec()), "system")
        }
        other => text(other, "system"),
    }
}

/// A string, or the text of blocks.
fn text(content: &Value, at: &str) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().enumerate().map(|(index, block)| block_text(block, &format!("{at}[{index}]")));
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join(BETWEEN))
        }
        _ => Err(ApiError::json(Some(at.into()), format!("{at} must be a string or an array of blocks."))),
    }
}

fn block_text(block: &Value, at: &str) -> Result<String, ApiError> {
    let plain = block["type"] == "document" && block["source"]["type"] == "text";
    let text = if plain { &block["source"]["data"] } else { &block["text"] };
    match (block["type"].as_str(), text) {
        (Some("text" | "document"), Value::String(text)) => Ok(text.clone()),
        (Some("text") | None, _) => {
            let text = format!("{at} must be {{\"type\": \"text\", \"text\": ...}}.");
            Err(ApiError::json(Some(at.into()), text))
        }
        (Some(kind), _) => {
            let text = format!("{at} is of type `{kind}`; this server reads text only.");
            Err(ApiError::unsupported(at, text))
        }
    }
}

/// One message of Anthropic's, as the chat messages that it stands for: a tool's result is a message of its own there.
fn translate(message: &Value, at: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = match &message["role"] {
        Value::String(role) => role.as_str(),
        Value::Null => return Err(ApiError::invalid(format!("{at}.role"), format!("{at} has no role."))),
        _ => return Err(ApiError::json(Some(format!("{at}.role")), format!("{at}.role must be a string."))),
    };
    let content = &message["content"];
    let at_content = format!("{at}.content");
    match (role, content) {
        ("user" | "system", Value::String(_)) | ("system", Value::Array(_)) => {
            out.push(json!({"role": role, "content": text(content, &at_content)?}));
            Ok(())
        }
        ("assistant", Value::String(_)) => {
            out.push(json!({"role": role, "content": content}));
            Ok(())
        }
        ("user", Value::Array(blocks)) => user(blocks, &at_content, out),
        ("assistant", Value::Array(blocks)) => assistant(blocks, &at_content, out),
        ("user" | "assistant" | "system", _) => {
            let text = format!("{at_content} must be a string or an array of blocks.");
            Err(ApiError::json(Some(at_content), text))
        }
        (other, _) => {
            let text = format!("{at}.role is `{other}`; the roles are user and assistant.");
            Err(ApiError::invalid(format!("{at}.role"), text))
        }
    }
}

fn user(blocks: &[Value], at: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut texts: Vec<String> = Vec::new();
    let say = |texts: &mut Vec<String>, out: &mut Vec<Value>| {
        if !texts.is_empty() {
            out.push(json!({"role": "user", "content": texts.join(BETWEEN)}));
            texts.clear();
        }
    };
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if block["type"] != "tool_result" {
            texts.push(block_text(block, &at)?);
            continue;
        }
        say(&mut texts, out);
        let Some(id) = block["tool_use_id"].as_str() else {
            let text = format!("{at}.tool_use_id must be a string.");
            return Err(ApiError::json(Some(format!("{at}.tool_use_id")), text));
        };
        let result = match &block["content"] {
            Value::Null => String::new(),
            content => text(content, &format!("{at}.content"))?,
        };
        out.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
    }
    say(&mut texts, out);
    Ok(())
}

fn assistant(blocks: &[Value], at: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match block["type"].as_str() {
            Some("thinking") => reasoning += block["thinking"].as_str().unwrap_or_default(),
            // Only Anthropic can read it.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let (Some(name), Value::Object(input)) = (block["name"].as_str(), &block["input"]) else {
                    return Err(ApiError::json(
                        Some(at.clone()),
                        format!("{at} needs a name and an input, an object."),
                    ));
                };
                let function = json!({"name": name, "arguments": input});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            _ => content += &block_text(block, &at)?,
        }
    }
    out.push(message(content, reasoning, calls));
    Ok(())
}

/// A tool that the client runs. Those that Anthropic's servers run have a `type` of their own, and nobody here to run them.
fn tool(tool: &Value, index: usize) -> Result<Value, ApiError> {
    if let Some(kind) = tool["type"].as_str().filter(|&kind| kind != "custom") {
        let text =
            format!("tools[{index}] is of type `{kind}`, which this server cannot run; give tools an input_schema.");
        return Err(ApiError::unsupported(&format!("tools[{index}]"), text));
    }
    let mut function = Map::new();
    for (theirs, ours) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
        if let Some(value) = tool.get(theirs).filter(|value| !value.is_null()) {
            function.insert(ours.into(), value.clone());
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
