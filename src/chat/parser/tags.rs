//! The markup of reasoning and tool calls, found in text that may break off anywhere.

pub(super) const THINK: &str = "<think>";
pub(super) const THOUGHT: &str = "</think>";
pub(super) const CALL: &str = "<tool_call>";
pub(super) const CALL_END: &str = "</tool_call>";
pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";

pub(super) enum Header {
    /// `<tag=NAME>`, and its length.
    Named(String, usize),
    /// The text so far could become such a tag.
    Unfinished,
    Other,
}

/// Looks for `<tag=NAME>` (`tag` being `<tag=`) at the beginning of `text`.
pub(super) fn header(text: &str, tag: &str) -> Header {
    let Some(after) = text.strip_prefix(tag) else {
        return if tag.starts_with(text) { Header::Unfinished } else { Header::Other };
    };
    let Some(end) = after.find(['>', '<', '\n']) else { return Header::Unfinished };
    let name = after[..end].trim();
    if name.is_empty() || !after[end..].starts_with('>') {
        return Header::Other;
    }
    Header::Named(name.into(), tag.len() + end + 1)
}

pub(super) enum ValueEnd {
    /// The value's closing tag is here.
    At(usize),
    /// There is none before here.
    NotBefore(usize),
    /// There is none, and the text has ended.
    Cut,
}

/// Finds a value's end: a `</parameter>` that another tag of the call follows, or the end of the text.
pub(super) fn find_end(text: &str, last: bool) -> ValueEnd {
    for (at, _) in text.match_indices(PARAMETER_END) {
        let after = text[at + PARAMETER_END.len()..].trim_start();
        let tags = [PARAMETER, FUNCTION_END, CALL_END];
        if tags.iter().any(|tag| after.starts_with(tag)) {
            return ValueEnd::At(at);
        }
        if tags.iter().any(|tag| tag.starts_with(after)) {
            return if last { ValueEnd::At(at) } else { ValueEnd::NotBefore(at) };
        }
    }
    if last { ValueEnd::Cut } else { ValueEnd::NotBefore(text.len() - partial(text, PARAMETER_END)) }
}

/// Length of the longest end of `text` that is a beginning of `tag`, but not all of it.
pub(super) fn partial(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&length| text.ends_with(&tag[..length])).unwrap_or(0)
}
