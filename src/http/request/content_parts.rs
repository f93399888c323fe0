//! Content parts of messages: their text, and what replaces images, audio and files. The models read text only.
//!
//! In a new user message such a part is refused, because the user expects the model to see it. In tool results and earlier
//! messages it becomes one sentence, because refusing it would end the conversation for good.

use crate::http::errors::ApiError;
use serde_json::Value;

/// Format of text parts in one API.
pub struct PartFormat {
    /// Types of text parts. Errors name the first.
    pub types: &'static [&'static str],
    /// Joins the text of several parts.
    pub separator: &'static str,
}

impl PartFormat {
    /// The text of a content: a string, or an array of parts. `is_new`: it belongs to a new user message.
    pub fn text(&self, content: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
        match content {
            Value::String(text) => Ok(text.clone()),
            Value::Array(parts) => {
                let mut joined = String::new();
                for (index, part) in parts.iter().enumerate() {
                    joined += if index > 0 { self.separator } else { "" };
                    joined += &self.part_text(part, &format!("{at}[{index}]"), is_new)?;
                }
                Ok(joined)
            }
            _ => Err(ApiError::wrong_type(at, "must be a string or an array of parts.")),
        }
    }

    /// The text of one part.
    pub fn part_text(&self, part: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
        let source = &part["source"];
        let document = source["data"].as_str().filter(|_| source["type"] == "text");
        let text = part["text"].as_str().or(part["refusal"].as_str());
        match (part["type"].as_str(), text) {
            (Some(kind), Some(text)) if self.types.contains(&kind) => Ok(text.to_owned()),
            (Some("document"), text) if document.or(text).is_some() => Ok(document.or(text).unwrap_or_default().into()),
            (Some(kind), _) if !self.types.contains(&kind) => omitted(kind, at, is_new),
            _ => {
                let kind = self.types.first().unwrap_or(&"text");
                Err(ApiError::wrong_type(at, format!("must be {{\"type\": \"{kind}\", \"text\": ...}}.")))
            }
        }
    }
}

/// The sentence for a part that is not text.
fn omitted(kind: &str, at: &str, is_new: bool) -> Result<String, ApiError> {
    let name = match kind {
        "image" | "image_url" | "input_image" => "image",
        "audio" | "audio_url" | "input_audio" => "audio",
        "video" | "video_url" | "input_video" => "video",
        "file" | "input_file" | "document" => "file",
        _ => "",
    };
    if is_new || name.is_empty() {
        let text = format!("{at} has type `{kind}`; this server reads text only.");
        return Err(ApiError::unsupported(at, text));
    }
    Ok(format!("[{name} omitted: this model reads text only]"))
}

/// The number of messages up to the last one that `is_assistant`. The messages after it are new.
pub fn answered(messages: &[Value], is_assistant: impl Fn(&Value) -> bool) -> usize {
    messages.iter().rposition(is_assistant).map_or(0, |last| last + 1)
}
