//! The form an answer must have, however it was asked for: `response_format`, vLLM's and llama-server's fields for the same
//! thing, and `tool_choice`. All of them become one [`OutputFormat`], which is compiled away from the async threads.

use crate::http::{
    LoadedModel,
    errors::ApiError,
    layers::memory::MemoryPermit,
    openai::types::{ChatRequest, ResponseFormat},
};
use crate::{
    chat::grammar::{AllowedTools, ContentFormat, FormatError, NextTokens, OutputFormat, TokenConstraint, any_object},
    engine::{Allowed, Constraint},
};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A form, and the field that asked for its content.
#[derive(Debug)]
pub struct Asked {
    form: OutputFormat,
    field: String,
}

/// The form that a request asks for; `None` if any answer will do.
pub fn form(request: &ChatRequest) -> Result<Option<Asked>, ApiError> {
    let (field, content) = content(request)?;
    let tools: Vec<(usize, Value)> = request.tools.iter().flatten().cloned().enumerate().collect();
    let parallel = request.parallel_tool_calls.unwrap_or(true);
    let strict = tools.iter().any(|(_, tool)| tool["function"]["strict"] == true);
    let choice = Choice::read(request.tool_choice.as_ref(), &tools)?;
    let asked = |content, tools| {
        let tools = Some(AllowedTools { tools, parallel }).filter(|tools| !tools.tools.is_empty());
        Ok(Some(Asked { form: OutputFormat { content, tools }, field: field.clone() }))
    };
    match choice {
        Choice::None => match content {
            ContentFormat::Text => Ok(None),
            content => asked(content, Vec::new()),
        },
        Choice::Must(only) => asked(ContentFormat::Nothing, picked(tools, &only)),
        Choice::May(only) if content != ContentFormat::Text || strict || only.is_some() => {
            asked(content, picked(tools, &only))
        }
        Choice::May(_) => Ok(None),
    }
}

/// The tools that may or must be called: all of them, or those with these names.
#[derive(Debug, PartialEq)]
enum Choice {
    None,
    May(Option<Vec<String>>),
    Must(Option<Vec<String>>),
}

impl Choice {
    fn read(choice: Option<&Value>, tools: &[(usize, Value)]) -> Result<Self, ApiError> {
        let known = |name: &Value, at: &str| match name.as_str() {
            Some(name) if tools.iter().any(|(_, tool)| tool["function"]["name"] == name) => Ok(name.to_owned()),
            Some(name) => Err(ApiError::invalid(at, format!("{at} is `{name}`, which is not the name of a tool."))),
            None => Err(ApiError::json(Some(at.into()), format!("{at} must be the name of a tool."))),
        };
        let Some(choice) = choice.filter(|choice| !choice.is_null()) else {
            return Ok(if tools.is_empty() { Choice::None } else { Choice::May(None) });
        };
        let read = match choice {
            Value::String(word) => match word.as_str() {
                "none" => Choice::None,
                "auto" if tools.is_empty() => Choice::None,
                "auto" => Choice::May(None),
                "required" => Choice::Must(None),
                other => {
                    let text =
                        format!("tool_choice is `{other}`; it must be `none`, `auto`, `required` or name a tool.");
                    return Err(ApiError::invalid("tool_choice", text));
                }
            },
            Value::Object(_) => match choice["type"].as_str() {
                Some("function") => {
                    Choice::Must(Some(vec![known(&choice["function"]["name"], "tool_choice.function.name")?]))
                }
                Some("allowed_tools") => {
                    // Chat puts these into an object of their own, Responses beside the type.
                    let inner = choice.get("allowed_tools").unwrap_or(choice);
                    let names = inner["tools"].as_array().into_iter().flatten().map(|tool| {
                        let name = tool.get("function").unwrap_or(tool).get("name").unwrap_or(&Value::Null);
                        known(name, "tool_choice.allowed_tools.tools")
                    });
                    let names = Some(names.collect::<Result<Vec<_>, _>>()?).filter(|names| !names.is_empty());
                    match inner["mode"].as_str() {
                        _ if names.is_none() => {
                            let text = "tool_choice.allowed_tools.tools must be an array of tools that is not empty.";
                            return Err(ApiError::invalid("tool_choice.allowed_tools.tools", text));
                        }
                        Some("auto") => Choice::May(names),
                        Some("required") => Choice::Must(names),
                        _ => {
                            let text = "tool_choice.allowed_tools.mode must be `auto` or `required`.";
                            return Err(ApiError::invalid("tool_choice.allowed_tools.mode", text));
                        }
                    }
                }
                _ => {
                    let text = "tool_choice.type must be `function` or `allowed_tools`.";
                    return Err(ApiError::invalid("tool_choice.type", text));
                }
            },
            _ => return Err(ApiError::json(Some("tool_choice".into()), "tool_choice must be a string or an object.")),
        };
        if tools.is_empty() && matches!(read, Choice::Must(_)) {
            return Err(ApiError::invalid("tool_choice", "tool_choice asks for a call, but there are no tools."));
        }
        Ok(read)
    }
}

fn picked(tools: Vec<(usize, Value)>, only: &Option<Vec<String>>) -> Vec<(usize, Value)> {
    let wanted =
        |tool: &Value| only.as_ref().is_none_or(|names| names.iter().any(|name| tool["function"]["name"] == **name));
    tools.into_iter().filter(|(_, tool)| wanted(tool)).collect()
}

/// The content's form, and the name of the field that asks for it. Two such fields are an error.
fn content(request: &ChatRequest) -> Result<(String, ContentFormat), ApiError> {
    let mut asked = Vec::new();
    if let Some(format) = &request.response_format {
        asked.extend(self::format(format)?);
    }
    let json = |schema: &Value| ContentFormat::Json { schema: schema.clone(), strict: true };
    let guided = |asked: &mut Vec<_>, prefix: &str, it: [Option<&Value>; 4]| -> Result<(), ApiError> {
        let [schema, regex, choice, grammar] = it.map(|value| value.filter(|value| !value.is_null()));
        let text = |value: &Value, at: &str| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(ApiError::json(Some(at.into()), format!("{at} must be a string."))),
        };
        if let Some(schema) = schema {
            let at = format!("{prefix}json");
            let parsed = schema.as_str().map(serde_json::from_str).transpose();
            let parsed = parsed.map_err(|e| ApiError::invalid(&at, format!("{at} is not valid JSON: {e}")))?;
            asked.push((at, json(parsed.as_ref().unwrap_or(schema))));
        }
        if let Some(regex) = regex {
            let at = format!("{prefix}regex");
            asked.push((at.clone(), ContentFormat::Regex(text(regex, &at)?)));
        }
        if let Some(choice) = choice {
            let at = format!("{prefix}choice");
            let words = choice.as_array().filter(|words| !words.is_empty() && words.iter().all(Value::is_string));
            let Some(words) = words else {
                return Err(ApiError::json(
                    Some(at.clone()),
                    format!("{at} must be an array of strings that is not empty."),
                ));
            };
            let words: Vec<String> = words.iter().filter(|word| **word != "").map(Value::to_string).collect();
            asked.push((at, ContentFormat::Lark(format!("start: {}", words.join(" | ")))));
        }
        if grammar.is_some() {
            let at = format!("{prefix}grammar");
            let message = format!("{at} is not supported: send response_format {{\"type\": \"lark\", \"lark\": ...}}.");
            return Err(ApiError::unsupported(&at, message));
        }
        Ok(())
    };
    let ChatRequest { guided_json, guided_regex, guided_choice, guided_grammar, .. } = request;
    let it = [guided_json.as_ref(), guided_regex.as_ref(), guided_choice.as_ref(), guided_grammar.as_ref()];
    guided(&mut asked, "guided_", it)?;
    if let Some(outputs) = request.structured_outputs.as_ref().filter(|outputs| !outputs.is_null()) {
        for (key, value) in outputs.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            match key.as_str() {
                "json" | "regex" | "choice" | "grammar" => {}
                "json_object" if *value == false => {}
                "json_object" => asked.push(("structured_outputs.json_object".into(), json(&any_object()))),
                other => {
                    let at = format!("structured_outputs.{other}");
                    return Err(ApiError::unsupported(&at, format!("{at} is not supported.")));
                }
            }
        }
        let it = ["json", "regex", "choice", "grammar"].map(|key| outputs.get(key));
        guided(&mut asked, "structured_outputs.", it)?;
    }
    if let Some(schema) = request.json_schema.as_ref().filter(|schema| !schema.is_null()) {
        asked.push(("json_schema".into(), json(schema)));
    }
    if request.grammar.as_ref().is_some_and(|grammar| !grammar.is_null()) {
        let message = "grammar (GBNF) is not supported: send response_format {\"type\": \"lark\", \"lark\": ...}.";
        return Err(ApiError::unsupported("grammar", message));
    }
    if let [(first, _), (second, _), ..] = &*asked {
        let message = format!("{first} and {second} both say what the answer must be; send one of them.");
        return Err(ApiError::invalid(second, message));
    }
    Ok(asked.pop().unwrap_or_default())
}

/// `response_format`; nothing for `text`.
fn format(format: &ResponseFormat) -> Result<Option<(String, ContentFormat)>, ApiError> {
    let needs = |key: &str| {
        let at = format!("response_format.{key}");
        ApiError::invalid(&at, format!("{at} is missing; the type `{}` needs it.", format.kind))
    };
    let (at, content) = match format.kind.as_str() {
        "text" => return Ok(None),
        // llama-server takes a schema here, too.
        "json_object" => match &format.schema {
            None => ("type", ContentFormat::Json { schema: any_object(), strict: true }),
            Some(schema) => ("schema", ContentFormat::Json { schema: schema.clone(), strict: true }),
        },
        "json_schema" => {
            let inner = format.json_schema.as_ref().ok_or_else(|| needs("json_schema"))?;
            let schema = inner.schema.clone().ok_or_else(|| needs("json_schema.schema"))?;
            ("json_schema.schema", ContentFormat::Json { schema, strict: inner.strict.unwrap_or(false) })
        }
        "regex" => ("regex", ContentFormat::Regex(format.regex.clone().ok_or_else(|| needs("regex"))?)),
        "lark" => ("lark", ContentFormat::Lark(format.lark.clone().ok_or_else(|| needs("lark"))?)),
        other => {
            let kinds = "text, json_object, json_schema, regex and lark";
            let text = format!("response_format.type is `{other}`; the types are {kinds}.");
            return Err(ApiError::invalid("response_format.type", text));
        }
    };
    Ok(Some((format!("response_format.{at}"), content)))
}

/// The constraint that holds an answer to its form, and its reasoning to `budget` tokens, if there is anything to hold.
pub async fn constraint(
    app: &LoadedModel,
    permit: &MemoryPermit,
    asked: Option<Asked>,
    calls: bool,
    (in_reasoning, budget): (bool, Option<usize>),
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    let grammars = app.grammars.clone();
    let guide = match (asked, budget.filter(|_| in_reasoning)) {
        (None, None) => return Ok(None),
        (None, Some(budget)) => grammars.reasoning_budget(calls, budget),
        (Some(Asked { form, field }), budget) => {
            // In its turn: a large one takes a second, and much memory.
            let compile = move || catch_unwind(AssertUnwindSafe(|| grammars.compile(&form, in_reasoning, budget)));
            let broke = |_| FormatError { tool: None, path: String::new(), reason: "the compiler failed on it".into() };
            let compiled = permit.run(compile).await?.map_err(broke).flatten();
            compiled.map_err(|fault| refuse(&field, fault))?
        }
    };
    Ok(Some(Box::new(Led(guide))))
}

fn refuse(field: &str, fault: FormatError) -> ApiError {
    let at = match fault.tool {
        Some(index) => format!("tools[{index}].function.parameters{}", fault.path),
        None => format!("{field}{}", fault.path),
    };
    ApiError::invalid(&at, format!("{at}: {}", fault.reason))
}

/// A guide, as the engine takes it.
struct Led(TokenConstraint);

impl Constraint for Led {
    fn allowed(&mut self) -> Result<Allowed, String> {
        Ok(match self.0.allowed()? {
            NextTokens::Any => Allowed::Any,
            NextTokens::Only(words) => Allowed::Only(words),
        })
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.0.accept(id)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Led(self.0.clone()))
    }
}

#[cfg(test)]
#[path = "response_format_tests.rs"]
mod tests;
