//! Draws Markdown on a terminal while it streams: bold text, code, headings and lists. Everything else, and markup that
//! is not closed in its line, stays as it is.

use super::word_wrap::WordWrap;
use std::mem;

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
/// Ends bold and dim text.
const NORMAL: &str = "\x1b[22m";
const CODE: &str = "\x1b[36m";
const NO_CODE: &str = "\x1b[39m";

/// Maximum number of bytes of markup that are held back until its end is known. Longer markup stays as it is.
const MAX_HELD: usize = 400;

/// Turns Markdown into text for a terminal. Text that may be markup is held back until the text after it decides.
pub struct MarkdownView {
    wrap: WordWrap,
    /// False for a terminal without styles. Lines are then broken between words, and nothing else is changed.
    has_styles: bool,
    held: String,
    is_line_start: bool,
    is_heading: bool,
    is_bold: bool,
    /// The line that began a block of code: its character, and their number.
    fence: Option<(char, usize)>,
    /// The last character of the line so far, or a line feed.
    previous: char,
}

/// The kind of a line, which its start shows.
enum LineKind {
    Plain,
    Heading,
    /// An item of a list, whose marker has this many bytes.
    Item(usize),
    /// The first line of a block of code.
    Fence(char, usize),
}

impl MarkdownView {
    pub fn new(has_styles: bool) -> Self {
        Self {
            wrap: WordWrap::default(),
            has_styles,
            held: String::new(),
            is_line_start: true,
            is_heading: false,
            is_bold: false,
            fence: None,
            previous: '\n',
        }
    }

    /// Adds text for a terminal of this width. Returns the text to write.
    pub fn push(&mut self, text: &str, width: usize) -> String {
        self.wrap.width = width;
        if self.has_styles {
            self.held += text;
            self.draw(false);
        } else {
            self.wrap.push(text);
        }
        self.wrap.take()
    }

    /// Ends the text. Returns the rest of it.
    pub fn finish(&mut self) -> String {
        self.draw(true);
        if self.fence.take().is_some() {
            self.wrap.style(NO_CODE);
        }
        self.end_line();
        self.wrap.finish()
    }

    /// Draws the held text as far as its markup is decided. At the end of the text, everything is decided.
    fn draw(&mut self, is_end: bool) {
        let held = mem::take(&mut self.held);
        let mut rest = &held[..];
        while !rest.is_empty() {
            let drawn = match self.fence {
                Some(fence) => self.draw_code(rest, fence, is_end),
                None if self.is_line_start => self.draw_line_start(rest, is_end),
                None => self.draw_inline(rest, is_end),
            };
            let Some(drawn) = drawn else { break };
            rest = &rest[drawn..];
        }
        self.held = rest.to_owned();
    }

    /// Draws a part of a block of code. Like the functions below, returns the number of bytes drawn, or `None` if more
    /// text is needed.
    fn draw_code(&mut self, text: &str, (mark, count): (char, usize), is_end: bool) -> Option<usize> {
        if mem::take(&mut self.is_line_start) {
            let (line, is_whole) = first_line(text, is_end);
            if line.trim().chars().all(|c| c == mark) {
                if !is_whole {
                    self.is_line_start = true;
                    return None;
                }
                if line.trim().len() >= count {
                    self.fence = None;
                    self.wrap.style(NO_CODE);
                    self.draw_fence(line);
                    return Some(line.len());
                }
            }
        }
        let end = text.find('\n').map_or(text.len(), |at| at + 1);
        self.is_line_start = text[..end].ends_with('\n');
        self.wrap.push_unbroken(&text[..end]);
        Some(end)
    }

    fn draw_fence(&mut self, line: &str) {
        self.wrap.style(DIM);
        self.wrap.push_unbroken(line);
        self.wrap.style(NORMAL);
    }

    fn draw_line_start(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let (line, is_whole) = first_line(text, is_end);
        let bare = line.trim_start();
        let indent = line.len() - bare.len();
        let kind = line_kind(bare, is_whole)?;
        self.is_line_start = false;
        match kind {
            LineKind::Plain => Some(0),
            LineKind::Heading => {
                self.is_heading = true;
                self.wrap.style(BOLD);
                Some(0)
            }
            LineKind::Item(marker) => {
                let drawn = if bare.starts_with(['-', '*', '+']) { "•" } else { &bare[..marker] };
                self.wrap.push(&format!("{}{drawn} ", &line[..indent]));
                self.wrap.hang();
                self.previous = ' ';
                Some(indent + marker + 1)
            }
            LineKind::Fence(mark, count) => {
                self.draw_fence(line);
                self.wrap.style(CODE);
                self.fence = Some((mark, count));
                Some(line.len())
            }
        }
    }

    fn draw_inline(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let first = text.chars().next()?;
        match first {
            '\n' => {
                self.end_line();
                self.wrap.push("\n");
                self.previous = '\n';
                self.is_line_start = true;
                Some(1)
            }
            '\\' => {
                // `\*` is a star and no markup.
                let escaped = text[1..].chars().next();
                if escaped.is_none() && !is_end {
                    return None;
                }
                let is_escape = escaped.is_some_and(|c| "\\*`".contains(c));
                Some(self.push_plain(&text[..1 + usize::from(is_escape)]))
            }
            '`' => self.draw_code_span(text, is_end),
            '*' => self.draw_stars(text, is_end),
            _ => Some(self.push_plain(&text[..first.len_utf8()])),
        }
    }

    fn draw_code_span(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let (line, is_whole) = first_line(text, is_end);
        let ticks = run(line, '`');
        match span_end(&line[ticks..], ticks, is_whole) {
            SpanEnd::At(end) => {
                self.wrap.style(CODE);
                self.wrap.push(&line[ticks..ticks + end]);
                self.previous = '`';
                self.wrap.style(NO_CODE);
                Some(ticks + end + ticks)
            }
            SpanEnd::None => Some(self.push_plain(&line[..ticks])),
            SpanEnd::Unknown => None,
        }
    }

    fn draw_stars(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let (line, is_whole) = first_line(text, is_end);
        let stars = run(line, '*');
        if stars == line.len() && !is_whole {
            return None;
        }
        if stars == 2 && self.is_bold && closes(self.previous, &line[2..]) {
            return Some(self.set_bold(false));
        }
        if stars == 2 && !self.is_bold && opens(self.previous, &line[2..]) {
            match bold_end(&line[2..], is_whole) {
                SpanEnd::At(_) => return Some(self.set_bold(true)),
                SpanEnd::Unknown => return None,
                SpanEnd::None => {}
            }
        }
        Some(self.push_plain(&line[..stars]))
    }

    /// Begins or ends bold text, at its marker. A heading is bold anyway. Returns the number of bytes of the marker.
    fn set_bold(&mut self, is_bold: bool) -> usize {
        self.is_bold = is_bold;
        if !self.is_heading {
            self.wrap.style(if is_bold { BOLD } else { NORMAL });
        }
        2
    }

    /// Writes text as it is. Returns its number of bytes.
    fn push_plain(&mut self, text: &str) -> usize {
        self.wrap.push(text);
        self.previous = text.chars().next_back().unwrap_or(self.previous);
        text.len()
    }

    fn end_line(&mut self) {
        if mem::take(&mut self.is_heading) | mem::take(&mut self.is_bold) {
            self.wrap.style(NORMAL);
        }
    }
}

/// End of a span in a line.
#[derive(Debug, PartialEq)]
enum SpanEnd {
    /// Its closing marker begins at this byte.
    At(usize),
    None,
    /// More text is needed.
    Unknown,
}

/// The first line of a text, at most [`MAX_HELD`] bytes of it, and whether no more bytes of it are needed.
fn first_line(text: &str, is_end: bool) -> (&str, bool) {
    let most = (0..=MAX_HELD.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    match text[..most].find('\n') {
        Some(end) => (&text[..end], true),
        None => (&text[..most], is_end || text.len() > most),
    }
}

/// The kind of a line, without its indentation. `None` if the rest of the line decides.
fn line_kind(line: &str, is_whole: bool) -> Option<LineKind> {
    let Some(first) = line.chars().next() else { return is_whole.then_some(LineKind::Plain) };
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    let marks = run(line, first);
    let is_item = |marker: usize| match line.as_bytes().get(marker) {
        None if !is_whole => None,
        Some(b' ') => Some(LineKind::Item(marker)),
        _ => Some(LineKind::Plain),
    };
    match first {
        '`' | '~' if marks >= 3 || marks == line.len() => {
            let is_fence = marks >= 3 && !(first == '`' && line[marks..].contains('`'));
            let kind = if is_fence { LineKind::Fence(first, marks) } else { LineKind::Plain };
            (is_whole || !is_fence && marks >= 3).then_some(kind)
        }
        '#' if marks <= 6 => match line.as_bytes().get(marks) {
            None if !is_whole => None,
            Some(b' ') => Some(LineKind::Heading),
            _ => Some(LineKind::Plain),
        },
        '-' | '*' | '+' => is_item(1),
        '0'..='9' if digits <= 9 => match line.as_bytes().get(digits) {
            None if !is_whole => None,
            Some(b'.' | b')') => is_item(digits + 1),
            _ => Some(LineKind::Plain),
        },
        _ => Some(LineKind::Plain),
    }
}

/// Number of times that `c`, an ASCII character, is repeated at the start of a text.
fn run(text: &str, c: char) -> usize {
    text.chars().take_while(|&other| other == c).count() * c.len_utf8()
}

/// The closing `ticks` backticks in the rest of a line.
fn span_end(line: &str, ticks: usize, is_whole: bool) -> SpanEnd {
    let mut at = 0;
    while let Some(next) = line[at..].find('`') {
        let begin = at + next;
        let count = run(&line[begin..], '`');
        at = begin + count;
        if at == line.len() && !is_whole {
            return SpanEnd::Unknown;
        }
        if count == ticks && begin > 0 {
            return SpanEnd::At(begin);
        }
    }
    if is_whole { SpanEnd::None } else { SpanEnd::Unknown }
}

/// The `**` that closes bold text in the rest of a line.
fn bold_end(line: &str, is_whole: bool) -> SpanEnd {
    let mut previous = ' ';
    let mut at = 0;
    while let Some(c) = line[at..].chars().next() {
        let rest = &line[at..];
        let marks = run(rest, c);
        if "*`".contains(c) && at + marks == line.len() && !is_whole {
            return SpanEnd::Unknown;
        }
        let length = match c {
            '\\' => 1 + rest[1..].chars().next().filter(|c| "\\*`".contains(*c)).map_or(0, char::len_utf8),
            '`' => match span_end(&rest[marks..], marks, is_whole) {
                SpanEnd::At(end) => marks + end + marks,
                SpanEnd::None => marks,
                SpanEnd::Unknown => return SpanEnd::Unknown,
            },
            '*' if marks == 2 && closes(previous, &rest[2..]) => return SpanEnd::At(at),
            '*' => marks,
            _ => c.len_utf8(),
        };
        previous = rest[..length].chars().next_back().unwrap_or(c);
        at += length;
    }
    if is_whole { SpanEnd::None } else { SpanEnd::Unknown }
}

/// True if `**` between `previous` and `next` can begin bold text. In `2**3`, it is no markup.
fn opens(previous: char, next: &str) -> bool {
    !previous.is_ascii_alphanumeric() && next.starts_with(|c: char| !c.is_whitespace())
}

/// True if `**` between `previous` and `next` can end bold text.
fn closes(previous: char, next: &str) -> bool {
    !previous.is_whitespace() && !next.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::mutate::Dice;

    const WIDTH: usize = 24;

    /// Draws a text that arrives in `pieces`.
    fn drawn(pieces: &[&str]) -> String {
        let mut view = MarkdownView::new(true);
        let mut out: String = pieces.iter().map(|piece| view.push(piece, WIDTH)).collect();
        out += &view.finish();
        out
    }

    fn with_names(text: &str) -> String {
        [(BOLD, "<b>"), (DIM, "<dim>"), (NORMAL, "</>"), (CODE, "<code>"), (NO_CODE, "</code>")]
            .iter()
            .fold(text.to_owned(), |text, (escape, name)| text.replace(escape, name))
    }

    #[test]
    fn bold_code_headings_and_lists_are_drawn() {
        for (text, expected) in [
            ("a **bold word**, b", "a <b>bold word</>, b"),
            ("**a `b` c** `d**e`", "<b>a <code>b</code> c</> <code>d**e</code>"),
            ("这是**重点**内容", "这是<b>重点</>内容"),
            ("# A **b** c\nd", "<b># A b c</>\nd"),
            ("- a\n  * b\n10. c", "• a\n  • b\n10. c"),
            ("- one two three four five", "• one two three four\n  five"),
            (
                "```rust\nlet a = \"**b**\"; // not broken\n```\nc",
                "<dim>```rust</><code>\nlet a = \"**b**\"; // not broken\n</code><dim>```</>\nc",
            ),
            ("~~~\n```\n", "<dim>~~~</><code>\n```\n</code>"),
        ] {
            assert_eq!(with_names(&drawn(&[text])), expected);
        }
    }

    #[test]
    fn other_text_stays_as_it_is() {
        let short = ["**open", "`open", "***a***", "#hashtag", "---", "<b>x</b>", "``", "12", ""];
        let long = [
            "2**3 and 4**5",
            "2 ** 3 ** 4",
            "a * b * c",
            "**open\nclosed**",
            r"\*\*a\*\* C:\*",
            "snake_case and __init__",
            "#!/bin/sh",
            "-5 and 1.5",
            "| a | b |",
        ];
        for text in short.into_iter().chain(long) {
            assert_eq!(drawn(&[text]), text);
        }
    }

    #[test]
    fn ordinary_text_is_held_for_a_word() {
        let mut view = MarkdownView::new(true);
        assert_eq!(view.push("one two", WIDTH), "one");
        assert_eq!(view.push(" **thr", WIDTH), " two");
        assert_eq!(with_names(&view.push("ee** ", WIDTH)), " <b>three</>");
        view.push("**", WIDTH);
        let long = view.push(&"abc ".repeat(MAX_HELD), WIDTH);
        assert!(long.contains("**abc"), "markup that is not closed is held for {MAX_HELD} bytes at most");
    }

    /// Random texts: how a text is cut into pieces changes nothing, and only markers and spaces at line breaks are lost.
    #[test]
    fn random_text_is_drawn_whole() {
        let mut dice = Dice(1);
        const TOKENS: [&str; 20] = [
            "a", "bc", "word", " ", " ", "\n", "*", "**", "***", "`", "```", "~~~", "#", "- ", "1.", "\\", "é", "你",
            ".", "\t",
        ];
        for _ in 0..20_000 {
            let tokens: Vec<&str> = (0..dice.below(24)).map(|_| *dice.pick(&TOKENS)).collect();
            let text = tokens.concat();
            let whole = drawn(&[&text]);
            assert_eq!(drawn(&tokens), whole, "{text:?}");
            let plain =
                [BOLD, DIM, NORMAL, CODE, NO_CODE].iter().fold(whole.clone(), |text, style| text.replace(style, ""));
            let rest = |text: &str| text.replace(|c: char| c.is_whitespace() || "*`-•".contains(c), "");
            assert_eq!(rest(&plain), rest(&text), "{text:?}");
            let count = |style| whole.matches(style).count();
            assert!(count(NORMAL) >= count(DIM) && count(CODE) == count(NO_CODE), "{text:?}: {whole:?}");
        }
    }
}
