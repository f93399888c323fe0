//! Text for the terminal: reports, tables, and text of other programs without control characters.

use serde::Serialize;
use std::{
    borrow::Cow,
    fmt::Display,
    io::{self, Write},
    path::Path,
};

/// Prints a report as text or as one JSON object. A closed stdout is not an error.
pub fn show(report: &(impl Display + Serialize), json: bool) {
    let text = if json { serde_json::to_string_pretty(report).unwrap_or_default() + "\n" } else { report.to_string() };
    let _ = io::stdout().write_all(text.as_bytes());
}

/// Replaces control characters except line feed and tab, so that text from other programs cannot control the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(is_control) { text.replace(is_control, "\u{fffd}").into() } else { text.into() }
}

/// Aligns the columns of a table with a header. Columns are separated by two spaces. The last column is not padded.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let all: Vec<[Cow<'_, str>; N]> = std::iter::once(header.map(Cow::from))
        .chain(rows.iter().map(|row| row.each_ref().map(|cell| printable(cell))))
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
        let rows = [["a".into(), "1.0 GiB".into()], ["longer\x1b".into(), "2".into()]];
        assert_eq!(table(["NAME", "SIZE"], &rows), "NAME     SIZE\na        1.0 GiB\nlonger\u{fffd}  2\n");
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\tb\n"), "a\tb\n");
        assert_eq!(printable("a\x1b]52;c;eA==\x07\u{9b}1m\r"), "a\u{fffd}]52;c;eA==\u{fffd}\u{fffd}1m\u{fffd}");
    }
}
