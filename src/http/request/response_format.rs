//! The format that an answer must have, from `response_format`, from the fields of vLLM and llama-server for the same
//! purpose, and from `tool_choice`. All of these fields become one [`OutputFormat`], which is compiled outside the
//! async threads.

use crate::error::bounded;
use crate::http::{
    ApiError,
    layers::MemoryPermit,
    openai::{ChatRequest, ResponseFormat},
    quote,
    request::{
        fields::LARK_ONLY,
        tools::{ToolChoice, ToolPath, is_defined},
    },
};
use moestro_chat::grammar::{
    AllowedTools, CancelFlag, ContentFormat, ExactCalls, FormatError, GrammarCompiler, NextTokens, OutputFormat,
    TokenConstraint, any_object,
};
use moestro_engine::{Constraint, TokenMask};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::oneshot, time::timeout};

/// Maximum time that a format waits for its turn, and maximum time that a format is compiled. A compilation can stop
/// only between two parts, so the client may get the error before the compilation stops.
const COMPILE_TIME: Duration = Duration::from_secs(5);

/// Bytes of memory set aside while a format is compiled.
const COMPILE_BYTES: usize = 8 << 20;
/// Maximum number of bytes of what is wrong with a schema, in an error. A text of the schema may be part of it.
const MAX_REASON: usize = 200;

/// A format of the content, and the path of the request field that asks for it.
pub type FormatField = (String, ContentFormat);

/// A format, and the path of the request field that asks for this format.
#[derive(Debug)]
pub struct RequestedFormat {
    format: OutputFormat,
    field: String,
    tool_path: ToolPath,
}

impl RequestedFormat {
    /// The format that a request asks for. `None` if any text and any call is allowed. `tool_path` names fields of tools
    /// in errors.
    pub fn new(
        content: Option<FormatField>,
        tools: &[Value],
        choice: &ToolChoice,
        parallel: bool,
        tool_path: ToolPath,
    ) -> Option<Self> {
        let (field, content) = content.unwrap_or_default();
        let has_strict_tool = tools.iter().any(|tool| is_defined(tool) && tool["function"]["strict"] == true);
        let (content, tools) = match choice {
            ToolChoice::None if content == ContentFormat::Text => return None,
            ToolChoice::None => (content, Vec::new()),
            ToolChoice::Required(names) => (ContentFormat::Nothing, named(tools, names.as_deref())),
            ToolChoice::Auto(None) if content == ContentFormat::Text && !has_strict_tool => return None,
            ToolChoice::Auto(names) => (content, named(tools, names.as_deref())),
        };
        let is_only_tools = matches!(content, ContentFormat::Text | ContentFormat::Nothing);
        let field = if is_only_tools { "tools".into() } else { field };
        let tools = (!tools.is_empty()).then_some(AllowedTools { tools, parallel });
        Some(Self { format: OutputFormat { content, tools }, field, tool_path })
    }

    /// The calls of tools that are constrained.
    pub fn exact_calls(&self) -> ExactCalls {
        self.format.exact_calls()
    }
}

/// The tools with these names, and their indices. `names` is `None` for all tools that the prompt defines.
fn named(tools: &[Value], names: Option<&[String]>) -> Vec<(usize, Value)> {
    let names: Option<BTreeSet<&str>> = names.map(|names| names.iter().map(String::as_str).collect());
    let is_named = |tool: &Value| match &names {
        Some(names) => tool["function"]["name"].as_str().is_some_and(|name| names.contains(name)),
        None => is_defined(tool),
    };
    tools.iter().enumerate().filter(|(_, tool)| is_named(tool)).map(|(index, tool)| (index, tool.clone())).collect()
}

/// The format of the content that a chat request asks for. Two fields for a format are an error.
pub fn requested(request: &ChatRequest) -> Result<Option<FormatField>, ApiError> {
    let mut found = Vec::new();
    if let Some(format) = &request.response_format {
        found.extend(from_response_format(format, "response_format", "json_schema.schema")?);
    }
    let ChatRequest { guided_json, guided_regex, guided_choice, .. } = request;
    let guided = [guided_json.as_ref(), guided_regex.as_ref(), guided_choice.as_ref()];
    add_guided(&mut found, "guided_", guided)?;
    add_guided(&mut found, "", [None, request.regex.as_ref(), None])?;
    if let Some(outputs) = request.structured_outputs.as_ref().filter(|outputs| !outputs.is_null()) {
        for (key, value) in outputs.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "json" | "regex" | "choice" => {}
                "json_object" if *value == false => {}
                "json_object" => found.push(("structured_outputs.json_object".into(), strict_json(&any_object()))),
                other => {
                    let at = format!("structured_outputs.{other}");
                    let hint = if other == "grammar" { format!(": {LARK_ONLY}") } else { ".".into() };
                    return Err(ApiError::unsupported(&at, format!("{} is not supported{hint}", quote(&at))));
                }
            }
        }
        let guided = ["json", "regex", "choice"].map(|key| outputs.get(key));
        add_guided(&mut found, "structured_outputs.", guided)?;
    }
    if let Some(schema) = request.json_schema.as_ref().filter(|schema| !schema.is_null()) {
        found.push(("json_schema".into(), strict_json(schema)));
    }
    if let [(first, _), (second, _), ..] = &*found {
        let message = format!("{first} and {second} both set the format of the answer; send only one of them.");
        return Err(ApiError::invalid(second, message));
    }
    Ok(found.pop())
}

fn strict_json(schema: &Value) -> ContentFormat {
    ContentFormat::Json { schema: schema.clone(), strict: true }
}

/// Adds the formats of vLLM's fields for a JSON schema, a regular expression and a choice of strings.
fn add_guided(
    found: &mut Vec<(String, ContentFormat)>,
    prefix: &str,
    fields: [Option<&Value>; 3],
) -> Result<(), ApiError> {
    let [schema, regex, choice] = fields.map(|value| value.filter(|value| !value.is_null()));
    if let Some(schema) = schema {
        let at = format!("{prefix}json");
        let parsed = schema.as_str().map(serde_json::from_str).transpose();
        let parsed = parsed.map_err(|e| ApiError::wrong_value(&at, format!("is not valid JSON: {e}")))?;
        found.push((at, strict_json(parsed.as_ref().unwrap_or(schema))));
    }
    if let Some(regex) = regex {
        let at = format!("{prefix}regex");
        let Some(regex) = regex.as_str() else {
            return Err(ApiError::wrong_type(at, "must be a string."));
        };
        found.push((at, ContentFormat::Regex(regex.to_owned())));
    }
    if let Some(choice) = choice {
        let at = format!("{prefix}choice");
        let words = choice.as_array().filter(|words| !words.is_empty() && words.iter().all(Value::is_string));
        let Some(words) = words else {
            return Err(ApiError::wrong_type(at, "must be a non-empty array of strings."));
        };
        let words: Vec<String> = words.iter().filter(|word| **word != "").map(Value::to_string).collect();
        found.push((at, ContentFormat::Lark(format!("start: {}", words.join(" | ")))));
    }
    Ok(())
}

/// Reads the format in the field `at`. `schema_key` is the path of a schema in it. Returns `None` for the type `text`.
pub fn from_response_format(
    format: &ResponseFormat,
    at: &str,
    schema_key: &str,
) -> Result<Option<FormatField>, ApiError> {
    let missing = |key: &str| {
        ApiError::wrong_value(format!("{at}.{key}"), format!("is missing; the type `{}` requires it.", format.kind))
    };
    let (key, content) = match format.kind.as_str() {
        "text" => return Ok(None),
        // llama-server accepts a schema together with this type.
        "json_object" => match &format.schema {
            None => ("type", strict_json(&any_object())),
            Some(schema) => ("schema", strict_json(schema)),
        },
        "json_schema" => {
            let inner = format.json_schema.as_ref().ok_or_else(|| missing("json_schema"))?;
            let schema = inner.schema.clone().ok_or_else(|| missing(schema_key))?;
            (schema_key, ContentFormat::Json { schema, strict: inner.strict.unwrap_or(false) })
        }
        "regex" => ("regex", ContentFormat::Regex(format.regex.clone().ok_or_else(|| missing("regex"))?)),
        "lark" => ("lark", ContentFormat::Lark(format.lark.clone().ok_or_else(|| missing("lark"))?)),
        other => {
            let kinds = "text, json_object, json_schema, regex and lark";
            return Err(ApiError::wrong_value(
                format!("{at}.type"),
                format!("is `{}`; the types are {kinds}.", quote(other)),
            ));
        }
    };
    Ok(Some((format!("{at}.{key}"), content)))
}

/// Compiles the format and the limit of `budget` reasoning tokens to a constraint for the sampler. Returns `None` if
/// there is nothing to constrain.
pub async fn compile(
    grammars: Arc<GrammarCompiler>,
    permit: &MemoryPermit,
    requested: Option<RequestedFormat>,
    has_tools: bool,
    in_reasoning: bool,
    budget: Option<usize>,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    let guide = match (requested, budget) {
        (None, None) => return Ok(None),
        (None, Some(budget)) => grammars.reasoning_budget(has_tools, budget),
        (Some(RequestedFormat { format, field, tool_path }), budget) => {
            let guide = compiled(grammars, permit, format, in_reasoning, budget).await?;
            guide.map_err(|error| refuse(&field, tool_path, error))?
        }
    };
    Ok(Some(Box::new(GrammarConstraint(guide))))
}

/// Compiles a format when its turn comes. If the client disconnects, the compilation stops before the next part.
async fn compiled(
    grammars: Arc<GrammarCompiler>,
    permit: &MemoryPermit,
    format: OutputFormat,
    in_reasoning: bool,
    budget: Option<usize>,
) -> Result<Result<TokenConstraint, FormatError>, ApiError> {
    let (sender, started) = oneshot::channel();
    let cancel = CancelOnDrop::default();
    let flag = cancel.0.clone();
    let compile = move || {
        let _ = sender.send(());
        let compile = || grammars.compile(&flag, &format, in_reasoning, budget);
        catch_unwind(AssertUnwindSafe(compile))
            .unwrap_or_else(|_| Err(FormatError::new("", "the compiler failed on it")))
    };
    let compiled = permit.run_compilation(COMPILE_BYTES, compile);
    let too_slow = async {
        let has_started = matches!(timeout(COMPILE_TIME, started).await, Ok(Ok(())));
        if has_started {
            tokio::time::sleep(COMPILE_TIME).await;
        }
        has_started
    };
    tokio::select! {
        compiled = compiled => compiled,
        has_started = too_slow => match has_started {
            false => Err(ApiError::compiler_busy()),
            true => {
                let seconds = COMPILE_TIME.as_secs();
                let reason = format!("it takes longer than {seconds} s to compile; use fewer properties, tools or alternatives");
                Ok(Err(FormatError::new("", reason)))
            }
        },
    }
}

/// Cancels a compilation when this value is dropped.
#[derive(Default)]
struct CancelOnDrop(CancelFlag);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

fn refuse(field: &str, tool_path: ToolPath, error: FormatError) -> ApiError {
    let at = match error.tool {
        Some(index) => tool_path(index, "parameters") + &error.path,
        None => format!("{field}{}", error.path),
    };
    ApiError::invalid(&at, format!("{}: {}", quote(&at), bounded(&error.reason, MAX_REASON)))
}

/// Connects a token constraint to the engine's sampler.
struct GrammarConstraint(TokenConstraint);

impl Constraint for GrammarConstraint {
    fn allowed(&mut self) -> Result<TokenMask, String> {
        Ok(match self.0.allowed()? {
            NextTokens::Any => TokenMask::Any,
            NextTokens::Only(words) => TokenMask::Only(words),
        })
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.0.accept(id)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::tools::chat_path;
    use serde_json::json;
    use test_support::with;

    fn requested_format(fields: Value) -> Result<Option<OutputFormat>, ApiError> {
        let request: ChatRequest = serde_json::from_value(with(fields, json!({"messages": []}))).unwrap();
        let content = requested(&request)?;
        let tools = request.tools.unwrap_or_default();
        let choice = ToolChoice::parse(request.tool_choice.as_ref(), &tools)?;
        let parallel = request.parallel_tool_calls.unwrap_or(true);
        let requested = RequestedFormat::new(content, &tools, &choice, parallel, chat_path);
        Ok(requested.map(|requested| requested.format))
    }

    fn format(fields: Value) -> Option<OutputFormat> {
        requested_format(fields).unwrap()
    }

    /// The field that the error of a request with these fields names.
    fn error_param(fields: Value) -> Value {
        let error = requested_format(fields).unwrap_err();
        assert_eq!(error.status, 400);
        error.body()["error"]["param"].clone()
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    /// A request with three tools and with the fields in `more`.
    fn with_tools(more: Value) -> Value {
        with(json!({"tools": [tool("f"), tool("g"), tool("h")]}), more)
    }

    /// Names of the tools that a format allows.
    fn tool_names(format: &OutputFormat) -> Vec<&str> {
        let tools = format.tools.iter().flat_map(|allowed| &allowed.tools);
        tools.map(|(_, tool)| tool["function"]["name"].as_str().unwrap()).collect()
    }

    #[test]
    fn every_schema_field_sets_the_format() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let named = |inner: Value| json!({"response_format": {"type": "json_schema", "json_schema": inner}});
        for (fields, strict) in [
            (named(json!({"name": "x", "schema": schema})), false),
            (named(json!({"name": "x", "schema": schema, "strict": true})), true),
            (json!({"response_format": {"type": "json_object", "schema": schema}}), true),
            (json!({"guided_json": schema}), true),
            (json!({"guided_json": schema.to_string()}), true),
            (json!({"structured_outputs": {"json": schema, "regex": null}}), true),
            (json!({"json_schema": schema, "guided_regex": null}), true),
        ] {
            let content = ContentFormat::Json { schema: schema.clone(), strict };
            assert_eq!(format(fields.clone()), Some(OutputFormat { content, tools: None }), "{fields}");
        }
        let any = ContentFormat::Json { schema: any_object(), strict: true };
        assert_eq!(format(json!({"response_format": {"type": "json_object"}})).unwrap().content, any);
        assert_eq!(format(json!({"structured_outputs": {"json_object": true}})).unwrap().content, any);
        let regex = ContentFormat::Regex("a+".into());
        assert_eq!(format(json!({"guided_regex": "a+"})).unwrap().content, regex);
        assert_eq!(format(json!({"response_format": {"type": "regex", "regex": "a+"}})).unwrap().content, regex);
        let choice = ContentFormat::Lark("start: \"a\" | \"b\\\"\"".into());
        assert_eq!(format(json!({"guided_choice": ["a", "b\""]})).unwrap().content, choice);
        let lark = format(json!({"response_format": {"type": "lark", "lark": "start: \"x\""}})).unwrap().content;
        assert_eq!(lark, ContentFormat::Lark("start: \"x\"".into()));
        for none in [json!({}), json!({"response_format": {"type": "text"}}), json!({"response_format": null})] {
            assert_eq!(format(none), None);
        }
    }

    #[test]
    fn tool_choice_sets_the_format() {
        for free in
            [json!({}), json!({"tool_choice": "auto"}), json!({"tool_choice": "none"}), json!({"tool_choice": null})]
        {
            assert_eq!(format(with_tools(free)), None);
        }
        let required = format(with_tools(json!({"tool_choice": "required"}))).unwrap();
        assert_eq!((tool_names(&required), &required.content), (vec!["f", "g", "h"], &ContentFormat::Nothing));
        assert!(required.tools.unwrap().parallel);
        let one = format(with_tools(json!({"tool_choice": tool("g"), "parallel_tool_calls": false}))).unwrap();
        assert_eq!((tool_names(&one), &one.content), (vec!["g"], &ContentFormat::Nothing));
        assert!(!one.tools.unwrap().parallel);
        for (mode, content) in [("auto", ContentFormat::Text), ("required", ContentFormat::Nothing)] {
            let allowed = json!({"mode": mode, "tools": [tool("f"), tool("h")]});
            let fields = with_tools(json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}));
            let two = format(fields).unwrap();
            assert_eq!((tool_names(&two), &two.content), (vec!["f", "h"], &content));
        }
        // With a schema and tools, the answer may be JSON or a call.
        let either = format(with_tools(json!({"response_format": {"type": "json_object"}}))).unwrap();
        assert!(tool_names(&either).len() == 3 && matches!(either.content, ContentFormat::Json { .. }));
        let mut strict = with_tools(json!({}));
        strict["tools"][1]["function"]["strict"] = json!(true);
        assert_eq!(format(strict).unwrap().content, ContentFormat::Text);
    }

    #[test]
    fn invalid_format_error_names_the_field() {
        let none = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}});
        for (fields, param) in [
            (json!({"tool_choice": "required"}), "tool_choice"),
            (with_tools(json!({"tool_choice": "sometimes"})), "tool_choice"),
            (with_tools(json!({"tool_choice": tool("z")})), "tool_choice.function.name"),
            (with_tools(json!({"tool_choice": {"type": "function"}})), "tool_choice.function.name"),
            (with_tools(json!({"tool_choice": {"type": "custom"}})), "tool_choice.type"),
            (with_tools(json!({"tool_choice": 5})), "tool_choice"),
            (with_tools(json!({"tool_choice": none})), "tool_choice.allowed_tools.tools"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"response_format": {"type": "regex"}}), "response_format.regex"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
            (json!({"structured_outputs": {"grammar": "root ::= \"a\""}}), "structured_outputs.grammar"),
            (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex"),
        ] {
            assert_eq!(error_param(fields.clone()), param, "{fields}");
        }
    }
}
