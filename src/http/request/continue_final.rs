//! An answer that goes on from the last message, which is the assistant's.
//!
//! The message is rendered with a mark at its end, and the prompt is cut there: templates trim messages and write an end
//! behind them, so that the text alone does not say where it stopped.

use crate::http::{errors::ApiError, layers::request_log::unique_id, openai::types::ChatRequest};
use serde_json::Value;

/// The names under which clients send reasoning back, as templates look for it.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The end of the last message.
#[derive(Debug)]
pub struct Mark {
    text: String,
    /// The message has reasoning and no content yet: the answer begins in the reasoning.
    pub in_reasoning: bool,
}

/// True if a request asks for it: `continue_final_message`, as vLLM has it, or no generation prompt.
pub fn asked(request: &ChatRequest) -> Result<bool, ApiError> {
    match (request.continue_final_message, request.add_generation_prompt) {
        (Some(true), Some(true)) => {
            let text = "continue_final_message goes on from the last message, add_generation_prompt begins a new one.";
            Err(ApiError::invalid("continue_final_message", text))
        }
        (Some(true), _) | (None, Some(false)) => Ok(true),
        (Some(false), Some(false)) => {
            let text = "add_generation_prompt is false, and so is continue_final_message: an answer needs one of them.";
            Err(ApiError::invalid("add_generation_prompt", text))
        }
        _ => Ok(false),
    }
}

impl Mark {
    /// Puts a mark at the end of the last message.
    pub fn put(messages: &mut [Value]) -> Result<Self, ApiError> {
        let Some(Value::Object(last)) = messages.last_mut().filter(|message| message["role"] == "assistant") else {
            let text = "An answer is to go on from the last message, which is not the assistant's.";
            return Err(ApiError::invalid("messages", text));
        };
        if last.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty()) {
            return Err(ApiError::unsupported("messages", "An answer cannot go on from a message with tool calls."));
        }
        let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
        let content = text(last.get("content"));
        let name = REASONING.into_iter().find(|&name| last.get(name).is_some_and(|value| !value.is_null()));
        let name = name.filter(|&name| content.is_empty() && !text(last.get(name)).is_empty());
        let mark = Self { text: format!("mark-{}", unique_id()), in_reasoning: name.is_some() };
        let name = name.unwrap_or("content");
        let marked = text(last.get(name)) + &mark.text;
        last.insert(name.into(), marked.into());
        Ok(mark)
    }

    /// The prompt up to the mark.
    pub fn cut(&self, mut prompt: String) -> Result<String, ApiError> {
        match prompt.matches(&self.text).count() {
            1 => prompt.truncate(prompt.find(&self.text).unwrap_or_default()),
            _ => {
                let text = "This model's template does not write the last message so that an answer can go on from it.";
                return Err(ApiError::unsupported("messages", text));
            }
        }
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_end_of_the_last_message_is_marked() {
        for (message, name, in_reasoning) in [
            (json!({"role": "assistant", "content": "Well "}), "content", false),
            (json!({"role": "assistant", "content": null}), "content", false),
            (json!({"role": "assistant", "content": "", "reasoning": "Hm"}), "reasoning", true),
            (json!({"role": "assistant", "content": "Well", "reasoning_content": "Hm"}), "content", false),
        ] {
            let before = message[name].as_str().unwrap_or_default().to_owned();
            let mut messages = [message];
            let mark = Mark::put(&mut messages).unwrap();
            assert_eq!(mark.in_reasoning, in_reasoning);
            let text = messages[0][name].as_str().unwrap();
            assert_eq!(mark.cut(format!("{text}<end>")).unwrap(), before);
            assert!(mark.cut("<end>".into()).is_err() && mark.cut(text.repeat(2)).is_err());
        }
    }

    #[test]
    fn there_must_be_something_to_go_on_from() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": "{}"}});
        for message in [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "x", "tool_calls": [call]}),
        ] {
            assert!(Mark::put(&mut [message]).is_err());
        }
        assert!(Mark::put(&mut []).is_err());
        let ask = |continues, opens| {
            asked(&ChatRequest {
                continue_final_message: continues,
                add_generation_prompt: opens,
                ..Default::default()
            })
            .ok()
        };
        assert_eq!(ask(None, None), Some(false));
        assert_eq!(ask(Some(true), Some(false)), Some(true));
        assert_eq!(ask(None, Some(false)), Some(true));
        assert_eq!(ask(Some(false), Some(true)), Some(false));
        assert_eq!((ask(Some(true), Some(true)), ask(Some(false), Some(false))), (None, None));
    }
}
