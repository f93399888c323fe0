//! Reads the tags of tool calls, also as models misspell them, in text that may end anywhere.

pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";
pub(super) const TOOL_CALL: &str = "<tool_call>";

/// Maximum length of a name in a tag.
const MAX_NAME: usize = 1000;
/// Maximum length of a misspelt closing tag.
const MAX_CLOSING_TAG: usize = 32;

/// State of the input: more text can follow, or the answer has ended for a reason.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum InputEnd {
    MoreToCome,
    /// The model ended its answer.
    Complete,
    /// The token limit ended the answer.
    Truncated,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TagKind {
    ToolCall,
    Function(String),
    Parameter(String),
    EndToolCall,
    EndFunction,
    EndParameter,
}

impl TagKind {
    pub fn closes(&self) -> bool {
        matches!(self, Self::EndToolCall | Self::EndFunction | Self::EndParameter)
    }
}

#[derive(Debug)]
pub(super) struct Tag {
    pub kind: TagKind,
    pub length: usize,
    /// False if the tag is misspelt: a wrong closing tag, a missing `>`, or `name=`.
    pub is_exact: bool,
}

/// Result of [`tag_at`].
#[derive(Debug)]
pub(super) enum TagAt {
    Found(Tag),
    /// The text may still become a tag.
    Unfinished,
    Other,
}

/// Reads the tag at the start of `text`.
pub(super) fn tag_at(text: &str) -> TagAt {
    if text.starts_with("</") {
        return closing_tag(text);
    }
    if text.starts_with(TOOL_CALL) {
        return found(TagKind::ToolCall, TOOL_CALL.len(), true);
    }
    for (word, kind) in [("<function", TagKind::Function as fn(String) -> TagKind), ("<parameter", TagKind::Parameter)]
    {
        if let Some(after) = text.strip_prefix(word) {
            return header(after, word.len(), kind);
        }
    }
    let may_be_tag = [TOOL_CALL, "<function", "<parameter", "</"].iter().any(|tag| tag.starts_with(text));
    if may_be_tag { TagAt::Unfinished } else { TagAt::Other }
}

fn found(kind: TagKind, length: usize, is_exact: bool) -> TagAt {
    TagAt::Found(Tag { kind, length, is_exact })
}

/// Reads the rest of `<function=NAME>` or `<parameter=NAME>` after the word, which has `word` bytes.
fn header(after: &str, word: usize, kind: fn(String) -> TagKind) -> TagAt {
    let Some(end) = after.find(['>', '<', '\n']) else {
        return if after.len() > MAX_NAME { TagAt::Other } else { TagAt::Unfinished };
    };
    // A name that is longer is no name, wherever the text is cut.
    if end > MAX_NAME {
        return TagAt::Other;
    }
    let inner = after[..end].trim();
    let is_closed = after[end..].starts_with('>');
    let is_attribute = after.starts_with([' ', '\t']) && inner.starts_with("name");
    let value = if is_attribute { inner["name".len()..].trim_start() } else { inner };
    let Some(name) = value.strip_prefix('=') else { return TagAt::Other };
    let name = name.trim();
    let quoted = ['"', '\''].iter().find_map(|&mark| name.strip_prefix(mark)?.strip_suffix(mark));
    let quoted = quoted.filter(|name| !is_attribute || !name.contains(['"', '\'']));
    let name = quoted.unwrap_or(name).trim();
    // `<parameter name="a" type="b">` and `<parameter name="a"/>` are XML.
    let is_xml = is_attribute && quoted.is_none() && name.contains([' ', '"', '\'']);
    if name.is_empty() || is_xml || after[end..].starts_with('<') {
        return TagAt::Other;
    }
    // A carriage return belongs to the line end.
    let end = if is_closed { end + 1 } else { after[..end].trim_end_matches('\r').len() };
    found(kind(name.into()), word + end, is_closed && !is_attribute)
}

/// Reads a closing tag. Models also write `</ function>`, `</param>`, `</parameter/>`, `</parameter_function>`, and leave
/// out the `>` at the end of a line.
fn closing_tag(text: &str) -> TagAt {
    let inner = &text[2..];
    let is_part = |c: char| c.is_ascii_alphanumeric() || " _-/".contains(c);
    let Some(end) = inner.find(|c| !is_part(c)) else {
        return if inner.len() > MAX_CLOSING_TAG { TagAt::Other } else { TagAt::Unfinished };
    };
    let is_closed = inner[end..].starts_with('>');
    if end > MAX_CLOSING_TAG || !(is_closed || inner[end..].starts_with(['\r', '\n', '<'])) {
        return TagAt::Other;
    }
    let word = inner[..end].trim().to_ascii_lowercase().replace("tool call", "tool_call");
    let (kind, exact) = match word.as_str() {
        word if word.contains(' ') => return TagAt::Other,
        word if word.starts_with("param") => (TagKind::EndParameter, "</parameter>"),
        word if word.starts_with("func") => (TagKind::EndFunction, "</function>"),
        word if word.starts_with("tool") && word.contains("call") => (TagKind::EndToolCall, "</tool_call>"),
        _ => return TagAt::Other,
    };
    found(kind, 2 + end + usize::from(is_closed), text.starts_with(exact))
}
