//! Tools: the functions that are offered to the model, and the functions that `tool_choice` allows or requires.

use crate::http::{ApiError, openai::ChatRequest};
use serde_json::{Map, Value, json};

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

/// Copies `strict` from a tool of another API. Only true is copied: the function is a part of the prompt, and false is
/// the default.
pub fn copy_strict(tool: &Value, function: &mut Map<String, Value>) {
    if tool["strict"] == true {
        function.insert("strict".into(), true.into());
    }
}

/// Checks the tools. `tool_choice` does not change the tools, so that the prompt stays the same and its cache stays
/// valid.
pub fn checked(tools: Option<Vec<Value>>) -> Result<Vec<Value>, ApiError> {
    let tools = tools.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool["type"] != "function" {
            return Err(ApiError::wrong_value(format!("{at}.type"), "must be `function`."));
        }
        let function = &tool["function"];
        if !function["name"].as_str().is_some_and(is_name) {
            let rule = format!("must be 1 to {MAX_NAME_LENGTH} letters, digits, dots, dashes or underscores.");
            return Err(ApiError::wrong_value(format!("{at}.function.name"), rule));
        }
        if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
            return Err(ApiError::wrong_value(
                format!("{at}.function.parameters"),
                "must be a JSON schema, which is an object.",
            ));
        }
    }
    Ok(tools)
}

fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.chars().all(is_allowed)
}

/// Tools that may or must be called. `None` in a variant means all tools. A list has the names of the allowed tools.
#[derive(Debug, PartialEq)]
pub enum ToolChoice {
    None,
    Auto(Option<Vec<String>>),
    Required(Option<Vec<String>>),
}

impl ToolChoice {
    /// Reads `tool_choice`. `tools` are the request's tools with their indices.
    pub fn parse(choice: Option<&Value>, tools: &[(usize, Value)]) -> Result<Self, ApiError> {
        let Some(choice) = choice.filter(|choice| !choice.is_null()) else {
            return Ok(if tools.is_empty() { Self::None } else { Self::Auto(None) });
        };
        let parsed = match choice {
            Value::String(word) => match word.as_str() {
                "none" => Self::None,
                "auto" if tools.is_empty() => Self::None,
                "auto" => Self::Auto(None),
                "required" => Self::Required(None),
                other => {
                    let text = format!(
                        "tool_choice is `{other}`; it must be `none`, `auto`, `required` or an object that names a tool."
                    );
                    return Err(ApiError::invalid("tool_choice", text));
                }
            },
            Value::Object(_) => match choice["type"].as_str() {
                Some("function") => {
                    let at = "tool_choice.function.name";
                    Self::Required(Some(vec![known_name(&choice["function"]["name"], tools, at)?]))
                }
                Some("allowed_tools") => Self::parse_allowed(choice, tools)?,
                _ => {
                    return Err(ApiError::wrong_value("tool_choice.type", "must be `function` or `allowed_tools`."));
                }
            },
            _ => return Err(ApiError::wrong_type("tool_choice", "must be a string or an object.")),
        };
        if tools.is_empty() && matches!(parsed, Self::Required(_)) {
            return Err(ApiError::wrong_value("tool_choice", "requires a call, but the request has no functions."));
        }
        Ok(parsed)
    }

    fn parse_allowed(choice: &Value, tools: &[(usize, Value)]) -> Result<Self, ApiError> {
        // Chat completions nest these fields in an object. Responses put these fields next to the type.
        let inner = choice.get("allowed_tools").unwrap_or(choice);
        let at = "tool_choice.allowed_tools.tools";
        let names = inner["tools"].as_array().into_iter().flatten().map(|tool| {
            known_name(tool.get("function").unwrap_or(tool).get("name").unwrap_or(&Value::Null), tools, at)
        });
        let names = names.collect::<Result<Vec<_>, _>>()?;
        if names.is_empty() {
            return Err(ApiError::wrong_value(at, "must be a non-empty array of tools."));
        }
        match inner["mode"].as_str() {
            Some("auto") => Ok(Self::Auto(Some(names))),
            Some("required") => Ok(Self::Required(Some(names))),
            _ => Err(ApiError::wrong_value("tool_choice.allowed_tools.mode", "must be `auto` or `required`.")),
        }
    }
}

/// Checks that `name` is the name of one of the tools. `at` is the path of the field with the name.
fn known_name(name: &Value, tools: &[(usize, Value)], at: &str) -> Result<String, ApiError> {
    match name.as_str() {
        Some(name) if tools.iter().any(|(_, tool)| tool["function"]["name"] == name) => Ok(name.to_owned()),
        Some(name) => Err(ApiError::wrong_value(at, format!("is `{name}`, which is not the name of a tool."))),
        None => Err(ApiError::wrong_type(at, "must be the name of a tool.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field that an error names.
    fn param(result: Result<Vec<Value>, ApiError>) -> String {
        let body = result.unwrap_err().body();
        body["error"]["param"].as_str().unwrap().to_owned()
    }

    #[test]
    fn valid_tools_are_kept() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        assert_eq!(checked(Some(vec![tool.clone()])).unwrap(), [tool]);
        assert!(checked(None).unwrap().is_empty());
    }

    #[test]
    fn invalid_tool_error_names_the_field() {
        assert_eq!(param(checked(Some(vec![json!({"type": "web_search"})]))), "tools[0].type");
        assert_eq!(param(checked(Some(vec![json!({"type": "function"})]))), "tools[0].function.name");
        for name in [String::new(), "a b".into(), "a>".into(), "ä".into(), "a".repeat(129)] {
            let tool = json!({"type": "function", "function": {"name": name}});
            assert_eq!(param(checked(Some(vec![tool]))), "tools[0].function.name");
        }
    }
}
