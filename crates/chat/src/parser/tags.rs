//! Finds the tags of reasoning and tool calls in text that may end anywhere.

pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";
pub(super) const TOOL_CALL: &str = "<tool_call>";
pub(super) const END_TOOL_CALL: &str = "</tool_call>";
pub(super) const FUNCTION: &str = "<function=";
pub(super) const END_FUNCTION: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const END_PARAMETER: &str = "</parameter>";

/// Result of [`header`].
pub(super) enum TagHeader {
    /// The name in `<tag=NAME>`, and the length of the whole tag.
    Named(String, usize),
    /// The text may still become a tag `<tag=NAME>`.
    Unfinished,
    Other,
}

/// Reads `<tag=NAME>` at the start of `text`. `tag` is `<tag=`.
pub(super) fn header(text: &str, tag: &str) -> TagHeader {
    let Some(after) = text.strip_prefix(tag) else {
        return if tag.starts_with(text) { TagHeader::Unfinished } else { TagHeader::Other };
    };
    let Some(end) = after.find(['>', '<', '\n']) else { return TagHeader::Unfinished };
    let name = after[..end].trim();
    if name.is_empty() || !after[end..].starts_with('>') {
        return TagHeader::Other;
    }
    TagHeader::Named(name.into(), tag.len() + end + 1)
}

/// Result of [`find_end`].
pub(super) enum ValueEnd {
    /// Offset of the closing tag of the value.
    At(usize),
    /// The value does not end before this offset.
    NotBefore(usize),
    /// There is no closing tag, and no more text follows.
    Missing,
}

/// Finds the end of a value: a `</parameter>` before another tag of the call or the end of the text. `last` is true if
/// no more text follows.
pub(super) fn find_end(text: &str, last: bool) -> ValueEnd {
    for (at, _) in text.match_indices(END_PARAMETER) {
        let after = text[at + END_PARAMETER.len()..].trim_start();
        let tags = [PARAMETER, END_FUNCTION, END_TOOL_CALL];
        if tags.iter().any(|tag| after.starts_with(tag)) {
            return ValueEnd::At(at);
        }
        if tags.iter().any(|tag| tag.starts_with(after)) {
            return if last { ValueEnd::At(at) } else { ValueEnd::NotBefore(at) };
        }
    }
    if last { ValueEnd::Missing } else { ValueEnd::NotBefore(text.len() - partial(text, END_PARAMETER)) }
}

/// Length of the longest proper prefix of `tag` that `text` ends with.
pub(super) fn partial(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&length| text.ends_with(&tag[..length])).unwrap_or(0)
}
