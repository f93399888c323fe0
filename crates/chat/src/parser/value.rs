//! Finds the end of a parameter's value in streamed text.
//!
//! A value may quote the tags of a call: a file that documents the format, or XML. So the first tag that may end the
//! value is only a candidate, and the text from it on is held back. It is the end if the answer ends, or if the next call
//! starts. It is part of the value if the call continues after it: at a `</parameter>` that closes nothing in the text so
//! far and that another tag of the call follows, or at another tag of the call after text that follows the end of the
//! call. That tag is then the candidate. After a `</parameter>` and text, closing tags of the call alone do not continue
//! it, because models write text at the end of a call.
//!
//! A misspelt opening tag, such as `<paramter=P>`, counts only after a closing tag and for a parameter that the call
//! does not have yet. Otherwise it is text, and so is its misspelt closing tag. `<NAME>` starts the next parameter after
//! `</NAME>`, and after `</parameter>` if the call has such tags already.
//!
//! JSON that is complete ends at the next tag. A tag between two quotation marks on one line is text. So is a tag in the
//! middle of a line, and a closing tag whose opening tag is part of the value.

use super::{
    argument::{PendingArgument, PendingCall},
    call_tags::named_tag,
    declared::Tools,
    quotes::Quotes,
    tags::{InputEnd, MAX_READ_AGAIN, Tag, TagAt, TagKind, has_word, is_space, own_tag},
};

/// Follows a value up to its end. Offsets count from the start of the value.
#[derive(Default)]
pub(super) struct ValueScanner {
    /// True if a line end comes before the value.
    is_block: bool,
    /// True if a carriage return belongs to the line end before a tag. After a header with a plain line feed, it is a part
    /// of the value.
    has_crlf: bool,
    /// Number of bytes that may be read after a candidate.
    look_ahead: usize,
    consumed: usize,
    position: usize,
    quotes: Quotes,
    starts_line: bool,
    /// True after the first tag outside of quotation marks. Only at that tag can the value end as complete JSON.
    has_tag: bool,
    /// The last tag. Only white space after it is known so far.
    last: Option<SeenTag>,
    /// True if a line feed follows the last tag.
    line_ended: bool,
    candidate: Option<EndCandidate>,
    /// The closing tags of opening tags in the value, and the offsets of the opening tags.
    open: Vec<(TagKind, usize)>,
    /// Number of `<NAME>` in the value of `<parameter=NAME>` that wait for their `</NAME>`.
    nested: usize,
    /// Number of misspelt opening tags, such as `<param name="P">`, that are text and wait for their `</param>`.
    misspelt: usize,
    /// The last `</parameter>` that closed a quoted tag, until text follows.
    matched: Option<MatchedEnd>,
}

/// Maximum number of spaces and tabs before a tag that are markup.
const MAX_INDENTATION: usize = 100;

/// Maximum number of opening tags in a value that wait for their closing tags.
const MAX_OPEN: usize = 32;

/// Number of bytes that are read after a candidate, however much was read again before.
const MIN_LOOK_AHEAD: usize = 256;

struct SeenTag {
    kind: TagKind,
    is_exact: bool,
    is_name: bool,
    at: usize,
    starts_line: bool,
    /// True for the name of a tool, and for the exact tag of a parameter that the call does not have yet.
    is_known: bool,
    /// True for the tag that opened this value, directly after that tag.
    is_repeated: bool,
    /// The tag before this one, if only white space is between them.
    after: Option<TagKind>,
}

/// A `</parameter>` that closed a `<parameter=NAME>` in the value. If that tag was only mentioned, this is the end.
#[derive(Clone, Copy)]
struct MatchedEnd {
    at: usize,
    /// Offset of the tag that it closed.
    opened_at: usize,
    /// True if the value quotes a call around it.
    is_in_call: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum CandidateKind {
    /// A `</parameter>`.
    EndParameter,
    /// A closing tag of the call.
    EndCall,
    /// The next parameter starts here.
    Parameter,
    /// The tag that opened this value is repeated here.
    RepeatedParameter,
    /// The next call starts here.
    Call,
}

/// A place where the value may have ended.
struct EndCandidate {
    at: usize,
    kind: CandidateKind,
    starts_line: bool,
    /// True if closing tags of the call followed.
    is_closed: bool,
    /// True if text followed, after the closing tags if there are any.
    has_text: bool,
}

impl EndCandidate {
    fn opens(&self) -> bool {
        !matches!(self.kind, CandidateKind::EndParameter | CandidateKind::EndCall)
    }

    /// True if text followed the end of a call. If this call continues, the value quotes that end.
    fn is_past_call(&self) -> bool {
        let is_end = self.kind == CandidateKind::EndCall || self.is_closed;
        self.has_text && is_end && !matches!(self.kind, CandidateKind::Parameter | CandidateKind::RepeatedParameter)
    }

    fn close(&mut self) {
        self.is_closed = true;
        self.has_text = false;
    }
}

/// The text after a tag and white space.
#[derive(Clone, Copy)]
enum Follow<'a> {
    SameLine,
    NextLine,
    Tag(&'a SeenTag),
    End,
}

/// Result of [`ValueScanner::scan`], as lengths of the unconsumed text.
pub(super) struct ValuePart {
    /// Length of the text that is surely part of the value.
    pub value: usize,
    /// Offset of the tag that ended the value, or of the end of the text.
    pub end: Option<usize>,
}

impl ValueScanner {
    /// `line_end` is the line end before the value, or empty. `read_again` is the number of bytes that earlier values
    /// made the parser read again.
    pub fn new(line_end: &str, read_again: usize) -> Self {
        let look_ahead = MIN_LOOK_AHEAD.max(MAX_READ_AGAIN.saturating_sub(read_again));
        Self {
            is_block: !line_end.is_empty(),
            has_crlf: line_end != "\n",
            look_ahead,
            starts_line: true,
            ..Self::default()
        }
    }

    /// Number of bytes that have been read after `end`, an offset in the unconsumed text.
    pub fn read_after(&self, end: usize) -> usize {
        self.position.saturating_sub(self.consumed + end)
    }

    /// True if the value has no text before `end`, an offset in the unconsumed text.
    pub fn is_empty_before(&self, end: usize) -> bool {
        self.consumed + end == 0
    }

    /// The caller has consumed `length` bytes of the text.
    pub fn consume(&mut self, length: usize) {
        self.consumed += length;
    }

    /// Reads on in `text`, the unconsumed text of the value of the last argument of `call`.
    pub fn scan(&mut self, text: &str, end: InputEnd, call: &PendingCall, tools: &Tools) -> ValuePart {
        if call.is_exact {
            return self.scan_exact(text, end, call);
        }
        let is_ended = self.read(text, end, call, tools) || end == InputEnd::Complete;
        match (&self.candidate, end) {
            (Some(found), _) if is_ended => self.part(text, found.at),
            (Some(found), InputEnd::Truncated) if found.is_closed && !found.opens() => self.part(text, found.at),
            (Some(found), InputEnd::Truncated) if !found.has_text => {
                ValuePart { end: None, ..self.part(text, found.at) }
            }
            (_, InputEnd::Truncated) => ValuePart { end: None, ..self.part(text, self.position) },
            (_, InputEnd::Complete) => match self.matched {
                Some(matched) => self.part(text, matched.at),
                None => ValuePart { value: text.len(), end: Some(text.len()) },
            },
            (_, InputEnd::MoreToCome) => {
                let ValuePart { value, .. } = self.part(text, self.held_from());
                // A line feed may follow the carriage return.
                let is_half = self.has_crlf && text[..value].ends_with('\r');
                ValuePart { value: value - usize::from(is_half), end: None }
            }
        }
    }

    /// Ends the value at the first `</parameter>` that is not in a string of an array or object.
    fn scan_exact(&self, text: &str, end: InputEnd, call: &PendingCall) -> ValuePart {
        const TAG: &str = "\n</parameter>";
        let tag = &TAG[1..];
        let before = |at: usize| text[..at].strip_suffix('\n').map_or(at, str::len);
        let starts_line = |at: usize| before(at) < at || self.consumed + at == 0;
        let is_nested = |text: &str| call.argument.as_ref().is_some_and(|argument| argument.is_nested(text));
        let is_end = |at: &usize| starts_line(*at) || !is_nested(&text[..*at]);
        if let Some(at) = text.match_indices(tag).map(|(at, _)| at).find(is_end) {
            return ValuePart { value: before(at), end: Some(at) };
        }
        let half = |tag: &str| (1..tag.len()).rev().find(|&length| text.ends_with(&tag[..length]));
        let held = half(TAG).max(half(tag)).unwrap_or(0);
        match end {
            InputEnd::Complete => ValuePart { value: text.len(), end: Some(text.len()) },
            _ => ValuePart { value: text.len() - held, end: None },
        }
    }

    /// The value that ends with the tag at `offset`: the line end and the indentation before the tag are markup.
    fn part(&self, text: &str, offset: usize) -> ValuePart {
        let at = offset - self.consumed;
        let mut before = text.as_bytes()[..at].iter().rev().take(MAX_INDENTATION);
        let indentation = before.position(|byte| !b" \t".contains(byte)).unwrap_or(MAX_INDENTATION);
        let line = &text[..at.saturating_sub(indentation)];
        let value = match line.strip_suffix('\n') {
            Some(value) if self.has_crlf => value.strip_suffix('\r').unwrap_or(value).len(),
            Some(value) => value.len(),
            None => at,
        };
        ValuePart { value, end: Some(at) }
    }

    /// Offset of the first text that may not be part of the value.
    fn held_from(&self) -> usize {
        let last = self.last.as_ref().map(|tag| tag.at);
        let candidate = self.candidate.as_ref().map(|candidate| candidate.at);
        let held = [last, candidate, self.matched.map(|matched| matched.at)];
        held.into_iter().flatten().fold(self.position, usize::min)
    }

    /// Reads the text after `position`. Returns true if the candidate is the end.
    fn read(&mut self, text: &str, end: InputEnd, call: &PendingCall, tools: &Tools) -> bool {
        let last = end != InputEnd::MoreToCome;
        while let Some(c) = text[self.position - self.consumed..].chars().next() {
            if self.candidate.as_ref().is_some_and(|candidate| self.position - candidate.at > self.look_ahead) {
                return true;
            }
            let rest = &text[self.position - self.consumed..];
            let tag = match &self.last {
                _ if c != '<' => TagAt::Other,
                Some(last) if last.kind == TagKind::ToolCall => tools.header_at(rest),
                _ => match tools.plain_tag_at(rest, call) {
                    TagAt::Other => self.own_or_next_tag(rest, call, last),
                    tag => tag,
                },
            };
            let tag = tag.and_then(|tag| (!self.is_foreign(&tag, rest, call)).then_some(tag));
            let is_quoted = if matches!(tag, TagAt::Other) { Some(true) } else { self.quotes.enclose(rest, last) };
            let before = &text[..self.position - self.consumed];
            let is_complete = |argument: &PendingArgument| match tag {
                TagAt::Found(_) => !self.has_tag && argument.is_complete(before),
                _ => end == InputEnd::Complete && argument.has_other_type(before),
            };
            if is_quoted == Some(false) && call.argument.as_ref().is_some_and(is_complete) {
                self.suggest(self.position, CandidateKind::EndParameter, true);
                return true;
            }
            match (is_quoted, tag) {
                (None, _) => return false,
                (Some(false), TagAt::Found(tag)) => {
                    self.has_tag = true;
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
            if self.push_char(c) {
                return true;
            }
            self.position += c.len_utf8();
        }
        last && self.follow(Follow::End)
    }

    /// True if `tag`, which `text` starts with, is text: a value may be about the tags of other formats. A misspelt tag
    /// opens a parameter that the call does not have yet, after a closing tag that ends no such tag of the value.
    fn is_foreign(&mut self, tag: &Tag, text: &str, call: &PendingCall) -> bool {
        let follows_end = self.last.as_ref().is_some_and(|last| last.kind.closes());
        let is_foreign = match &tag.kind {
            TagKind::ToolCall => return !tag.is_exact,
            TagKind::Parameter(name) => {
                let is_next = follows_end && call.lacks_name(name);
                !is_next && !tag.is_name && !has_word(text, "parameter")
            }
            TagKind::EndParameter => !tag.is_name && self.misspelt > 0 && !has_word(text, "/parameter"),
            _ => false,
        };
        if is_foreign {
            self.misspelt = if tag.kind.closes() { self.misspelt - 1 } else { self.misspelt + 1 };
        }
        is_foreign
    }

    /// Reads a tag with the name of this parameter, or after its end, another such tag. In a value that
    /// `<parameter=NAME>` opened, `</NAME>` is text if it closes a `<NAME>` of the value.
    fn own_or_next_tag(&mut self, text: &str, call: &PendingCall, last: bool) -> TagAt {
        let Some(PendingArgument { name, is_named, .. }) = &call.argument else { return TagAt::Other };
        if let Some(last) = self.last.as_ref().filter(|last| last.kind == TagKind::EndParameter) {
            let closes = text.starts_with("</");
            let may_follow = if last.is_exact {
                *is_named || (!closes && call.has_names && last.starts_line)
            } else {
                self.nested == 0 && (closes || last.is_name)
            };
            let is_next = |tag: &Tag| closes || (*is_named && last.is_exact) || call.lacks(tag);
            let next = if may_follow { named_tag(text, call) } else { TagAt::Other };
            match next.and_then(|tag| is_next(&tag).then_some(tag)) {
                TagAt::Other => {}
                tag => return tag,
            }
        }
        match own_tag(text, name) {
            TagAt::Unfinished if last => TagAt::Other,
            TagAt::Found(tag) if !is_named => {
                let closes = tag.kind.closes();
                if closes && self.nested == 0 {
                    return TagAt::Found(Tag { is_exact: false, ..tag });
                }
                self.nested = if closes { self.nested - 1 } else { self.nested + 1 };
                TagAt::Other
            }
            tag => tag,
        }
    }

    fn push_tag(&mut self, tag: Tag, call: &PendingCall, tools: &Tools) -> bool {
        let at = self.position;
        self.position += tag.length;
        let after = self.last.as_ref().map(|last| last.kind.clone());
        if tag.kind == TagKind::ToolCall && after.as_ref() == Some(&tag.kind) {
            // A repeated `<tool_call>` is part of the first one.
            return false;
        }
        let is_repeated = tag.is_exact && at == 0 && call.is_own(&tag.kind) && !call.is_named();
        let is_known = match &tag.kind {
            TagKind::Function(name) => tools.has(name),
            _ => is_repeated || call.lacks(&tag),
        };
        let Tag { kind, is_exact, is_name, .. } = tag;
        let starts_line = self.starts_line || after.as_ref().is_some_and(TagKind::closes);
        let tag = SeenTag { kind, is_exact, is_name, at, starts_line, is_known, is_repeated, after };
        let is_ended = self.follow(Follow::Tag(&tag));
        self.last = Some(tag);
        self.line_ended = false;
        self.starts_line = false;
        is_ended
    }

    fn push_char(&mut self, c: char) -> bool {
        self.quotes.push(c);
        if c == '\n' {
            self.line_ended = true;
            self.starts_line = true;
        } else if !is_space(c) {
            let follow = if self.line_ended { Follow::NextLine } else { Follow::SameLine };
            if self.follow(follow) {
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
    fn follow(&mut self, follow: Follow<'_>) -> bool {
        let Some(tag) = self.last.take() else { return false };
        let ends_line = !matches!(follow, Follow::SameLine);
        let is_on_edge = tag.starts_line || ends_line;
        let next = if let Follow::Tag(next) = follow { Some(&next.kind) } else { None };
        match &tag.kind {
            TagKind::ToolCall => {
                let calls = matches!(follow, Follow::Tag(next @ SeenTag { kind: TagKind::Function(_), .. })
                    if next.is_known && (next.is_exact || self.line_ended));
                let is_end = calls && self.starts_call(tag.at);
                self.open(TagKind::EndToolCall, tag.at, is_on_edge);
                is_end
            }
            TagKind::Function(_) => {
                let is_bare = tag.after != Some(TagKind::ToolCall);
                let has_body = matches!(next, Some(TagKind::Parameter(_) | TagKind::EndFunction));
                let is_end = is_bare && is_on_edge && has_body && tag.is_known && self.starts_call(tag.at);
                self.open(TagKind::EndFunction, tag.at, is_on_edge);
                is_end
            }
            TagKind::Parameter(_) => {
                self.start_parameter(&tag, ends_line);
                // The `</function>` before it is too early.
                let is_end = |candidate: &EndCandidate| !candidate.has_text && !candidate.opens();
                let follows_end = tag.is_known && tag.after == Some(TagKind::EndFunction);
                follows_end && self.candidate.as_ref().is_some_and(is_end)
            }
            TagKind::EndParameter => self.end_parameter(&tag, ends_line, next, matches!(follow, Follow::End)),
            TagKind::EndFunction | TagKind::EndToolCall => {
                self.end_call(&tag, is_on_edge, next, matches!(follow, Follow::End));
                false
            }
        }
    }

    /// A call of a known tool starts at `at`. Returns true if the candidate is the end.
    fn starts_call(&mut self, at: usize) -> bool {
        if let Some(candidate) = &self.candidate {
            return candidate.is_closed || !candidate.has_text || self.is_in_call();
        }
        self.suggest(at, CandidateKind::Call, true);
        false
    }

    fn start_parameter(&mut self, tag: &SeenTag, ends_line: bool) {
        let is_next = ends_line || (tag.is_known && self.matched.is_some());
        if is_next && self.candidate.as_ref().is_none_or(EndCandidate::is_past_call) {
            match self.matched.filter(|matched| !matched.is_in_call) {
                Some(matched) => self.suggest(matched.at, CandidateKind::EndParameter, true),
                None if tag.starts_line && tag.is_known => {
                    let is_repeated = tag.is_repeated;
                    let kind = if is_repeated { CandidateKind::RepeatedParameter } else { CandidateKind::Parameter };
                    self.suggest(tag.at, kind, true);
                }
                None => {}
            }
        }
        self.open(TagKind::EndParameter, tag.at, tag.starts_line);
    }

    fn open(&mut self, end: TagKind, at: usize, is_on_edge: bool) {
        if is_on_edge && self.open.len() < MAX_OPEN {
            self.open.push((end, at));
        }
    }

    /// True if the value quotes the start of a call.
    fn is_in_call(&self) -> bool {
        self.open.iter().any(|(open, _)| *open != TagKind::EndParameter)
    }

    /// Closes the last tag that waits for `end`, and the tags that were opened after it. Returns the offset of the tag.
    fn close(&mut self, end: &TagKind) -> Option<usize> {
        let last = self.open.iter().rposition(|(open, _)| open == end)?;
        let at = self.open[last].1;
        self.open.truncate(last);
        Some(at)
    }

    /// Returns true if the candidate is the end.
    fn end_parameter(&mut self, tag: &SeenTag, ends_line: bool, next: Option<&TagKind>, is_last: bool) -> bool {
        use TagKind::{EndParameter, EndToolCall, Function, Parameter, ToolCall};
        let goes_on = next.is_some_and(|next| tag.is_exact || *next != EndParameter);
        let is_complete = goes_on || is_last;
        if !(if tag.is_exact { ends_line } else { goes_on || (is_last && tag.starts_line) }) {
            self.push_text();
            return false;
        }
        if let Some(opened_at) = self.close(&tag.kind) {
            self.matched = Some(MatchedEnd { at: tag.at, opened_at, is_in_call: self.is_in_call() });
            return false;
        }
        // The header and the end of this parameter are repeated around the value.
        let encloses = self.matched.is_some_and(|matched| matched.opened_at == 0);
        let is_repeated = tag.after == Some(EndParameter);
        let is_second_end = next.is_some_and(|next| !matches!(next, EndToolCall | ToolCall | Function(_)));
        let is_better = match &self.candidate {
            None => true,
            Some(first) if is_repeated && first.opens() && first.at > 0 => false,
            Some(first) if is_repeated && first.kind == CandidateKind::RepeatedParameter && encloses => false,
            Some(first) if is_repeated && first.kind == CandidateKind::EndParameter && !first.is_closed => {
                // A repeated tag, unless the first one is the value or ends a line of text.
                let is_quoted = first.at == 0 || !first.starts_line;
                is_complete && (first.has_text || (self.is_block && is_quoted))
            }
            Some(first) if first.kind == CandidateKind::EndCall => is_complete,
            Some(first) => is_complete && (first.has_text || is_second_end),
        };
        if is_better {
            self.suggest(tag.at, CandidateKind::EndParameter, tag.starts_line);
        }
        let is_near =
            |first: &EndCandidate| first.kind == CandidateKind::EndParameter && !first.is_closed && !first.has_text;
        self.candidate.as_ref().is_some_and(is_near) && matches!(next, Some(Parameter(_)))
    }

    fn end_call(&mut self, tag: &SeenTag, is_on_edge: bool, next: Option<&TagKind>, is_last: bool) {
        use TagKind::{EndParameter, EndToolCall, Function, ToolCall};
        let ends_call = is_last || matches!(next, Some(EndToolCall | ToolCall | Function(_)));
        let follows_end = tag.after.as_ref().is_some_and(TagKind::closes);
        if !(if tag.is_exact { is_on_edge } else { follows_end || (ends_call && tag.starts_line) }) {
            return self.push_text();
        }
        if self.close(&tag.kind).is_some() {
            let is_outer = self.open.is_empty();
            if let Some(candidate) = self.candidate.as_mut().filter(|candidate| candidate.opens() && is_outer) {
                candidate.close();
            }
            return;
        }
        // After a `</parameter>` and text, closing tags of the call alone are no end: models write text in a call.
        let is_first = |candidate: &&mut EndCandidate| {
            candidate.kind == CandidateKind::EndParameter || !(ends_call && candidate.is_past_call())
        };
        if let Some(candidate) = self.candidate.as_mut().filter(is_first) {
            return candidate.close();
        }
        let parameter = self.matched.filter(|matched| tag.after == Some(EndParameter) && !matched.is_in_call);
        match parameter {
            Some(matched) => {
                self.suggest(matched.at, CandidateKind::EndParameter, tag.starts_line);
                self.candidate.as_mut().map(EndCandidate::close);
            }
            None => self.suggest(tag.at, CandidateKind::EndCall, tag.starts_line),
        }
    }

    fn suggest(&mut self, at: usize, kind: CandidateKind, starts_line: bool) {
        self.candidate = Some(EndCandidate { at, kind, starts_line, is_closed: false, has_text: false });
        self.open.clear();
    }
}
