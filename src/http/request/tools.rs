//! Tools: the functions that are offered to the model, and the functions that `tool_choice` allows or requires.

use crate::http::{ApiError, openai::ChatRequest, quote};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Maximum length of a function's name. OpenAI allows 64 characters, and Anthropic allows 128. Neither allows dots, but
/// some clients send names with dots.
const MAX_NAME_LENGTH: usize = 128;

/// Replaces OpenAI's deprecated `functions` and `function_call` by `tools` and `tool_choice`.
pub fn replace_functions(request: &mut ChatRequest) -> Result<(), ApiError> {
    if let Some(functions) = request.functions.take() {
        if request.tools.is_some() {
            return Err(ApiError::wrong_value("functions", "is the deprecated name of tools; send only tools."));
        }
        let tool = |function| json!({"type": "function", "function": function});
        request.tools = Some(functions.into_iter().map(tool).collect());
    }
    if let Some(call) = request.function_call.take().filter(|call| !call.is_null()) {
        request.tool_choice = Some(match call {
            Value::Object(_) => json!({"type": "function", "function": call}),
            word => word,
        });
    }
    Ok(())
}

/// Field of a tool that is not defined at the start of the prompt. The value of a checked tool is true as long as no
/// message defines the tool, then false.
pub const DEFER_LOADING: &str = "defer_loading";

/// Translates a tool of another API with this function. `strict` and `defer_loading` are copied only if they are true:
/// the tool is a part of the prompt, and false is the default.
pub fn with_function(tool: &Value, mut function: Map<String, Value>) -> Value {
    if tool["strict"] == true {
        function.insert("strict".into(), true.into());
    }
    let mut translated = json!({"type": "function", "function": function});
    if tool[DEFER_LOADING] == true {
        translated[DEFER_LOADING] = true.into();
    }
    translated
}

/// True if the start of the prompt does not define this checked tool.
pub fn is_deferred(tool: &Value) -> bool {
    tool.get(DEFER_LOADING).is_some()
}

/// A copy of a deferred tool as the start of a prompt would have it.
pub fn without_deferral(tool: &Value) -> Value {
    let mut tool = tool.clone();
    tool.as_object_mut().and_then(|fields| fields.shift_remove(DEFER_LOADING));
    tool
}

/// True if the prompt defines this tool, at its start or in a message.
pub fn is_defined(tool: &Value) -> bool {
    tool[DEFER_LOADING] != true
}

/// Path of a field of the tool with this index in the request of an API. The field is `name` or `parameters`.
pub type ToolPath = fn(usize, &str) -> String;

/// Path of a tool's field in chat completions.
pub fn chat_path(index: usize, field: &str) -> String {
    format!("tools[{index}].function.{field}")
}

/// Checks the tools. `referenced` has the names of the tools that messages define. `tool_choice` does not change the
/// tools, so that the prompt stays the same and its cache stays valid.
pub fn checked(mut tools: Vec<Value>, path: ToolPath, referenced: &BTreeSet<&str>) -> Result<Vec<Value>, ApiError> {
    for (index, tool) in tools.iter_mut().enumerate() {
        check(tool, index, path)?;
        let is_referenced = tool["function"]["name"].as_str().is_some_and(|name| referenced.contains(name));
        match tool.get_mut(DEFER_LOADING) {
            Some(Value::Bool(true)) if is_referenced => tool[DEFER_LOADING] = false.into(),
            Some(Value::Bool(true)) | None => {}
            Some(_) => *tool = without_deferral(tool),
        }
    }
    Ok(tools)
}

/// True if [`checked`] accepts the tool.
pub fn is_valid(tool: &Value) -> bool {
    check(tool, 0, chat_path).is_ok()
}

fn check(tool: &Value, index: usize, path: ToolPath) -> Result<(), ApiError> {
    if tool["type"] != "function" {
        return Err(ApiError::wrong_value(format!("tools[{index}].type"), "must be `function`."));
    }
    let function = &tool["function"];
    if !function["name"].as_str().is_some_and(is_name) {
        let rule = format!("must be 1 to {MAX_NAME_LENGTH} letters, digits, dots, dashes or underscores.");
        return Err(ApiError::wrong_value(path(index, "name"), rule));
    }
    if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
        return Err(ApiError::wrong_value(path(index, "parameters"), "must be a JSON schema, which is an object."));
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.chars().all(is_allowed)
}

/// Tools that may or must be called. `None` in a variant means all tools that the prompt defines. A list has the names of
/// the allowed tools.
#[derive(Debug, PartialEq)]
pub enum ToolChoice {
    None,
    Auto(Option<Vec<String>>),
    Required(Option<Vec<String>>),
}

impl ToolChoice {
    /// Reads `tool_choice` of chat completions.
    pub fn parse(choice: Option<&Value>, tools: &[Value]) -> Result<Self, ApiError> {
        let choice = match choice {
            None | Some(Value::Null) => return Ok(Self::Auto(None)),
            Some(Value::String(word)) => Self::from_word(word)?,
            Some(choice @ Value::Object(_)) => match choice["type"].as_str() {
                Some("function") => Self::function(&choice["function"]["name"], tools, "tool_choice.function.name")?,
                Some("allowed_tools") => {
                    // Some clients put these fields next to the type, as in Responses.
                    let inner = choice.get("allowed_tools").unwrap_or(choice);
                    let name = |tool: &Value| tool.get("function").unwrap_or(tool)["name"].clone();
                    Self::allowed(inner, name, |_| false, tools, "tool_choice.allowed_tools")?
                }
                _ => {
                    return Err(ApiError::wrong_value("tool_choice.type", "must be `function` or `allowed_tools`."));
                }
            },
            _ => return Err(ApiError::wrong_type("tool_choice", "must be a string or an object.")),
        };
        choice.with_tools(tools)
    }

    pub fn from_word(word: &str) -> Result<Self, ApiError> {
        match word {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto(None)),
            "required" => Ok(Self::Required(None)),
            other => {
                let allowed = "`none`, `auto`, `required` or an object that names a tool";
                Err(ApiError::not_allowed("tool_choice", other, allowed))
            }
        }
    }

    /// A call of the tool with this name is required. `at` is the path of the field with the name.
    pub fn function(name: &Value, tools: &[Value], at: &str) -> Result<Self, ApiError> {
        Ok(Self::Required(Some(vec![known_name(name, &names(tools), at)?.to_owned()])))
    }

    /// Reads `mode` and `tools` of an object with the path `at`. `name` returns the name in a tool. The model never calls a
    /// tool that the server ignores.
    pub fn allowed(
        allowed: &Value,
        name: impl Fn(&Value) -> Value,
        is_ignored: impl Fn(&Value) -> bool,
        tools: &[Value],
        at: &str,
    ) -> Result<Self, ApiError> {
        let tools_at = format!("{at}.tools");
        let listed = allowed["tools"].as_array().map_or(&[][..], Vec::as_slice);
        if listed.is_empty() {
            return Err(ApiError::wrong_value(tools_at, "must be a non-empty array of tools."));
        }
        let known = names(tools);
        let mut seen = BTreeSet::new();
        for tool in listed.iter().filter(|tool| !is_ignored(tool)) {
            seen.insert(known_name(&name(tool), &known, &tools_at)?);
        }
        let names: Vec<_> = seen.into_iter().map(str::to_owned).collect();
        match allowed["mode"].as_str() {
            Some("auto") if names.is_empty() => Ok(Self::None),
            Some("auto") => Ok(Self::Auto(Some(names))),
            Some("required") if names.is_empty() => {
                let text = format!("{tools_at} has only tools that this server does not run, but requires a call.");
                Err(ApiError::unsupported(&tools_at, text))
            }
            Some("required") => Ok(Self::Required(Some(names))),
            _ => Err(ApiError::wrong_value(format!("{at}.mode"), "must be `auto` or `required`.")),
        }
    }

    /// Refuses a choice that requires a call if the prompt defines no tools and the choice names none.
    pub fn with_tools(self, tools: &[Value]) -> Result<Self, ApiError> {
        if self == Self::Required(None) && !tools.iter().any(is_defined) {
            return Err(ApiError::wrong_value("tool_choice", "requires a call, but the request has no functions."));
        }
        Ok(self)
    }
}

fn names(tools: &[Value]) -> BTreeSet<&str> {
    tools.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect()
}

/// The known name that equals `name`. `at` is the path of the field with the name.
fn known_name<'a>(name: &Value, known: &BTreeSet<&'a str>, at: &str) -> Result<&'a str, ApiError> {
    match name.as_str().map(|name| known.get(name).copied().ok_or(name)) {
        Some(Ok(known)) => Ok(known),
        Some(Err(name)) => {
            Err(ApiError::wrong_value(at, format!("is `{}`, which is not the name of a tool.", quote(name))))
        }
        None => Err(ApiError::wrong_type(at, "must be the name of a tool.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::RequestedFormat;
    use test_support::thread_cpu::cpu_time_of;

    /// The field that an error names.
    fn param(result: Result<Vec<Value>, ApiError>) -> String {
        let body = result.unwrap_err().body();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    fn check_all(tools: Vec<Value>) -> Result<Vec<Value>, ApiError> {
        checked(tools, chat_path, &BTreeSet::from(["found"]))
    }

    #[test]
    fn deferred_tools_are_marked() {
        let tool =
            |name: &str, defer: Value| json!({"type": "function", "defer_loading": defer, "function": {"name": name}});
        let deferred = [("f", json!(true)), ("found", json!(true)), ("f", json!(false)), ("found", json!("yes"))];
        let tools = check_all(deferred.map(|(name, defer)| tool(name, defer)).to_vec()).unwrap();
        let found: Vec<_> = tools.iter().map(|tool| (is_deferred(tool), is_defined(tool))).collect();
        assert_eq!(found, [(true, false), (true, true), (false, true), (false, true)]);
        assert_eq!(tools[2], json!({"type": "function", "function": {"name": "f"}}));
        let choice = |word: &str, tools: &[Value]| ToolChoice::parse(Some(&word.into()), tools);
        assert!(choice("required", &tools[..1]).is_err() && choice("required", &tools[..2]).is_ok());
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(ToolChoice::parse(Some(&named), &tools[..1]), Ok(ToolChoice::Required(Some(vec!["f".into()]))));
    }

    #[test]
    fn allowed_tools_are_read_in_linear_time() {
        let tool = |at: usize| json!({"type": "function", "function": {"name": format!("f{at}")}});
        let tools: Vec<Value> = (0..20_000).map(tool).collect();
        let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}});
        let time = cpu_time_of(|| {
            let choice = ToolChoice::parse(Some(&choice), &tools).unwrap();
            RequestedFormat::new(None, &tools, &choice, true, chat_path).unwrap();
        });
        assert!(time.as_secs() < 5, "{time:?}");
        let [one, other] = ["f7", "f10"].map(|name| json!({"function": {"name": name}}));
        let repeated = json!({"type": "allowed_tools", "mode": "required", "tools": [one, other, one]});
        let names = vec!["f10".into(), "f7".into()];
        assert_eq!(ToolChoice::parse(Some(&repeated), &tools), Ok(ToolChoice::Required(Some(names))));
    }

    #[test]
    fn invalid_tool_error_names_the_field() {
        assert_eq!(param(check_all(vec![json!({"type": "web_search"})])), "tools[0].type");
        assert_eq!(param(check_all(vec![json!({"type": "function"})])), "tools[0].function.name");
        for name in [String::new(), "a b".into(), "a>".into(), "ä".into(), "a".repeat(129)] {
            let tool = json!({"type": "function", "function": {"name": name}});
            assert_eq!(param(check_all(vec![tool])), "tools[0].function.name");
        }
    }
}
