//! Continues the final assistant message instead of starting a new message.
//!
//! Templates trim messages and write an end tag after them, so the rendered text alone does not show where the message
//! ends. The message is therefore rendered with a marker at its end, and the prompt is cut at the marker.

use crate::http::{ApiError, layers::unique_id, openai::ChatRequest};
use moestro_chat::{Content, Message, Role};

/// Marker at the end of the last message.
#[derive(Debug, Clone)]
pub struct EndMarker {
    text: String,
    /// True if the message has reasoning but no content, so that the answer starts in the reasoning.
    pub in_reasoning: bool,
}

/// True if a request continues the last message: either `continue_final_message` is true, as in vLLM, or
/// `add_generation_prompt` is false.
pub fn is_requested(request: &ChatRequest) -> Result<bool, ApiError> {
    match (request.continue_final_message, request.add_generation_prompt) {
        (Some(true), Some(true)) => Err(ApiError::wrong_value(
            "continue_final_message",
            "continues the last message, add_generation_prompt starts a new one; send only one.",
        )),
        (Some(true), _) | (None, Some(false)) => Ok(true),
        (Some(false), Some(false)) => Err(ApiError::wrong_value(
            "add_generation_prompt",
            "and continue_final_message are both false; one of them must be true.",
        )),
        _ => Ok(false),
    }
}

/// Checks that an answer in a format starts a new message. `continues` is true if it would continue the last one.
pub fn check_new_message(continues: bool) -> Result<(), ApiError> {
    if !continues {
        return Ok(());
    }
    let text = "An answer with a response format or a tool choice must be a new message: remove \
                continue_final_message, or the format.";
    Err(ApiError::invalid("messages", text))
}

impl EndMarker {
    /// Appends a marker to the last message.
    pub fn insert<I>(messages: &mut [Message<I>]) -> Result<Self, ApiError> {
        let Some(last) = messages.last_mut().filter(|message| message.role == Role::Assistant) else {
            let text = "The request continues the last message, but that message is not from the assistant.";
            return Err(ApiError::invalid("messages", text));
        };
        if !last.calls.is_empty() {
            return Err(ApiError::unsupported("messages", "A message with tool calls cannot be continued."));
        }
        let Some(written) = last.content.as_ref().map_or(Some(""), Content::text) else {
            return Err(ApiError::unsupported("messages", "A message with images cannot be continued."));
        };
        let text = format!("mark-{}", unique_id());
        let reasoning = last.reasoning.as_mut().filter(|_| written.is_empty());
        let in_reasoning = reasoning.is_some();
        match reasoning {
            Some(reasoning) => reasoning.push_str(&text),
            None => last.content.get_or_insert_default().push_text(text.clone(), ""),
        }
        Ok(Self { text, in_reasoning })
    }

    /// Returns the prompt up to the marker.
    pub fn cut(&self, mut prompt: String) -> Result<String, ApiError> {
        match prompt.matches(&self.text).count() {
            1 => prompt.truncate(prompt.find(&self.text).unwrap_or_default()),
            _ => {
                let text = "This model's chat template does not support continuing the last message.";
                return Err(ApiError::unsupported("messages", text));
            }
        }
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::messages;
    use serde_json::json;

    #[test]
    fn last_message_end_is_marked() {
        for (message, name, in_reasoning) in [
            (json!({"role": "assistant", "content": "Well "}), "content", false),
            (json!({"role": "assistant", "content": null}), "content", false),
            (json!({"role": "assistant", "content": "", "reasoning_content": "Hm"}), "reasoning_content", true),
            (json!({"role": "assistant", "content": "Well", "reasoning_content": "Hm"}), "content", false),
        ] {
            let before = message[name].as_str().unwrap_or_default().to_owned();
            let mut messages = messages::read(vec![message]).unwrap();
            let marker = EndMarker::insert(&mut messages).unwrap();
            assert_eq!(marker.in_reasoning, in_reasoning);
            let marked = serde_json::to_value(&messages[0]).unwrap();
            let text = marked[name].as_str().unwrap();
            assert_eq!(marker.cut(format!("{text}<end>")).unwrap(), before);
            assert!(marker.cut("<end>".into()).is_err() && marker.cut(text.repeat(2)).is_err());
        }
    }

    #[test]
    fn only_assistant_text_can_be_continued() {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": "{}"}});
        for message in [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "x", "tool_calls": [call]}),
        ] {
            assert!(EndMarker::insert(&mut messages::read(vec![message]).unwrap()).is_err());
        }
        assert!(EndMarker::insert::<()>(&mut []).is_err());
        let requested = |continue_final_message, add_generation_prompt| {
            is_requested(&ChatRequest { continue_final_message, add_generation_prompt, ..Default::default() }).ok()
        };
        assert_eq!(requested(None, None), Some(false));
        assert_eq!(requested(Some(true), Some(false)), Some(true));
        assert_eq!(requested(None, Some(false)), Some(true));
        assert_eq!(requested(Some(false), Some(true)), Some(false));
        assert_eq!((requested(Some(true), Some(true)), requested(Some(false), Some(false))), (None, None));
    }
}
