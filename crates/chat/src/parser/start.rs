//! Where a call starts in reasoning and content.
//!
//! * `<tool_call>` and `<function=NAME>` start a call. A repeated tag is dropped, and so is a tag of another format, such as
//!   `<tool_calls>`, `<|tool_call|>` and `<function_calls>`;
//! * `<parameter=NAME>` of a known tool before another `<parameter=P>` starts a call like `<function=NAME>`;
//! * `<tool_call>` and `<name>`, `<tool_name>` or `<function_name>` with the name of a known tool start a call, and so do
//!   `<tool_call>` and the name of a known tool as a tag, before a parameter, a closing tag or JSON;
//! * `<tool_call>` and JSON with the name of a known tool start a call, also in a Markdown fence after the tag;
//! * `<function=NAME>` of a known tool starts a call without `<tool_call>` if a `<parameter=P>`, a `<P>` of a known
//!   parameter, a `</function>` or a JSON object and a closing tag follow, and if it starts or ends a line.
//!   `<function name="NAME">` and `<invoke name="NAME">` do so only before a `<parameter=P>`, because XML has the same
//!   form. Any other name is content;
//! * a call in a Markdown fence, in inline code or between quotation marks is text. If the answer ends before the fence is
//!   closed, the call is a call;
//! * a call of a known tool inside the reasoning ends the reasoning. A `</think>` right after the call is dropped;
//! * reasoning without `</think>` is reasoning up to the end of the text;
//! * `<tool_call>` and `</tool_call>` with nothing between them are dropped if they start a line outside of the reasoning
//!   and of code;
//! * any other `<tool_call>` is content, unchanged. So is text in a `<tool_call>` after its call, but not the closing tags
//!   after the text.

use super::{
    argument::PendingCall,
    declared::{Tools, is_name},
    json_call::{JsonAt, JsonScanner},
    prose::Mark,
    tags::{END_THINK, InputEnd, Reading, Tag, TagAt, TagKind, after_gap, after_opening, after_tool_calls, tag_at},
};

/// Judges each `<` outside of calls.
pub(super) struct CallFinder<'a> {
    pub tools: &'a Tools,
    pub scanner: &'a mut JsonScanner,
    /// Length of the whole answer so far.
    pub length: usize,
    pub in_reasoning: bool,
    /// True after a call whose `<tool_call>` has no `</tool_call>` so far.
    pub call_is_open: bool,
    pub end: InputEnd,
}

impl CallFinder<'_> {
    /// Judges the `<` that `text`, the rest of the answer, starts with. In reasoning, only known tools can be called.
    pub fn judge(&mut self, text: &str, starts_line: bool) -> Reading<Mark> {
        if self.in_reasoning && text.starts_with(END_THINK) {
            return Reading::Found(Mark::EndThink);
        }
        if self.tools.is_empty() {
            let is_half = self.in_reasoning && END_THINK.starts_with(text);
            return if is_half { Reading::Unfinished } else { Reading::Other };
        }
        let Some(function) = after_tool_calls(text) else { return Reading::Other };
        if self.call_is_open && starts_line && text.starts_with("</") {
            let ends_call = |kind| matches!(kind, TagKind::EndFunction | TagKind::EndToolCall);
            return tag_at(text).and_then(|tag| ends_call(tag.kind).then_some(Mark::Leftover));
        }
        let is_bare = function.len() == text.len();
        let tag =
            if is_bare { self.tools.tag_at(text, &PendingCall::default()) } else { self.tools.header_at(function) };
        let (name, length, is_exact) = match tag {
            TagAt::Unfinished => return Reading::Unfinished,
            TagAt::Found(Tag { kind: TagKind::Function(name), length, is_exact, .. }) => (name, length, is_exact),
            TagAt::Other if !is_bare => {
                let calls = self.scanner.calls(self.length - function.len(), function, self.end, self.tools);
                return calls.and_then(|_| Some(Mark::Call));
            }
            // Models write a call without anything in it, which would be content of the next prompt.
            TagAt::Found(Tag { kind: TagKind::EndToolCall, .. }) if !is_bare && starts_line && !self.in_reasoning => {
                return Reading::Found(Mark::Leftover);
            }
            TagAt::Found(_) | TagAt::Other => return Reading::Other,
        };
        let is_known = self.tools.has(&name);
        // The client answers a call of an unknown tool.
        if !is_bare && is_exact && (is_known || is_name(&name) && !self.in_reasoning) {
            return Reading::Found(Mark::Call);
        }
        let (header, body) = function.split_at(length);
        let line = body.trim_start_matches([' ', '\t', '\r']);
        let is_on_edge = starts_line || line.is_empty() || line.starts_with('\n');
        // `<function name="NAME">` without `<tool_call>` is XML, unless a `<parameter=P>` follows.
        let may_be_xml = is_bare && !is_exact && header.ends_with('>');
        if !is_known || (is_bare && !is_on_edge) {
            return Reading::Other;
        }
        let Some(after) = after_opening(body) else { return Reading::Other };
        let (next, is_json) = match self.scanner.object(self.length - after.len(), after, self.end) {
            JsonAt::Unfinished if self.end == InputEnd::Truncated && !after.is_empty() => return Reading::Other,
            JsonAt::Unfinished => return Reading::Unfinished,
            JsonAt::Found((_, length)) => (&after[length..], true),
            JsonAt::Other => (body, false),
        };
        let is_body = |tag: Tag| match tag.kind {
            kind if is_json => kind.closes() && !may_be_xml,
            kind if may_be_xml => tag.is_exact && matches!(kind, TagKind::Parameter(_)),
            kind => !matches!(kind, TagKind::ToolCall | TagKind::EndToolCall),
        };
        let tag = match after_gap(next) {
            Some(next) if next.starts_with('<') => self.tools.tag_at(next, &self.tools.call(&name)),
            Some("") => TagAt::Unfinished,
            _ => TagAt::Other,
        };
        tag.and_then(|tag| is_body(tag).then_some(Mark::Call))
    }
}
