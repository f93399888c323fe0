//! Text for the terminal: reports, tables, and text of other programs without control characters.
//!
//! The program prints with these functions. `println!` and `eprintln!` panic if the other end of a pipe is closed or a disk
//! is full, so the crate denies them.

use super::word_wrap::WordWrap;
use serde::Serialize;
use std::{
    borrow::Cow,
    fmt::Display,
    io::{self, Write},
    os::fd::AsFd,
    path::Path,
};

/// Prints a report as text or as one JSON object. A closed stdout is not an error.
pub fn show(report: &(impl Display + Serialize), json: bool) {
    let text = if json { serde_json::to_string_pretty(report).unwrap_or_default() + "\n" } else { report.to_string() };
    print(text);
}

/// Prints text to stdout. A closed stdout is not an error.
pub fn print(text: impl Display) {
    let mut stdout = io::stdout().lock();
    let _ = write!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// Prints a line to stdout. A closed stdout is not an error.
pub fn print_line(line: impl Display) {
    print(format_args!("{line}\n"));
}

/// Prints text to stderr. A closed stderr is not an error.
pub fn print_to_stderr(text: impl Display) {
    let _ = write!(io::stderr().lock(), "{text}");
}

/// Prints a line for the user to stderr, without control characters. A terminal gets no broken words. A closed stderr is
/// not an error.
pub fn print_note(line: impl Display) {
    print_to_stderr(format_args!("{}\n", wrapped(&printable(&line.to_string()), &io::stderr())));
}

/// Breaks lines between words at the edge of a terminal. Text for another stream stays as it is.
pub fn wrapped(text: &str, stream: &impl AsFd) -> String {
    let mut wrap = WordWrap::default();
    wrap.width = width(stream);
    wrap.push(text);
    wrap.finish()
}

/// Columns of the terminal, or 0.
pub fn width(stream: &impl AsFd) -> usize {
    terminal_size::terminal_size_of(stream).map_or(0, |(width, _)| width.0.into())
}

/// Replaces control characters except line feed and tab, so that text from other programs cannot control the terminal.
/// A carriage return before a line feed is removed.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(is_control) {
        text.replace("\r\n", "\n").replace(is_control, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Makes streamed text printable. A line end may be cut between two pieces.
#[derive(Debug, Default)]
pub struct PrintableStream {
    /// True if the last piece ended in a carriage return, which is held until the next piece.
    holds_return: bool,
}

impl PrintableStream {
    /// The next piece of the text.
    pub fn push(&mut self, piece: &str) -> String {
        let mut text = if self.holds_return { format!("\r{piece}") } else { piece.to_owned() };
        self.holds_return = text.ends_with('\r');
        if self.holds_return {
            text.pop();
        }
        printable(&text).into_owned()
    }
}

/// Aligns the columns of a table with a header. Columns are separated by two spaces. The last column is not padded. A line
/// feed or tab in a cell is replaced, so that a name cannot forge a row.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let all: Vec<[Cow<'_, str>; N]> = std::iter::once(header.map(Cow::from))
        .chain(rows.iter().map(|row| row.each_ref().map(|cell| printable_line(cell))))
        .collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &all {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// [`printable`], with line feeds and tabs replaced, too.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    let text = printable(text);
    if text.contains(['\n', '\t']) { text.replace(['\n', '\t'], "\u{fffd}").into() } else { text }
}

/// The path of a directory, with `~` for the home directory.
pub fn short_path(path: &Path) -> String {
    let home = std::env::home_dir().filter(|home| !home.as_os_str().is_empty());
    match home.and_then(|home| Some(path.strip_prefix(home).ok()?.to_path_buf())) {
        Some(rest) => Path::new("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns_under_headers() {
        let rows = [["a".into(), "1.0 GiB".into()], ["long\nr\x1b".into(), "2".into()]];
        assert_eq!(table(["NAME", "SIZE"], &rows), "NAME     SIZE\na        1.0 GiB\nlong\u{fffd}r\u{fffd}  2\n");
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\tb\n"), "a\tb\n");
        assert_eq!(printable("a\x1b]52;c;eA==\x07\u{9b}1m\r"), "a\u{fffd}]52;c;eA==\u{fffd}\u{fffd}1m\u{fffd}");
        assert_eq!(printable("a\r\nb\rc\r\r\n"), "a\nb\u{fffd}c\u{fffd}\n");
    }

    #[test]
    fn line_ends_are_independent_of_cuts() {
        let text = "a\r\nb\rc\r\r\n\r\n\td\x07é";
        for first in (0..=text.len()).filter(|&at| text.is_char_boundary(at)) {
            for second in (first..=text.len()).filter(|&at| text.is_char_boundary(at)) {
                let mut stream = PrintableStream::default();
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(pieces.map(|piece| stream.push(piece)).concat(), printable(text), "{pieces:?}");
            }
        }
    }
}
