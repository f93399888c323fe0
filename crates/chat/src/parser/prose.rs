//! Finds calls in reasoning and content. A tag in a Markdown fence, in inline code or between quotation marks is text.
//!
//! A fence and inline code count only if they are closed: a call after a fence that stays open is a call. Until the text
//! after the tag shows this, it is held back.

use super::{
    quotes::Quotes,
    tags::{InputEnd, Reading},
};

/// A tag that a `<` in prose may start.
pub(super) enum Mark {
    Call,
    /// Dropped: a closing tag of the call before the text, or an empty call.
    Leftover,
    EndThink,
}

/// Result of [`Prose::scan`].
pub(super) struct Found {
    /// Offset in the unconsumed text of the mark. Without a mark, no call starts before this offset. If more text follows,
    /// the white space before a call that may follow is left out.
    pub at: usize,
    pub mark: Option<Mark>,
}

/// Length of the start of a line that is searched for a fence.
const MAX_FENCE: usize = 200;

/// Follows the Markdown of a text. Offsets count from the start of the text.
#[derive(Default)]
pub(super) struct Prose {
    consumed: usize,
    position: usize,
    /// End of the text without the white space at its end.
    text_end: usize,
    /// True if the line has text other than white space.
    has_text: bool,
    quotes: Quotes,
    /// The run of backticks or tildes that the text so far ends with.
    run: MarkRun,
    /// The start of the line.
    line: String,
    fence: Option<MarkRun>,
    /// Length of the run that opened inline code.
    code: Option<usize>,
    /// A call in a fence or in inline code that is not closed yet.
    quoted: Option<QuotedCall>,
}

#[derive(Default, Clone, Copy, PartialEq)]
struct MarkRun {
    mark: char,
    length: usize,
}

struct QuotedCall {
    at: usize,
    /// End of the text before the call.
    text_end: usize,
    in_fence: bool,
}

impl Prose {
    /// The caller has consumed `length` bytes of the text.
    pub fn consume(&mut self, length: usize) {
        self.consumed += length;
    }

    /// Reads on in `text`, the unconsumed text. `judge` reads a `<`. Its second argument is true if the `<` is the first
    /// text of its line.
    pub fn scan(&mut self, text: &str, end: InputEnd, mut judge: impl FnMut(&str, bool) -> Reading<Mark>) -> Found {
        while let Some(c) = text[self.position - self.consumed..].chars().next() {
            let at = self.position - self.consumed;
            if c == '<' {
                match judge(&text[at..], !self.has_text) {
                    Reading::Found(Mark::EndThink) => return Found { at, mark: Some(Mark::EndThink) },
                    Reading::Found(Mark::Leftover) if self.fence.is_none() && self.quoted.is_none() => {
                        return Found { at, mark: Some(Mark::Leftover) };
                    }
                    Reading::Found(Mark::Call) if self.quoted.is_none() => {
                        match self.is_quoted(&text[at..], end != InputEnd::MoreToCome) {
                            Some(true) => {}
                            Some(false) => return Found { at, mark: Some(Mark::Call) },
                            None => break,
                        }
                    }
                    Reading::Unfinished if end != InputEnd::Complete => break,
                    _ => {}
                }
            }
            self.push(c);
            self.position += c.len_utf8();
            if !c.is_whitespace() {
                self.text_end = self.position;
            }
        }
        if end == InputEnd::Complete {
            self.end_line();
        }
        let found = |offset: usize, mark| Found { at: offset - self.consumed, mark };
        match (&self.quoted, end) {
            (Some(call), InputEnd::Complete) => found(call.at, Some(Mark::Call)),
            (Some(call), InputEnd::MoreToCome) => found(call.text_end, None),
            (None, InputEnd::MoreToCome) => found(self.text_end, None),
            _ => found(self.position, None),
        }
    }

    /// True if a call at `position` is quoted, also if the end of a fence or of inline code has still to come.
    fn is_quoted(&mut self, rest: &str, last: bool) -> Option<bool> {
        self.end_run();
        let in_fence = self.fence.is_some();
        if in_fence || self.code.is_some() {
            self.quoted = Some(QuotedCall { at: self.position, text_end: self.text_end, in_fence });
            return Some(true);
        }
        self.quotes.enclose(rest, last)
    }

    fn push(&mut self, c: char) {
        if c == '\n' {
            return self.end_line();
        }
        if c != self.run.mark {
            self.end_run();
        }
        if c == '`' || c == '~' {
            self.run = MarkRun { mark: c, length: self.run.length + 1 };
        } else {
            self.quotes.push(c);
        }
        self.has_text |= !c.is_whitespace();
        if self.line.len() < MAX_FENCE {
            self.line.push(c);
        }
    }

    /// Ends a run of backticks, which opens or closes inline code.
    fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        if run.mark != '`' || self.fence.is_some() {
            return;
        }
        if self.code.is_none() {
            self.code = Some(run.length);
        } else if self.code == Some(run.length) {
            self.code = None;
            self.quoted = None;
        }
    }

    fn end_line(&mut self) {
        self.end_run();
        let line = std::mem::take(&mut self.line);
        // Inline code around a call may have several lines.
        if self.quoted.as_ref().is_none_or(|call| call.in_fence) {
            self.code = None;
            self.read_fence(&line);
        }
        self.quotes = Quotes::default();
        self.has_text = false;
    }

    /// Opens or closes a fence if `line` is one, also in a list or a quotation.
    fn read_fence(&mut self, line: &str) {
        let fence = line.trim_start_matches(|c: char| c.is_whitespace() || c.is_ascii_digit() || ">-*+.)".contains(c));
        let mark = if fence.starts_with('~') { '~' } else { '`' };
        let info = fence.trim_start_matches(mark);
        let run = MarkRun { mark, length: fence.len() - info.len() };
        match self.fence {
            _ if run.length < 3 => {}
            None if mark == '~' || !info.contains('`') => self.fence = Some(run),
            Some(open) if open.mark == mark && open.length <= run.length && info.trim().is_empty() => {
                self.fence = None;
                self.quoted = None;
            }
            _ => {}
        }
    }
}
