//! Reads JSON files as people and Python write them.

use super::read_small_file;
use std::{io, path::Path};

/// Reads a JSON file of at most `max` bytes. The result can differ from the file, so that every JSON parser accepts it:
///
/// * A byte order mark, which some editors on Windows write, is left out.
/// * A number without a fraction has no decimals: `128.0` becomes `128`.
/// * Python's `NaN`, `Infinity` and `-Infinity`, which JSON does not have, are strings. A reader that needs the number
///   refuses the string.
///
/// # Errors
/// The errors of [`read_small_file`]. The file is a Git LFS pointer, a web page or empty.
pub fn read_json_file(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let text = read_small_file(path, max)?;
    check_not_placeholder(&text)?;
    if text.trim_ascii().is_empty() {
        Err(io::Error::other("it is empty; download it again"))
    } else {
        Ok(plain_json(&text))
    }
}

/// Fails if a download or a clone stored something else instead of the file: a Git LFS pointer or a web page.
pub fn check_not_placeholder(text: &[u8]) -> io::Result<()> {
    let start = text.trim_ascii_start();
    let is_page = |tag: &str| start.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag.as_bytes()));
    if text.starts_with(LFS_START) {
        Err(io::Error::other(IS_LFS_POINTER))
    } else if is_page("<!doctype") || is_page("<html") {
        Err(io::Error::other("it is a web page, not the file; download it again"))
    } else {
        Ok(())
    }
}

/// The start of a Git LFS pointer, which takes the place of a large file in a clone without Git LFS.
pub const LFS_START: &[u8; 8] = b"version ";
/// Says that a file is a Git LFS pointer, and what to do.
pub const IS_LFS_POINTER: &str =
    "it is a Git LFS pointer, not the file; fetch it with `git lfs pull` or `moestro pull ORG/NAME`";

fn plain_json(text: &[u8]) -> Vec<u8> {
    let mut rest = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    let mut json = Vec::with_capacity(rest.len());
    while let Some(&first) = rest.first() {
        let length = match first {
            b'"' => string_length(rest),
            _ if is_in_word(first) => rest.iter().take_while(|byte| is_in_word(**byte)).count(),
            _ => 1,
        };
        let (token, after) = rest.split_at(length);
        match token {
            b"NaN" | b"Infinity" | b"-Infinity" => json.extend([b"\"", token, b"\""].concat()),
            _ => json.extend_from_slice(without_decimals(token).unwrap_or(token)),
        }
        rest = after;
    }
    json
}

/// Length of the string at the start of `text`, with its quotes.
fn string_length(text: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = text.iter().skip(1).position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |end| end + 2)
}

fn is_in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)
}

/// The digits of a number whose decimals are all zero. `None` for any other token.
fn without_decimals(token: &[u8]) -> Option<&[u8]> {
    let point = token.iter().position(|byte| *byte == b'.')?;
    let whole = &token[..point];
    let decimals = &token[point + 1..];
    let is_whole = whole.last()?.is_ascii_digit() && !decimals.is_empty() && decimals.iter().all(|byte| *byte == b'0');
    is_whole.then_some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused_with_a_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, remedy) in [
            ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
            ("\n<!DOCTYPE html><html></html>", "a web page, not the file; download it again"),
            (" \r\n", "it is empty; download it again"),
        ] {
            std::fs::write(file.path(), text).unwrap();
            assert!(read_json_file(file.path(), 1000).unwrap_err().to_string().contains(remedy));
        }
    }

    #[test]
    fn json_of_python_becomes_plain() {
        for (text, expected) in [
            ("\u{feff}{}", "{}"),
            ("[NaN, Infinity,-Infinity]", r#"["NaN", "Infinity","-Infinity"]"#),
            (r#"{"n": 128.0, "m":-2.00}"#, r#"{"n": 128, "m":-2}"#),
            ("[1.5, 0.10, 1e7, 1.0e-6, 10, 100000000.0]", "[1.5, 0.10, 1e7, 1.0e-6, 10, 100000000]"),
            // Strings, and text that is not JSON, stay as they are.
            (
                r#"{"NaN": "Infinity", "1.0": "a\" NaN 1.0", "b": "\\"}"#,
                r#"{"NaN": "Infinity", "1.0": "a\" NaN 1.0", "b": "\\"}"#,
            ),
            (r#"["a\"#, r#"["a\"#),
            ("[1., .0, -.0, 1.0.0, nan, NaN1, \u{feff}]", "[1., .0, -.0, 1.0.0, nan, NaN1, \u{feff}]"),
            ("", ""),
        ] {
            assert_eq!(String::from_utf8(plain_json(text.as_bytes())).unwrap(), expected, "{text}");
        }
    }
}
