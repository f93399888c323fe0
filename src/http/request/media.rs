//! Images, audio and files in conversations. The models read text only.
//!
//! In a new user message they are refused, because the user expects the model to see them. In tool results and in earlier
//! messages each becomes one sentence, because refusing them would end the conversation for good.

use crate::http::errors::ApiError;
use serde_json::Value;

/// The text of a content part that is not text. `is_new`: the part belongs to a new user message.
pub fn part_text(kind: &str, at: &str, is_new: bool) -> Result<String, ApiError> {
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
