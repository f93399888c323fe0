//! Finds the end of a parameter's value in streamed text.
//!
//! A value may quote the tags of a call: a file that documents the format, or XML. So the first tag that may end the
//! value is only a candidate. It is the end if the text after it continues as a call or ends. It is part of the value if
//! a `</parameter>` follows that no `<parameter=NAME>` opened and that another tag of the call follows: that is then the
//! end. Until this is known, the text from the candidate on is held back.
//!
//! A tag between two quotation marks on one line is text. A closing tag in the middle of a line is text, and so is one
//! whose opening tag is part of the value.

use super::{
    InputEnd,
    argument::PendingCall,
    declared::Tools,
    quotes::Quotes,
    tags::{Tag, TagAt, TagKind, tag_at},
};

/// Follows a value up to its end. Offsets count from the start of the value.
pub(super) struct ValueScanner {
    /// True if the value starts on a line of its own.
    is_block: bool,
    consumed: usize,
    position: usize,
    quotes: Quotes,
    starts_line: bool,
    /// The last tag. What follows it is not known yet, except for white space.
    last: Option<SeenTag>,
    /// True if a line feed follows the last tag.
    line_ended: bool,
    candidate: Option<Candidate>,
    /// Opening tags in the value that wait for their closing tags.
    open: Vec<OpenTag>,
    line: LineTags,
    /// The last `</parameter>` that closed a quoted tag, until text follows.
    matched: Option<MatchedEnd>,
}

/// Maximum number of opening tags in a value that wait for their closing tags.
const MAX_OPEN: usize = 32;

#[derive(Clone, Copy, PartialEq)]
enum OpenTag {
    Call,
    Function,
    Parameter,
}

/// The parameter tags of a line.
#[derive(Default, Clone, Copy)]
struct LineTags {
    /// True if a `<parameter=NAME>` is in the middle of the line.
    has_inline: bool,
    /// True if a `<parameter=NAME>` is at the start of the line, before its value.
    has_start: bool,
    /// Offset of that tag if it may start the next parameter.
    next: Option<usize>,
}

struct SeenTag {
    kind: TagKind,
    is_exact: bool,
    at: usize,
    starts_line: bool,
    /// The tags before this one on its line.
    line: LineTags,
    /// The tag before this one, if only white space is between them.
    after: Option<TagKind>,
}

/// A `</parameter>` that closed a `<parameter=NAME>` in the value. If that tag was only mentioned, this is the end.
#[derive(Clone, Copy)]
struct MatchedEnd {
    at: usize,
    /// True if the value quotes a call around it.
    is_in_call: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum CandidateKind {
    ClosingTag,
    /// The next parameter starts here.
    Parameter,
    /// The next call starts here.
    Call,
}

/// A place where the value may have ended.
struct Candidate {
    at: usize,
    kind: CandidateKind,
    starts_line: bool,
    /// True if closing tags of the call followed.
    is_closed: bool,
    /// True if text followed that is not a tag.
    has_text: bool,
}

/// What follows a tag, after white space.
#[derive(Clone, Copy, PartialEq)]
enum Follow<'a> {
    SameLine,
    NextLine,
    Tag(&'a TagKind),
    End,
}

/// Result of [`ValueScanner::scan`], as lengths of the unconsumed text.
pub(super) struct ValuePart {
    /// Length of the text that is surely part of the value.
    pub value: usize,
    /// Offset of the tag that ended the value, or of the end of the text.
    pub end: Option<usize>,
}

/// The length of the value before a tag at `at`: the line feed and the indentation before the tag are markup.
fn before_tag(text: &str, at: usize) -> usize {
    let line = text[..at].trim_end_matches([' ', '\t']);
    line.strip_suffix('\n').map_or(at, str::len)
}

impl ValueScanner {
    pub fn new(is_block: bool) -> Self {
        Self {
            is_block,
            consumed: 0,
            position: 0,
            quotes: Quotes::default(),
            starts_line: true,
            last: None,
            line_ended: false,
            candidate: None,
            open: Vec::new(),
            line: LineTags::default(),
            matched: None,
        }
    }

    /// True if the value has no text before `end`, an offset in the unconsumed text.
    pub fn is_empty_before(&self, end: usize) -> bool {
        self.consumed + end == 0
    }

    /// The caller has consumed `length` bytes of the text.
    pub fn consume(&mut self, length: usize) {
        self.consumed += length;
    }

    /// Reads on in `text`, the unconsumed text of the value.
    pub fn scan(&mut self, text: &str, end: InputEnd, call: &PendingCall, tools: &Tools) -> ValuePart {
        let is_ended = self.read(text, end, call, tools);
        let at = |offset: usize| offset - self.consumed;
        let candidate = self.candidate.as_ref();
        match (candidate, end) {
            (Some(found), _) if is_ended => self.part(text, at(found.at)),
            (Some(found), InputEnd::Complete) => self.part(text, at(found.at)),
            (None, InputEnd::Complete) => match self.matched {
                Some(matched) => self.part(text, at(matched.at)),
                None => ValuePart { value: text.len(), end: Some(text.len()) },
            },
            (Some(found), InputEnd::Truncated) if found.is_closed && found.kind == CandidateKind::ClosingTag => {
                self.part(text, at(found.at))
            }
            (Some(found), InputEnd::Truncated) if !found.has_text => {
                ValuePart { end: None, ..self.part(text, at(found.at)) }
            }
            (_, InputEnd::Truncated) => ValuePart { value: before_tag(text, at(self.position)), end: None },
            (_, InputEnd::MoreToCome) => ValuePart { value: before_tag(text, at(self.held_from())), end: None },
        }
    }

    fn part(&self, text: &str, at: usize) -> ValuePart {
        ValuePart { value: before_tag(text, at), end: Some(at) }
    }

    /// Offset of the first text that may not be part of the value.
    fn held_from(&self) -> usize {
        let last = self.last.as_ref().map(|tag| tag.line.next.unwrap_or(tag.at));
        let candidate = self.candidate.as_ref().map(|candidate| candidate.at);
        let held = [last, candidate, self.line.next, self.matched.map(|matched| matched.at)];
        held.into_iter().flatten().fold(self.position, usize::min)
    }

    /// Reads the text after `position`. Returns true if the candidate is the end.
    fn read(&mut self, text: &str, end: InputEnd, call: &PendingCall, tools: &Tools) -> bool {
        let last = end != InputEnd::MoreToCome;
        while let Some(c) = text[self.position - self.consumed..].chars().next() {
            let rest = &text[self.position - self.consumed..];
            let tag = if c == '<' { tag_at(rest) } else { TagAt::Other };
            let is_quoted = if matches!(tag, TagAt::Other) { Some(true) } else { self.quotes.enclose(rest, last) };
            match (is_quoted, tag) {
                (None, _) => return false,
                (Some(false), TagAt::Found(tag)) => {
                    if self.push_tag(tag, call, tools) {
                        return true;
                    }
                    continue;
                }
                (Some(false), TagAt::Unfinished) if !last => return false,
                // At the end of the answer, an unfinished tag after another tag is markup.
                (Some(false), TagAt::Unfinished) if self.last.is_some() || end == InputEnd::Truncated => break,
                _ => {}
            }
            if self.push_char(c, call, tools) {
                return true;
            }
            self.position += c.len_utf8();
        }
        last && self.follow(Follow::End, call, tools)
    }

    fn push_tag(&mut self, tag: Tag, call: &PendingCall, tools: &Tools) -> bool {
        if tag.kind == TagKind::ToolCall && self.last.as_ref().is_some_and(|last| last.kind == tag.kind) {
            // A repeated `<tool_call>` is part of the first one.
            self.position += tag.length;
            return false;
        }
        let after = self.last.as_ref().map(|last| last.kind.clone());
        if self.follow(Follow::Tag(&tag.kind), call, tools) {
            return true;
        }
        let Tag { kind, length, is_exact } = tag;
        self.last =
            Some(SeenTag { kind, is_exact, at: self.position, starts_line: self.starts_line, line: self.line, after });
        self.line_ended = false;
        self.starts_line = false;
        self.position += length;
        false
    }

    fn push_char(&mut self, c: char, call: &PendingCall, tools: &Tools) -> bool {
        self.quotes.push(c);
        if c == '\n' {
            self.line_ended = true;
            self.starts_line = true;
            self.line = LineTags::default();
        } else if !c.is_whitespace() {
            let follow = if self.line_ended { Follow::NextLine } else { Follow::SameLine };
            if self.follow(follow, call, tools) {
                return true;
            }
            self.starts_line = false;
            self.push_text();
        }
        false
    }

    fn push_text(&mut self) {
        self.matched = None;
        if let Some(candidate) = &mut self.candidate {
            candidate.has_text = true;
        }
    }

    /// Judges the last tag by what follows it. Returns true if the candidate is the end.
    fn follow(&mut self, follow: Follow<'_>, call: &PendingCall, tools: &Tools) -> bool {
        let Some(mut tag) = self.last.take() else { return false };
        tag.starts_line |= tag.after.as_ref().is_some_and(TagKind::closes);
        let is_on_edge = tag.starts_line || follow != Follow::SameLine;
        match &tag.kind {
            TagKind::ToolCall => {
                let calls = matches!(follow, Follow::Tag(TagKind::Function(name)) if tools.has(name));
                let is_end = calls && self.starts_call(tag.at);
                self.open(OpenTag::Call, is_on_edge);
                is_end
            }
            TagKind::Function(name) => {
                let is_bare = tag.after != Some(TagKind::ToolCall);
                let has_body = matches!(follow, Follow::Tag(TagKind::Parameter(_) | TagKind::EndFunction));
                let calls = is_bare && is_on_edge && has_body && tools.has(name);
                let is_end = calls && self.starts_call(tag.at);
                self.open(OpenTag::Function, is_on_edge);
                is_end
            }
            TagKind::Parameter(name) => {
                let is_next = tag.is_exact && tag.starts_line && (call.lacks(name) || self.repeats(&tag, call));
                self.start_parameter(&tag, is_next, follow);
                false
            }
            TagKind::EndParameter => self.end_parameter(&tag, follow, is_on_edge),
            TagKind::EndFunction | TagKind::EndToolCall => {
                self.end_call(&tag, follow, is_on_edge);
                false
            }
        }
    }

    /// True if `tag` is the tag that opened this value once more.
    fn repeats(&self, tag: &SeenTag, call: &PendingCall) -> bool {
        tag.at == 0 && matches!(&tag.kind, TagKind::Parameter(name) if Some(name) == call.seen.last())
    }

    /// A call of a known tool starts at `at`. Returns true if the candidate is the end.
    fn starts_call(&mut self, at: usize) -> bool {
        if let Some(candidate) = &self.candidate {
            let is_open = self.open.iter().any(|open| *open != OpenTag::Parameter);
            return candidate.is_closed || !candidate.has_text || is_open;
        }
        self.suggest(at, CandidateKind::Call, true);
        false
    }

    fn start_parameter(&mut self, tag: &SeenTag, is_next: bool, follow: Follow<'_>) {
        if follow != Follow::SameLine && self.candidate.is_none() {
            match self.matched.filter(|matched| !matched.is_in_call) {
                Some(matched) => self.suggest(matched.at, CandidateKind::ClosingTag, true),
                None if is_next => self.suggest(tag.at, CandidateKind::Parameter, true),
                None => {}
            }
        }
        if follow == Follow::SameLine {
            self.line = LineTags {
                has_inline: self.line.has_inline || !tag.starts_line,
                has_start: self.line.has_start || tag.starts_line,
                next: is_next.then_some(tag.at),
            };
        }
        self.open(OpenTag::Parameter, tag.starts_line);
    }

    fn open(&mut self, tag: OpenTag, is_on_edge: bool) {
        if is_on_edge && self.open.len() < MAX_OPEN {
            self.open.push(tag);
        }
    }

    /// Closes the last open `tag`, and the tags that were opened after it. Returns false if there is none.
    fn close(&mut self, tag: OpenTag) -> bool {
        let last = self.open.iter().rposition(|open| *open == tag);
        self.open.truncate(last.unwrap_or(self.open.len()));
        last.is_some()
    }

    /// Returns true if the candidate is the end.
    fn end_parameter(&mut self, tag: &SeenTag, follow: Follow<'_>, is_on_edge: bool) -> bool {
        let goes_on = matches!(follow, Follow::Tag(kind) if tag.is_exact || *kind != TagKind::EndParameter);
        let is_complete = goes_on || follow == Follow::End;
        if tag.is_exact && tag.line.has_inline {
            self.line.has_inline = false;
            return false;
        }
        let is_end = if tag.is_exact { is_on_edge } else { goes_on || (is_complete && tag.starts_line) };
        // A tag at the end of a line of text does not close a tag that has a line of its own.
        let is_inline = !(tag.starts_line || tag.line.has_start || is_complete);
        let is_text = is_inline && self.open.contains(&OpenTag::Parameter);
        if !is_end || is_text {
            self.push_text();
            return false;
        }
        if self.close(OpenTag::Parameter) {
            if let (Some(at), None) = (tag.line.next, &self.candidate) {
                self.suggest(at, CandidateKind::Parameter, true);
            }
            self.matched = Some(MatchedEnd { at: tag.at, is_in_call: !self.open.is_empty() });
            return false;
        }
        let is_repeated = tag.after == Some(TagKind::EndParameter);
        let is_second_end =
            matches!(follow, Follow::Tag(kind) if !matches!(kind, TagKind::ToolCall | TagKind::Function(_)));
        let is_better = match &self.candidate {
            None => true,
            Some(first) if is_repeated && first.kind != CandidateKind::ClosingTag && first.at > 0 => false,
            Some(first) if is_repeated && first.kind == CandidateKind::ClosingTag && !first.is_closed => {
                // A repeated tag, unless the first one ends a line of text.
                is_complete && (first.has_text || (self.is_block && !first.starts_line))
            }
            Some(first) => is_complete && (first.has_text || is_second_end),
        };
        if is_better {
            self.suggest(tag.at, CandidateKind::ClosingTag, tag.starts_line);
        }
        let is_near =
            |first: &Candidate| first.kind == CandidateKind::ClosingTag && !first.is_closed && !first.has_text;
        self.candidate.as_ref().is_some_and(is_near) && matches!(follow, Follow::Tag(TagKind::Parameter(_)))
    }

    fn end_call(&mut self, tag: &SeenTag, follow: Follow<'_>, is_on_edge: bool) {
        use TagKind::{EndFunction, EndParameter, EndToolCall, Function, ToolCall};
        let after_end = matches!(tag.after, Some(EndParameter | EndFunction | EndToolCall));
        let is_last = matches!(follow, Follow::End | Follow::Tag(EndToolCall | ToolCall | Function(_)));
        if !(if tag.is_exact { is_on_edge } else { after_end || (is_last && tag.starts_line) }) {
            return self.push_text();
        }
        if self.close(if tag.kind == EndFunction { OpenTag::Function } else { OpenTag::Call }) {
            if let Some(candidate) = &mut self.candidate {
                candidate.is_closed |= candidate.kind != CandidateKind::ClosingTag;
            }
            return;
        }
        if let Some(candidate) = &mut self.candidate {
            candidate.is_closed = true;
            return;
        }
        let parameter = self.matched.filter(|matched| tag.after == Some(EndParameter) && !matched.is_in_call);
        self.suggest(parameter.map_or(tag.at, |end| end.at), CandidateKind::ClosingTag, tag.starts_line);
        if let (Some(candidate), Some(_)) = (&mut self.candidate, parameter) {
            candidate.is_closed = true;
        }
    }

    fn suggest(&mut self, at: usize, kind: CandidateKind, starts_line: bool) {
        self.candidate = Some(Candidate { at, kind, starts_line, is_closed: false, has_text: false });
        self.open.clear();
    }
}
