//! Tags of a call that only the names of the request's tools and of their parameters explain.

use super::{
    argument::PendingCall,
    declared::Tools,
    tags::{MAX_NAME, Reading, Tag, TagAt, TagKind, after_gap, own_tag, tag_at},
};
use crate::schema::{Document, parameter_sets};
use std::collections::BTreeSet;

impl Tools {
    /// A call of a tool.
    pub fn call(&self, function: &str) -> PendingCall {
        let mut names = BTreeSet::new();
        if let Some(schema) = self.schema(function) {
            let sets = parameter_sets(&[schema], &Document::new(schema));
            names.extend(sets.iter().flat_map(|set| set.names()).map(str::to_owned));
        }
        PendingCall { name: function.to_owned(), parameters: names.into_iter().collect(), ..PendingCall::default() }
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
        let mut tag = tag_at(text);
        // Models also close the tag of a call without parameters at once.
        if let TagAt::Found(Tag { kind: TagKind::Function(name), .. }) = &mut tag
            && let Some(short) = name.strip_suffix('/').map(|short| short.trim_end().to_owned())
            && self.has(&short)
            && !self.has(name)
        {
            *name = short;
        }
        let TagAt::Found(Tag { kind: TagKind::Parameter(name), length, is_exact }) = &tag else { return tag };
        if call.is_exact || call.parameters.contains(name) {
            return tag;
        }
        let header = text[..*length].split_once('=');
        let value = header.and_then(|(word, rest)| Some((word, rest.split_once([' ', '\t', '='])?.0)));
        if let Some((word, name)) = value.filter(|(_, name)| call.parameters.iter().any(|known| known == name)) {
            // The value has a `>`, or ends like an attribute.
            let length = word.len() + 1 + name.len() + 1;
            return TagAt::Found(Tag { kind: TagKind::Parameter(name.into()), length, is_exact: false });
        }
        if !self.has(name) {
            return tag;
        }
        match after_gap(&text[*length..]).map_or(TagAt::Other, tag_at) {
            TagAt::Unfinished => TagAt::Unfinished,
            TagAt::Found(Tag { kind: TagKind::Parameter(_), .. }) => {
                TagAt::Found(Tag { kind: TagKind::Function(name.clone()), length: *length, is_exact: *is_exact })
            }
            _ => tag,
        }
    }

    /// Reads the header of a call after `<tool_call>`. Models also write the name of the tool in a tag.
    pub fn header_at(&self, text: &str) -> TagAt {
        let tag = self.tag_at(text, &PendingCall::default());
        if !matches!(tag, TagAt::Other) {
            return tag;
        }
        name_at(text).and_then(|(name, length)| {
            self.has(name).then(|| Tag { kind: TagKind::Function(name.into()), length, is_exact: true })
        })
    }
}

/// Reads `<NAME>` or `</NAME>` of a parameter, which models write instead of `<parameter=NAME>` and `</parameter>`.
pub(super) fn named_tag(text: &str, call: &PendingCall) -> TagAt {
    let closes = text.starts_with("</");
    let mut is_half = false;
    for name in call.tag_names(closes) {
        match own_tag(text, name) {
            TagAt::Found(tag) if text[..tag.length].ends_with('>') => return TagAt::Found(tag),
            TagAt::Unfinished => is_half = true,
            _ => {}
        }
    }
    if is_half { TagAt::Unfinished } else { TagAt::Other }
}

/// Reads `<name>NAME</name>`.
fn name_at(text: &str) -> Reading<(&str, usize)> {
    const TAGS: [&str; 3] = ["name", "tool_name", "function_name"];
    let Some(inner) = text.strip_prefix('<') else { return Reading::Other };
    let Some((tag, rest)) = inner.split_once('>') else {
        let is_half = TAGS.iter().any(|tag| tag.starts_with(inner));
        return if is_half { Reading::Unfinished } else { Reading::Other };
    };
    let (name, after) = rest.split_at(rest.find('<').unwrap_or(rest.len()));
    let close = format!("</{tag}>");
    match after {
        _ if !TAGS.contains(&tag) || name.len() > MAX_NAME => Reading::Other,
        _ if after.starts_with(&close) => Reading::Found((name.trim(), text.len() - after.len() + close.len())),
        _ if close.starts_with(after) => Reading::Unfinished,
        _ => Reading::Other,
    }
}
