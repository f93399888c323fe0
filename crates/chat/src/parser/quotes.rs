//! Quotation marks that open and close on one line.

/// Follows the quotation marks of one line.
#[derive(Default)]
pub(super) struct Quotes {
    open: Option<char>,
    is_escaped: bool,
    /// The text before is a word that an apostrophe belongs to, as in `it's`, and not the prefix of a string as in `r'x'`.
    after_word: bool,
    prefix: usize,
    /// True if the open mark is known to be closed on its line.
    is_closed: bool,
    /// Number of bytes that [`Quotes::enclose`] has searched for the closing mark.
    searched: usize,
}

impl Quotes {
    /// Reads the next character. An apostrophe after a letter opens nothing.
    pub fn push(&mut self, c: char) {
        let is_escaped = std::mem::take(&mut self.is_escaped);
        match self.open {
            _ if c == '\n' => *self = Self::default(),
            _ if is_escaped => {}
            _ if c == '\\' => self.is_escaped = true,
            Some(mark) if mark == c => *self = Self::default(),
            None if "\"`".contains(c) || (c == '\'' && !self.after_word) => self.open = Some(c),
            _ => {}
        }
        self.after_word = c.is_alphanumeric() && (self.after_word || self.prefix > 1 || !"rbfuRBFU".contains(c));
        self.prefix = if c.is_alphanumeric() { self.prefix + 1 } else { 0 };
    }

    /// True if the start of `text` is between two marks on one line. `None` if that depends on more text. `last` is true
    /// if no more text follows.
    pub fn enclose(&mut self, text: &str, last: bool) -> Option<bool> {
        let Some(mark) = self.open else { return Some(false) };
        if self.is_closed {
            return Some(true);
        }
        let bytes = text.as_bytes();
        let is_end = |&at: &usize| {
            let is_mark = bytes[at] == mark as u8 && (at == 0 || bytes[at - 1] != b'\\');
            is_mark || bytes[at] == b'\n'
        };
        let Some(end) = (self.searched..bytes.len()).find(is_end) else {
            self.searched = bytes.len();
            return last.then_some(false);
        };
        self.searched = 0;
        self.is_closed = bytes[end] != b'\n';
        if !self.is_closed {
            self.open = None;
        }
        Some(self.is_closed)
    }
}
