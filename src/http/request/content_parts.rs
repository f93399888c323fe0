//! Content parts of messages: text, text files, images, and the sentences that replace audio, video and other files.
//!
//! In a new user message, a part that the model cannot read is refused, because the user expects the model to see the
//! part. In tool results and earlier messages, a sentence replaces such a part, also if its type is unknown or its
//! fields are malformed, because a refusal would end the conversation for good. Images are decoded later, when the model
//! is known: see [`images`](super::images).

use crate::http::{ApiError, quote};
use base64::{Engine, engine::general_purpose};
use moestro_chat::{Content, Part};
use serde_json::Value;

/// Base64 with or without padding.
pub const BASE64: general_purpose::GeneralPurpose = general_purpose::GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    general_purpose::GeneralPurposeConfig::new()
        .with_decode_padding_mode(base64::engine::DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Introduces the summary that replaces a compacted conversation.
pub const SUMMARY_INTRODUCTION: &str = "Summary of the conversation so far:\n\n";

/// Types of parts with the reasoning of a model, of all providers. The text of some is encrypted.
const THOUGHTS: [&str; 4] = ["thinking", "redacted_thinking", "reasoning", "reasoning_text"];

/// Type of a part with blocks that a search has found.
const SEARCH_RESULT: &str = "search_result";

/// Format of text parts in one API.
pub struct PartFormat {
    /// Types of text parts. Errors name the first type.
    pub types: &'static [&'static str],
    /// Separator between the texts of several parts.
    pub separator: &'static str,
}

/// An image in a message of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePart {
    pub source: ImageSource,
    /// True for `detail: low`. The image may then be scaled to few tokens.
    pub low_detail: bool,
    /// Path of the part in the request, for errors.
    pub at: String,
    /// True if the image belongs to a new message (see [`new_messages`]). An image that cannot be read is an error there.
    /// In other messages, a sentence replaces the image.
    pub is_new: bool,
    /// Separator between the sentence that replaces the image and the text before or after the image.
    pub separator: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// The image, encoded in base64.
    Base64(String),
    /// A URL with the scheme `http` or `https`.
    Url(String),
    /// The image cannot be used. The text completes "the image ...".
    Invalid(&'static str),
}

impl PartFormat {
    /// The content of a message that may have images: a string, or an array of text and image parts. Unless `is_new` is
    /// true, other values are read as [`PartFormat::text`] reads them.
    pub fn content(&self, content: &Value, at: &str, is_new: bool) -> Result<Content<ImagePart>, ApiError> {
        let mut read = Content::default();
        match content {
            Value::Array(parts) => self.push_all(parts, at, is_new, &mut read)?,
            part if !is_new && self.is_part(part) => self.push(part, at, is_new, &mut read)?,
            other => read = self.text(other, at, is_new)?.into(),
        }
        Ok(read)
    }

    fn push_all(
        &self,
        parts: &[Value],
        at: &str,
        is_new: bool,
        content: &mut Content<ImagePart>,
    ) -> Result<(), ApiError> {
        let mut parts = parts.iter().enumerate();
        parts.try_for_each(|(index, part)| self.push(part, &format!("{at}[{index}]"), is_new, content))
    }

    /// Appends one part to a message's content: text, an image, or a reference to a tool.
    pub fn push(&self, part: &Value, at: &str, is_new: bool, content: &mut Content<ImagePart>) -> Result<(), ApiError> {
        if let Some(NestedBlocks { path, blocks: Value::Array(blocks), before }) = nested_blocks(part)
            && blocks.iter().any(|block| image_source(block).is_some())
        {
            if !before.is_empty() {
                content.push_text(before.join("\n"), self.separator);
            }
            return self.push_all(blocks, &format!("{at}.{path}"), is_new, content);
        }
        match (image_source(part), part["tool_name"].as_str()) {
            (Some((source, detail)), _) => {
                let at = at.to_owned();
                let separator = self.separator;
                let image = ImagePart { source, low_detail: detail == "low", at, is_new, separator };
                content.parts.push(Part::Image(image));
            }
            (None, Some(tool)) if part["type"] == "tool_reference" && !is_new => {
                content.parts.push(Part::Tool(tool.to_owned()));
            }
            (None, _) => content.push_text(self.part_text(part, at, is_new)?, self.separator),
        }
        Ok(())
    }

    /// The text of a message's content, which is a string or an array of parts. `is_new` is the message's value in
    /// [`new_messages`]. Unless it is true, a single part is an array of one part, null is empty, and other values become
    /// JSON text, because an error would repeat with every later turn.
    pub fn text(&self, content: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
        match content {
            Value::Null if !is_new => Ok(String::new()),
            part @ Value::Object(_) if !is_new && self.is_part(part) => self.part_text(part, at, is_new),
            Value::Bool(_) | Value::Number(_) | Value::Object(_) if !is_new => Ok(content.to_string()),
            _ => self.joined_text(content, at, is_new),
        }
    }

    /// True for a part of a known type, also if its fields are malformed.
    fn is_part(&self, value: &Value) -> bool {
        let is_known = |kind| self.types.contains(&kind) || media(kind).is_some() || kind == SEARCH_RESULT;
        value["type"].as_str().is_some_and(is_known)
    }

    /// The text of a string or of an array of parts.
    fn joined_text(&self, content: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
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

    /// The text of one part. Unless `is_new` is true, a sentence replaces a part that cannot be read. A compaction is never
    /// new.
    pub fn part_text(&self, part: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
        match self.readable_text(part, at, is_new) {
            Err(error) if !is_new || part["type"] == "compaction" => {
                tracing::info!(at, reason = error.message(), "part replaced by a sentence");
                Ok(replacement(part))
            }
            read => read,
        }
    }

    fn readable_text(&self, part: &Value, at: &str, is_new: bool) -> Result<String, ApiError> {
        if let Some(text) = file_text(part) {
            return Ok(if part["type"] == "document" { titled(part, &text) } else { text });
        }
        let source = &part["source"];
        let document = source["data"].as_str().filter(|_| source["type"] == "text");
        let text = part["text"].as_str().or(part["refusal"].as_str());
        if let Some(NestedBlocks { mut before, path, blocks }) = nested_blocks(part) {
            let text = self.joined_text(blocks, &format!("{at}.{path}"), is_new)?;
            before.push(&text);
            return Ok(before.join("\n"));
        }
        match (part["type"].as_str(), text) {
            (Some(kind), Some(text)) if self.types.contains(&kind) => Ok(text.to_owned()),
            (Some("document"), text) if document.or(text).is_some() => {
                Ok(titled(part, document.or(text).unwrap_or_default()))
            }
            (Some("compaction"), _) if part["content"].is_string() => {
                Ok(format!("{SUMMARY_INTRODUCTION}{}", part["content"].as_str().unwrap_or_default()))
            }
            (Some("browser_state"), _) if part["tabs"].is_array() => Ok(browser_state(part)),
            (Some(kind), _) if !self.types.contains(&kind) => Err(unreadable(kind, at)),
            _ => {
                let kind = self.types.first().unwrap_or(&"text");
                Err(ApiError::wrong_type(at, format!("must be {{\"type\": \"{kind}\", \"text\": ...}}.")))
            }
        }
    }
}

/// Removes the parts with reasoning from an assistant's content, and returns their text.
pub fn take_thoughts(content: &mut Value) -> String {
    let Value::Array(parts) = content else { return String::new() };
    let is_thought = |part: &mut Value| part["type"].as_str().is_some_and(|kind| THOUGHTS.contains(&kind));
    parts.extract_if(.., is_thought).map(|part| thought(&part)).collect()
}

/// The text of a part with reasoning: a string, or an array of text parts.
fn thought(part: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match &part["thinking"] {
        Value::Array(parts) => parts.iter().map(|part| text(&part["text"])).collect(),
        Value::String(thinking) => thinking.clone(),
        _ => text(&part["text"]),
    }
}

/// The source of the image in an image part, and the part's `detail`. `None` for other parts.
///
/// OpenAI's APIs send `image_url` and `input_image`. Anthropic's API sends `image` with a `source`. Hugging Face's
/// clients send `image` with a URL.
fn image_source(part: &Value) -> Option<(ImageSource, &str)> {
    let (url, detail) = match part["type"].as_str()? {
        kind @ ("image_url" | "input_image" | "computer_screenshot") => {
            let url = part.get("image_url").unwrap_or(&Value::Null);
            let detail = url["detail"].as_str().or(part["detail"].as_str());
            if kind != "image_url" && url.is_null() && !part["file_id"].is_null() {
                return Some((ImageSource::Invalid("is a file_id; send it as a data: URL"), ""));
            }
            (url.as_str().or(url["url"].as_str()), detail)
        }
        "image" => {
            let source = &part["source"];
            if let Some(data) = source["data"].as_str().filter(|_| source["type"] == "base64") {
                return Some((ImageSource::Base64(data.to_owned()), ""));
            }
            let url = source["url"].as_str().or(part["image"].as_str()).or(part["url"].as_str());
            if url.is_none() && !source["file_id"].is_null() {
                return Some((ImageSource::Invalid("is a file_id; send it as base64"), ""));
            }
            (url, part["detail"].as_str())
        }
        _ => return None,
    };
    Some((url.map_or(ImageSource::Invalid("has no URL"), from_url), detail.unwrap_or_default()))
}

fn from_url(url: &str) -> ImageSource {
    let scheme = |scheme: &str| url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
    if scheme("http://") || scheme("https://") {
        return ImageSource::Url(url.to_owned());
    }
    if !scheme("data:") {
        return ImageSource::Invalid("has a URL that is neither data: nor http(s):");
    }
    match url.split_once(',') {
        Some((head, data)) if head.to_ascii_lowercase().ends_with(";base64") => ImageSource::Base64(data.to_owned()),
        _ => ImageSource::Invalid("has a data: URL that is not base64"),
    }
}

/// The name and the content of a file, if the part has a text file as base64 or as a `data:` URL. Other files, such as
/// PDF, are not read.
fn file_text(part: &Value) -> Option<String> {
    let (data, name) = match part["type"].as_str()? {
        "input_file" => (&part["file_data"], &part["filename"]),
        "file" => (&part["file"]["file_data"], &part["file"]["filename"]),
        "document" if part["source"]["type"] == "base64" => (&part["source"]["data"], &Value::Null),
        _ => return None,
    };
    let data = data.as_str()?;
    let base64 = data.split_once(";base64,").map_or(data, |(_, base64)| base64);
    let text = String::from_utf8(BASE64.decode(base64).ok()?).ok()?;
    let is_text = !text.contains('\0') && !text.starts_with("%PDF-");
    is_text.then(|| name.as_str().into_iter().chain([&*text]).collect::<Vec<_>>().join("\n"))
}

/// The text of a document after its title and the context that the client gives.
fn titled(document: &Value, text: &str) -> String {
    let lines = document_lines(document).into_iter().chain([text]);
    lines.collect::<Vec<_>>().join("\n")
}

/// The title of a document, and the context that the client gives.
fn document_lines(document: &Value) -> Vec<&str> {
    [document["title"].as_str(), document["context"].as_str()].into_iter().flatten().collect()
}

/// The tabs of a browser, and what changed in them.
fn browser_state(part: &Value) -> String {
    let fields = ["tabs", "state_changes"].into_iter().filter(|name| !part[name].is_null());
    let texts = fields.map(|name| format!("{name}: {}", part[name]));
    texts.collect::<Vec<_>>().join("\n")
}

/// The blocks inside a document or a search result.
struct NestedBlocks<'a> {
    /// The lines before the blocks.
    before: Vec<&'a str>,
    /// Path of the blocks in their part.
    path: &'static str,
    blocks: &'a Value,
}

fn nested_blocks(part: &Value) -> Option<NestedBlocks<'_>> {
    let source = &part["source"];
    match part["type"].as_str()? {
        "document" if source["type"] == "content" => {
            let blocks = &source["content"];
            Some(NestedBlocks { before: document_lines(part), path: "source.content", blocks })
        }
        SEARCH_RESULT => {
            let before = [part["title"].as_str(), source.as_str()].into_iter().flatten().collect();
            Some(NestedBlocks { before, path: "content", blocks: &part["content"] })
        }
        _ => None,
    }
}

/// The kind of media in a part of type `kind`. `None` for an unknown type.
fn media(kind: &str) -> Option<&'static str> {
    match kind {
        "image" | "image_url" | "input_image" | "computer_screenshot" => Some("image"),
        "audio" | "audio_url" | "input_audio" => Some("audio"),
        "video" | "video_url" | "input_video" => Some("video"),
        "file" | "input_file" | "document" => Some("file"),
        _ => None,
    }
}

/// The error for a part of type `kind`, which the server cannot read.
fn unreadable(kind: &str, at: &str) -> ApiError {
    let text = match media(kind) {
        Some("image") => format!("{at} has type `{kind}`; only user messages and tool results can have images."),
        _ => format!("{at} has type `{}`; this server reads text and images only.", quote(kind)),
    };
    ApiError::unsupported(at, text)
}

/// The sentence that replaces a part or an item that the server cannot read.
pub fn replacement(part: &Value) -> String {
    let Some(kind) = part["type"].as_str() else {
        return "[A block without a type is not shown: this server cannot read it]".into();
    };
    match media(kind) {
        Some(name) => format!("[{name} not shown: this model cannot read it]"),
        None => format!("[A block of type `{}` is not shown: this server cannot read it]", quote(kind)),
    }
}

/// The sentence that replaces a reference to a tool that the start of the prompt or an earlier message defines, or that
/// the request does not have.
pub fn reference_sentence(tool: &str) -> String {
    format!("[The tool `{}` was found. Call it if it is defined above]", quote(tool))
}

/// The origin of a message or an item of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageOrigin {
    Assistant,
    User,
    /// The result of a tool. In Anthropic's API, a user message with results.
    Tool,
    Other,
}

/// For each message, true if the message is new: a part that the model cannot read is an error there.
///
/// Messages after the last message of the assistant or of a tool are new, with two exceptions, because an agent or a page
/// sends them again, and an error would repeat for ever. Only the last user message is new. After a tool's result, no user
/// message is new, because agents send the images of a result in a user message.
pub fn new_messages(messages: &[Value], origin: impl Fn(&Value) -> MessageOrigin) -> Vec<bool> {
    let origins: Vec<MessageOrigin> = messages.iter().map(origin).collect();
    let last = |kind: MessageOrigin| origins.iter().rposition(|origin| *origin == kind);
    let answered = last(MessageOrigin::Assistant).map_or(0, |last| last + 1);
    let last_user = last(MessageOrigin::User);
    let after_tool = origins[answered..].contains(&MessageOrigin::Tool);
    let after_results = last(MessageOrigin::Tool).map_or(0, |last| last + 1);
    let is_new = |(index, origin): (usize, &MessageOrigin)| match origin {
        _ if index < answered.max(after_results) => false,
        MessageOrigin::User => !after_tool && last_user == Some(index),
        _ => true,
    };
    origins.iter().enumerate().map(is_new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_last_user_message_is_new() {
        let new = |origins: &str| {
            let messages: Vec<Value> = origins.chars().map(|origin| origin.to_string().into()).collect();
            let found = new_messages(&messages, |message| match message.as_str().unwrap() {
                "a" => MessageOrigin::Assistant,
                "u" => MessageOrigin::User,
                "t" => MessageOrigin::Tool,
                _ => MessageOrigin::Other,
            });
            found.iter().map(|is_new| if *is_new { '1' } else { '0' }).collect::<String>()
        };
        for (origins, expected) in [
            ("", ""),
            ("u", "1"),
            ("su", "11"),
            ("uu", "01"),
            ("us", "11"),
            ("uau", "001"),
            ("uauu", "0001"),
            ("ua", "00"),
            ("uat", "000"),
            ("uatu", "0000"),
            ("uattuu", "000000"),
            ("uatau", "00001"),
            ("uasts", "00001"),
        ] {
            assert_eq!(new(origins), expected, "{origins}");
        }
    }

    #[test]
    fn image_parts_of_all_apis_are_read() {
        let base64 = |data: &str| ImageSource::Base64(data.into());
        let url = ImageSource::Url("https://a/b".into());
        for (part, source, detail) in [
            (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}), base64("AA=="), ""),
            (json!({"type": "image_url", "image_url": "DATA:;BASE64,AA"}), base64("AA"), ""),
            (json!({"type": "image_url", "image_url": {"url": "data:;base64,A", "detail": "low"}}), base64("A"), "low"),
            (json!({"type": "input_image", "image_url": "data:;base64,A", "detail": "high"}), base64("A"), "high"),
            (json!({"type": "image", "source": {"type": "base64", "data": "QQ"}}), base64("QQ"), ""),
            (json!({"type": "image", "source": {"type": "url", "url": "https://a/b"}}), url, ""),
            (json!({"type": "image", "image": "data:;base64,A"}), base64("A"), ""),
        ] {
            assert_eq!(image_source(&part), Some((source, detail)), "{part}");
        }
        for part in [
            json!({"type": "image_url", "image_url": {}}),
            json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
            json!({"type": "image_url", "image_url": "data:image/png,abc"}),
            json!({"type": "input_image", "file_id": "f"}),
            json!({"type": "image", "image": 0}),
        ] {
            assert!(matches!(image_source(&part), Some((ImageSource::Invalid(_), _))), "{part}");
        }
        for part in [
            json!({"type": "input_image", "file_id": "f"}),
            json!({"type": "image", "source": {"type": "file", "file_id": "f"}}),
        ] {
            let Some((ImageSource::Invalid(problem), _)) = image_source(&part) else { panic!("{part}") };
            assert!(problem.starts_with("is a file_id; send it as "), "{problem}");
        }
        assert_eq!(image_source(&json!({"type": "text", "text": "x"})), None);
    }

    #[test]
    fn content_keeps_order_of_text_and_images() {
        let format = PartFormat { types: &["text"], separator: "+" };
        let text_part = |text: &str| json!({"type": "text", "text": text});
        let image = json!({"type": "image_url", "image_url": "data:;base64,A"});
        let parts = json!([text_part("a"), text_part("b"), image, text_part("c"), image]);
        let content = format.content(&parts, "m", true).unwrap();
        let found = content.parts.iter().map(|part| match part {
            Part::Text(text) => &**text,
            Part::Image(image) => &image.at,
            Part::Tool(name) => name,
        });
        assert_eq!(found.collect::<Vec<_>>(), ["a+b", "m[2]", "c", "m[4]"]);
        let text = |parts: Value| format.content(&parts, "m", true).unwrap().text().unwrap().to_owned();
        assert_eq!(text(json!([text_part("a"), text_part("b")])), "a+b");
        assert_eq!(text(json!([])), "");
    }

    #[test]
    fn search_results_and_documents_are_text() {
        let format = PartFormat { types: &["text"], separator: "\n\n" };
        let blocks = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let found = json!({"type": "search_result", "source": "https://x", "title": "T", "content": blocks,
                           "citations": {"enabled": true}});
        let document = |source: Value| json!({"type": "document", "source": source, "title": "T", "context": "C"});
        let plain = document(json!({"type": "text", "media_type": "text/plain", "data": "d"}));
        let parts = document(json!({"type": "content", "content": blocks}));
        let text = format.text(&json!([found, plain, parts]), "m", true).unwrap();
        assert_eq!(text, "T\nhttps://x\na\n\nb\n\nT\nC\nd\n\nT\nC\na\n\nb");
        let error = format.text(&json!([{"type": "search_result", "content": 5}]), "m", true).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "m[0].content");
    }

    #[test]
    fn tabs_of_a_browser_are_text() {
        let format = PartFormat { types: &["text"], separator: "" };
        let tab = json!({"tab_id": "1", "title": "T", "url": "https://x", "active": true});
        let state =
            json!({"type": "browser_state", "tabs": [tab], "state_changes": [{"type": "tab_opened", "tab_id": "1"}]});
        let text = format.text(&json!([state]), "m", false).unwrap();
        let tabs = r#"tabs: [{"tab_id":"1","title":"T","url":"https://x","active":true}]"#;
        assert_eq!(text, format!("{tabs}\nstate_changes: [{{\"type\":\"tab_opened\",\"tab_id\":\"1\"}}]"));
    }

    #[test]
    fn images_inside_documents_are_read() {
        let format = PartFormat { types: &["text"], separator: "" };
        let blocks = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "data:;base64,A"}]);
        let document = json!({"type": "document", "title": "T", "source": {"type": "content", "content": blocks}});
        let found = json!({"type": "search_result", "title": "T", "content": blocks});
        for (part, at) in [(document, "m[0].source.content[1]"), (found, "m[0].content[1]")] {
            for is_new in [true, false] {
                let content = format.content(&json!([part]), "m", is_new).unwrap();
                let [Part::Text(text), Part::Image(image)] = &*content.parts else { panic!("{content:?}") };
                assert_eq!((&**text, &*image.at, image.is_new), ("Ta", at, is_new));
            }
        }
    }

    #[test]
    fn malformed_content_in_history_becomes_text() {
        let format = PartFormat { types: &["text"], separator: "" };
        for (content, text) in [
            (Value::Null, ""),
            (json!(5), "5"),
            (json!(true), "true"),
            (json!({"a": [1]}), "{\"a\":[1]}"),
            (json!({"type": "Point", "x": 1}), "{\"type\":\"Point\",\"x\":1}"),
            (json!({"type": "text", "text": "x"}), "x"),
            (json!({"type": "input_audio"}), "[audio not shown: this model cannot read it]"),
        ] {
            assert_eq!(format.text(&content, "m", false).unwrap(), text);
            assert_eq!(format.content(&content, "m", false).unwrap().text(), Some(text));
            assert_eq!(format.content(&content, "m", true).unwrap_err().status, 400, "{content}");
        }
        let image = json!({"type": "image_url", "image_url": "data:;base64,A"});
        assert!(matches!(&*format.content(&image, "m", false).unwrap().parts, [Part::Image(_)]));
    }

    #[test]
    fn text_files_are_read() {
        let format = PartFormat { types: &["text"], separator: "" };
        let base64 = |bytes: &[u8]| BASE64.encode(bytes);
        let url = |kind: &str, bytes: &[u8]| format!("data:{kind};base64,{}", base64(bytes));
        let input = |data: String| json!({"type": "input_file", "filename": "a.txt", "file_data": data});
        let source = |kind: &str, bytes: &[u8]| {
            let source = json!({"type": "base64", "media_type": kind, "data": base64(bytes)});
            json!({"type": "document", "source": source, "title": "a.txt"})
        };
        let line = "Zwölf\n".as_bytes();
        for part in [
            input(url("text/plain", line)),
            input(url("application/json;charset=utf-8", line)),
            input(base64(line)),
            json!({"type": "file", "file": {"filename": "a.txt", "file_data": url("text/x-python", line)}}),
            source("text/plain", line),
        ] {
            assert_eq!(format.part_text(&part, "m", true).unwrap(), "a.txt\nZwölf\n", "{part}");
        }
        let unnamed = json!({"type": "input_file", "file_data": base64(b"x")});
        assert_eq!(format.part_text(&unnamed, "m", true).unwrap(), "x");
        for part in [
            input(url("application/pdf", b"%PDF-1.4")),
            input(base64(&[0xff, 0xfe, 1])),
            input(base64(b"a\0b")),
            input("no base64!".into()),
            json!({"type": "input_file", "file_id": "file_1"}),
            json!({"type": "file", "file": {"file_id": "file_1"}}),
            json!({"type": "file", "file": 5}),
            source("application/pdf", b"%PDF-1.4"),
        ] {
            assert_eq!(format.part_text(&part, "m", true).unwrap_err().status, 400, "{part}");
            assert_eq!(format.part_text(&part, "m", false).unwrap(), "[file not shown: this model cannot read it]");
        }
    }

    #[test]
    fn unknown_parts_become_sentences_in_history() {
        let format = PartFormat { types: &["text"], separator: "" };
        for (part, sentence) in [
            (json!({"type": "weird"}), "[A block of type `weird` is not shown: this server cannot read it]"),
            (json!({"type": "text"}), "[A block of type `text` is not shown: this server cannot read it]"),
            (json!({"type": 5}), "[A block without a type is not shown: this server cannot read it]"),
            (json!("x"), "[A block without a type is not shown: this server cannot read it]"),
            (json!({"type": "search_result", "content": 5}), "[A block of type `search_result` is not shown: this"),
            (json!({"type": "document", "source": {"type": "url"}}), "[file not shown: this model cannot read it]"),
            (json!({"type": "input_audio", "input_audio": {}}), "[audio not shown: this model cannot read it]"),
            (json!({"type": "tool_reference"}), "[A block of type `tool_reference` is not shown: this server"),
        ] {
            let text = format.part_text(&part, "m", false).unwrap();
            assert!(text.starts_with(sentence) && text.ends_with(']'), "{part}: {text}");
            assert_eq!(format.part_text(&part, "m", true).unwrap_err().status, 400, "{part}");
        }
        let inner = json!({"type": "search_result", "content": [{"type": "weird"}, {"type": "text", "text": "found"}]});
        assert!(format.part_text(&inner, "m", false).unwrap().ends_with("cannot read it]found"));
        let long = format.part_text(&json!({"type": "x".repeat(9_999)}), "m", false).unwrap();
        assert!(long.len() < 300, "{}", long.len());
    }
}
