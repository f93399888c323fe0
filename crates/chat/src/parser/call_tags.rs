//! Tags of a call that only the names of the request's tools and of their parameters explain.

use super::{
    argument::PendingCall,
    declared::Tools,
    tags::{MAX_NAME, Tag, TagAt, TagKind, after_gap, found, found_name, own_tag, tag_at},
};

impl Tools {
    /// A call of a tool.
    pub fn call(&self, function: &str) -> PendingCall {
        PendingCall { name: function.to_owned(), parameters: self.parameters(function), ..PendingCall::default() }
    }

    /// Reads the tag at the start of `text`. Models also write `<parameter=TOOL>` before the first parameter of a call, and
    /// `<parameter=NAME VALUE`. `call` is the call that the text belongs to.
    pub fn tag_at(&self, text: &str, call: &PendingCall) -> TagAt {
        match self.plain_tag_at(text, call) {
            TagAt::Other if !call.is_exact => named_tag(text, call),
            tag => tag,
        }
    }

    /// Reads the tag at the start of `text` like [`Tools::tag_at`], but no `<NAME>` or `</NAME>`.
    pub fn plain_tag_at(&self, text: &str, call: &PendingCall) -> TagAt {
        let tag = tag_at(text);
        match &tag {
            TagAt::Unfinished => return tag,
            TagAt::Found(Tag { kind: TagKind::Parameter(name), .. }) if call.parameters.contains(name) => return tag,
            _ if call.is_exact => return tag,
            _ => {}
        }
        if let Some((name, length)) = header_with_value(text).filter(|(name, _)| call.parameters.contains(*name)) {
            return found(TagKind::Parameter(name.into()), length, false);
        }
        let TagAt::Found(Tag { kind: TagKind::Parameter(name), length, is_exact, .. }) = &tag else { return tag };
        if !self.has(name) {
            return tag;
        }
        match after_gap(&text[*length..]).map_or(TagAt::Other, tag_at) {
            TagAt::Unfinished => TagAt::Unfinished,
            TagAt::Found(Tag { kind: TagKind::Parameter(_), .. }) => {
                found(TagKind::Function(name.clone()), *length, *is_exact)
            }
            _ => tag,
        }
    }

    /// Reads the header of a call after `<tool_call>`. Models also write the name of the tool in a tag, or as the tag.
    pub fn header_at(&self, text: &str) -> TagAt {
        match self.tag_at(text, &PendingCall::default()) {
            TagAt::Other => self.name_at(text),
            tag => tag,
        }
    }

    /// Reads `<name>NAME</name>` or `<NAME>` with the name of a tool.
    fn name_at(&self, text: &str) -> TagAt {
        const TAGS: [&str; 3] = ["name", "tool_name", "function_name"];
        let Some(inner) = text.strip_prefix('<') else { return TagAt::Other };
        let Some((tag, rest)) = inner.split_once('>') else {
            let is_half = TAGS.into_iter().chain(self.names()).any(|tag| tag.starts_with(inner));
            return if is_half { TagAt::Unfinished } else { TagAt::Other };
        };
        let (name, after) = rest.split_at(rest.find('<').unwrap_or(rest.len()));
        let close = format!("</{tag}>");
        match after {
            _ if !TAGS.contains(&tag) && self.has(tag) => found(TagKind::Function(tag.into()), tag.len() + 2, false),
            _ if !TAGS.contains(&tag) || name.len() > MAX_NAME => TagAt::Other,
            _ if after.starts_with(&close) && self.has(name.trim()) => {
                found(TagKind::Function(name.trim().into()), text.len() - after.len() + close.len(), true)
            }
            _ if close.starts_with(after) => TagAt::Unfinished,
            _ => TagAt::Other,
        }
    }
}

/// The name in `<parameter=NAME VALUE` or `<parameter=NAME=VALUE`, and the length of the text before the value. The
/// value may have a `>`, or end like an attribute.
fn header_with_value(text: &str) -> Option<(&str, usize)> {
    const WORD: &str = "<parameter";
    let after = text.get(WORD.len()..).filter(|_| text[..WORD.len()].eq_ignore_ascii_case(WORD))?;
    let (name, value) = after.trim_start().strip_prefix('=')?.split_once([' ', '\t', '='])?;
    Some((name, text.len() - value.len()))
}

/// Reads `<NAME>` or `</NAME>` of a parameter, which models write instead of `<parameter=NAME>` and `</parameter>`, or
/// `</NAME>` of the tool or of a tag around all arguments.
pub(super) fn named_tag(text: &str, call: &PendingCall) -> TagAt {
    if let Some(only) = call.only_parameter().filter(|_| text.starts_with("<parameter>")) {
        return found_name(TagKind::Parameter(only.clone()), "<parameter>".len());
    }
    let closes = text.starts_with("</");
    let mut is_half = false;
    for name in call.tag_names(closes) {
        match own_tag(text, name) {
            TagAt::Found(tag) if text[..tag.length].ends_with('>') => {
                let ends_call = closes && !call.knows(name) && !call.seen.contains(name);
                return TagAt::Found(if ends_call { Tag { kind: TagKind::EndFunction, ..tag } } else { tag });
            }
            TagAt::Unfinished => is_half = true,
            _ => {}
        }
    }
    if is_half { TagAt::Unfinished } else { TagAt::Other }
}
