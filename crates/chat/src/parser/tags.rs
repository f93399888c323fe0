//! Reads the tags of tool calls, also as models misspell them, in text that may end anywhere.

pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";

/// The words of opening tags. Models also write those of other formats.
const WORDS: [&str; 7] =
    ["tool_call", "tool_calls", "function_call", "function_calls", "function", "invoke", "parameter"];
/// Maximum length of a name in a tag.
pub(super) const MAX_NAME: usize = 1000;
/// Maximum length of a misspelt closing tag.
const MAX_CLOSING_TAG: usize = 80;
/// Maximum number of `<tool_call>` before a call.
const MAX_REPEATED: usize = 4;
/// Maximum number of bytes of white space before a tag. An answer of white space must not be read again and again.
pub(super) const MAX_GAP: usize = 1000;

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
    /// False if the tag is misspelt: a wrong closing tag, a missing `>`, `name=`, or attributes or a value after the
    /// name.
    pub is_exact: bool,
}

/// Result of reading the start of a text.
#[derive(Debug)]
pub(super) enum Reading<T> {
    Found(T),
    /// More text decides.
    Unfinished,
    Other,
}

pub(super) type TagAt = Reading<Tag>;

impl<T> Reading<T> {
    pub fn and_then<U>(self, convert: impl FnOnce(T) -> Option<U>) -> Reading<U> {
        match self {
            Self::Found(found) => convert(found).map_or(Reading::Other, Reading::Found),
            Self::Unfinished => Reading::Unfinished,
            Self::Other => Reading::Other,
        }
    }
}

/// Reads the tag at the start of `text`. Models also write `<|tool_call|>`, `<Function=NAME>` and `<invoke name="NAME">`.
pub(super) fn tag_at(text: &str) -> TagAt {
    if ["</", "<|/"].iter().any(|start| text.starts_with(start)) {
        return closing_tag(text);
    }
    let Some(inner) = text.strip_prefix('<') else {
        return if text.is_empty() { TagAt::Unfinished } else { TagAt::Other };
    };
    let inner = inner.strip_prefix('|').unwrap_or(inner);
    let is_part = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_';
    let length = inner.bytes().take(MAX_CLOSING_TAG).take_while(is_part).count();
    let (word, after) = inner.split_at(length);
    let start = text.len() - after.len();
    let lower = word.to_ascii_lowercase();
    let is_plain = lower == word && start == 1 + length;
    match lower.as_str() {
        _ if after.is_empty() => {
            if WORDS.iter().any(|known| known.starts_with(&lower)) {
                TagAt::Unfinished
            } else {
                TagAt::Other
            }
        }
        // Models also write it around JSON.
        "function" if after.starts_with('>') => found(TagKind::ToolCall, start + 1, false),
        "function" => header(after, start, TagKind::Function, is_plain),
        "invoke" => header(after, start, TagKind::Function, false),
        "parameter" => header(after, start, TagKind::Parameter, is_plain),
        known if WORDS.contains(&known) => {
            let end = after.strip_prefix([' ', '|']).unwrap_or(after);
            match end.chars().next() {
                Some('>') => found(TagKind::ToolCall, text.len() - end.len() + 1, text.starts_with("<tool_call>")),
                Some('\r' | '\n' | '<') => found(TagKind::ToolCall, start, false),
                Some(_) => TagAt::Other,
                None => TagAt::Unfinished,
            }
        }
        _ => TagAt::Other,
    }
}

pub(super) fn found(kind: TagKind, length: usize, is_exact: bool) -> TagAt {
    TagAt::Found(Tag { kind, length, is_exact })
}

/// Reads the rest of `<function=NAME>` or `<parameter=NAME>` after the word, which ends at `word`.
fn header(after: &str, word: usize, kind: fn(String) -> TagKind, is_plain: bool) -> TagAt {
    let is_parameter = matches!(kind(String::new()), TagKind::Parameter(_));
    let end = match after.find(['>', '<', '\n']) {
        // A name that is longer is no name, wherever the text is cut.
        end if end.unwrap_or(after.len()) > MAX_NAME => return TagAt::Other,
        Some(end) => end,
        None => return TagAt::Unfinished,
    };
    let whole = after[..end].trim();
    let inner = if is_parameter { without_attributes(whole) } else { whole };
    let is_closed = after[end..].starts_with('>');
    let is_attribute = after.starts_with([' ', '\t']) && inner.starts_with("name");
    let value = if is_attribute { inner["name".len()..].trim_start() } else { inner };
    let Some(name) = value.strip_prefix('=') else { return TagAt::Other };
    let name = name.trim();
    let quoted = ['"', '\''].iter().find_map(|&mark| name.strip_prefix(mark)?.strip_suffix(mark));
    let quoted = quoted.filter(|name| !is_attribute || !name.contains(['"', '\'']));
    let name = quoted.unwrap_or(name).trim();
    // Models also close the tag of a call without parameters at once.
    let name = if is_parameter { name } else { name.trim_end_matches(['/', ' ']) };
    // `<function name="a" type="b">` and `<parameter name="a"/>` are XML.
    let is_xml = is_attribute && quoted.is_none() && name.contains([' ', '"', '\'']);
    if name.is_empty() || is_xml || after[end..].starts_with('<') {
        return TagAt::Other;
    }
    // A carriage return belongs to the line end.
    let end = if is_closed { end + 1 } else { after[..end].trim_end_matches('\r').len() };
    found(kind(name.into()), word + end, is_plain && is_closed && !is_attribute && inner == whole)
}

/// The text before attributes such as `type="string"`, which models of other formats write after the name of a parameter.
fn without_attributes(text: &str) -> &str {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let before = ['"', '\''].into_iter().find_map(|mark| text.strip_suffix(mark)?.rsplit_once(mark));
    let Some(attribute) = before.and_then(|(before, _)| before.trim_end().strip_suffix('=')) else { return text };
    let attribute = attribute.trim_end();
    let name = attribute.trim_end_matches(is_part);
    // The first word is no such attribute. An attribute `value` is no markup.
    let is_attribute = name.ends_with([' ', '\t']) && !["", "value"].contains(&&attribute[name.len()..]);
    if is_attribute { without_attributes(name.trim_end()) } else { text }
}

/// Reads a closing tag. Models also write `</ function>`, `</param>`, `</parameter/>`, `</parameter=NAME>`,
/// `</parameter_function>`, and leave out the `>` at the end of a line.
fn closing_tag(text: &str) -> TagAt {
    let start = if text.starts_with("</") { 2 } else { 3 };
    let inner = &text[start..];
    let is_part = |c: char| c.is_ascii_alphanumeric() || " _-/|=.:".contains(c);
    let Some(end) = inner.find(|c| !is_part(c)) else {
        return if inner.len() > MAX_CLOSING_TAG { TagAt::Other } else { TagAt::Unfinished };
    };
    let is_closed = inner[end..].starts_with('>');
    if end > MAX_CLOSING_TAG || !(is_closed || inner[end..].starts_with(['\r', '\n', '<'])) {
        return TagAt::Other;
    }
    let word = inner[..end].split('=').next().unwrap_or_default();
    let word = word.trim_matches([' ', '|']).to_ascii_lowercase().replace("tool call", "tool_call");
    let (kind, exact) = match word.as_str() {
        word if word.contains([' ', '.', ':']) => return TagAt::Other,
        word if word.starts_with("param") => (TagKind::EndParameter, "</parameter>"),
        word if word.starts_with("function_call") => (TagKind::EndToolCall, "</tool_call>"),
        word if word.starts_with("func") || word == "invoke" => (TagKind::EndFunction, "</function>"),
        word if word.starts_with("tool") && (word.contains("call") || word == "tool_cal") => {
            (TagKind::EndToolCall, "</tool_call>")
        }
        _ => return TagAt::Other,
    };
    found(kind, start + end + usize::from(is_closed), text.starts_with(exact))
}

/// Reads `<NAME>`, `</NAME>`, or the start of `<NAME ATTRIBUTES>`. No tag if the name has a `=` or `</NAME>` ends a call.
pub(super) fn own_tag(text: &str, name: &str) -> TagAt {
    let Some(tag) = text.strip_prefix('<') else { return TagAt::Other };
    let inner = tag.strip_prefix('/').unwrap_or(tag);
    let closes = inner.len() < tag.len();
    let Some(after) = inner.strip_prefix(name) else {
        return if name.starts_with(inner) { TagAt::Unfinished } else { TagAt::Other };
    };
    if !may_be_tag(name) {
        return TagAt::Other;
    }
    let kind = if closes { TagKind::EndParameter } else { TagKind::Parameter(name.into()) };
    let length = text.len() - after.len();
    match after.chars().next() {
        None => TagAt::Unfinished,
        Some('>') => found(kind, length + 1, true),
        Some(c) if !closes && c.is_whitespace() => found(kind, length, true),
        Some(_) => TagAt::Other,
    }
}

fn may_be_tag(name: &str) -> bool {
    let end = tag_at(&format!("</{name}>"));
    let is_other = matches!(end, TagAt::Found(Tag { kind, .. }) if kind != TagKind::EndParameter);
    !name.is_empty() && !name.contains('=') && !is_other
}

/// The text after one or more `<tool_call>`. `None` if too much white space follows one.
pub(super) fn after_tool_calls(mut text: &str) -> Option<&str> {
    for _ in 0..MAX_REPEATED {
        let TagAt::Found(Tag { kind: TagKind::ToolCall, length, .. }) = tag_at(text) else { break };
        text = after_opening(&text[length..])?;
    }
    Some(text)
}

/// True for white space, and for characters without width, which models write between tags.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}')
}

/// The text after white space. `None` if there is too much white space to wait for a tag after it.
pub(super) fn after_gap(text: &str) -> Option<&str> {
    let after = text.trim_start_matches(is_space);
    (text.len() - after.len() <= MAX_GAP).then_some(after)
}

/// The text after white space and the start of a Markdown fence, which models write around JSON. Empty if more text
/// decides.
pub(super) fn after_opening(text: &str) -> Option<&str> {
    let after = after_gap(text)?;
    let info = after.trim_start_matches('`');
    let marks = after.len() - info.len();
    let rest = info.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
    if marks == 0 || marks > 3 || info.len() - rest.len() > MAX_CLOSING_TAG {
        return Some(after);
    }
    match rest.chars().next() {
        None => Some(""),
        Some('\r' | '\n') if marks == 3 => after_gap(rest),
        Some(_) => Some(after),
    }
}
