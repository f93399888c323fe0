//! Breaks lines between words, because a terminal breaks them at its edge, also within a word.

use std::mem;
use unicode_width::UnicodeWidthChar;

/// Text that is written word by word. A word is held back until its end is known.
#[derive(Debug, Default)]
pub struct WordWrap {
    /// Columns of the terminal. 0 if it has no known width; lines are then not broken.
    pub width: usize,
    /// Columns of the line that are in use.
    column: usize,
    /// Column at which the next lines of a broken line begin.
    indent: usize,
    /// Spaces after the last word. A line break replaces them.
    gap: String,
    word: String,
    word_width: usize,
    /// True if the start of the word was written before its end was known, because the word fills a line.
    has_begun: bool,
    out: String,
}

impl WordWrap {
    /// Adds text without control characters except line feeds and tabs.
    pub fn push(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word();
                    self.has_begun = false;
                    self.out += &mem::take(&mut self.gap);
                    self.out.push('\n');
                    self.column = 0;
                    self.indent = 0;
                }
                ' ' | '\t' => {
                    self.end_word();
                    self.has_begun = false;
                    self.gap.push(c);
                }
                _ => self.push_in_word(c),
            }
        }
    }

    fn push_in_word(&mut self, c: char) {
        let width = c.width().unwrap_or(0);
        // Chinese and Japanese have no spaces: a line may be broken between any two wide characters.
        let is_wide = width > 1;
        if is_wide {
            self.end_word();
            self.has_begun = false;
        }
        self.word.push(c);
        self.word_width += width;
        // The terminal breaks a word that is longer than a line.
        let is_long = self.width > 0 && self.word_width >= self.width;
        if is_wide || is_long {
            self.end_word();
            self.has_begun = is_long;
        }
    }

    /// Adds an escape sequence, which takes no columns.
    pub fn style(&mut self, escape: &str) {
        self.word += escape;
    }

    /// Adds text whose lines are not broken, such as code.
    pub fn push_unbroken(&mut self, text: &str) {
        self.end_word();
        self.out += &mem::take(&mut self.gap);
        self.out += text;
        self.column = if text.ends_with('\n') { 0 } else { self.column + columns(text) };
    }

    /// Lets the next lines of this line begin at this column, as in an item of a list.
    pub fn hang(&mut self) {
        self.end_word();
        self.set_indent(self.column + columns(&self.gap));
    }

    fn set_indent(&mut self, column: usize) {
        self.indent = if column <= self.width / 2 { column } else { 0 };
    }

    fn end_word(&mut self) {
        if self.word_width == 0 {
            self.out += &mem::take(&mut self.word);
            return;
        }
        if self.column == 0 {
            self.set_indent(columns(&self.gap));
        }
        let gap = mem::take(&mut self.gap);
        let end = self.column + columns(&gap) + self.word_width;
        if self.width > 0 && end > self.width && self.column > self.indent && !self.has_begun {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', self.indent));
            self.column = self.indent;
        } else {
            self.out += &gap;
            self.column += columns(&gap);
        }
        self.out += &mem::take(&mut self.word);
        self.column += mem::take(&mut self.word_width);
        while self.width > 0 && self.column > self.width {
            self.column -= self.width;
        }
    }

    /// Takes the text that is ready to be written.
    pub fn take(&mut self) -> String {
        mem::take(&mut self.out)
    }

    /// Takes all text.
    pub fn finish(&mut self) -> String {
        self.end_word();
        self.out += &mem::take(&mut self.gap);
        self.take()
    }
}

/// Columns of a text. A tab is counted as one, because its width depends on its place.
fn columns(text: &str) -> usize {
    text.chars().map(|c| if c == '\t' { 1 } else { c.width().unwrap_or(0) }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(width: usize, text: &str) -> String {
        let mut wrap = WordWrap { width, ..WordWrap::default() };
        wrap.push(text);
        wrap.finish()
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped(10, "one two three four"), "one two\nthree four");
        assert_eq!(wrapped(10, "one two th\nree"), "one two th\nree", "a line may be full");
        assert_eq!(wrapped(10, "  one two three"), "  one two\n  three", "the indentation is kept");
        assert_eq!(wrapped(10, "a\n\n  \nb  c  "), "a\n\n  \nb  c  ");
        assert_eq!(wrapped(0, "one two three four"), "one two three four");
    }

    #[test]
    fn word_longer_than_a_line_is_kept() {
        assert_eq!(wrapped(10, "see http://example.com/page now"), "see\nhttp://example.com/page now");
        assert_eq!(wrapped(4, "abcdefgh ij"), "abcdefgh\nij");
    }

    #[test]
    fn wide_characters_break_anywhere() {
        assert_eq!(wrapped(6, "你好世界再见"), "你好世\n界再见");
        assert_eq!(wrapped(7, "ab你好世界"), "ab你好\n世界");
    }

    #[test]
    fn styles_take_no_columns() {
        let mut wrap = WordWrap { width: 8, ..WordWrap::default() };
        wrap.push("one ");
        wrap.style("\x1b[1m");
        wrap.push("two");
        wrap.style("\x1b[22m");
        wrap.push(", six");
        assert_eq!(wrap.finish(), "one \x1b[1mtwo\x1b[22m,\nsix");
    }
}
