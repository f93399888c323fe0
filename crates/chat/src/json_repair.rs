//! Repairs the parts of valid JSON for which `serde_json` refuses a whole document: numbers outside the range of a
//! double, and escapes of lone surrogates. Models write both. Clients in JavaScript write such an escape after they have
//! cut a text within an emoji.

use crate::json_numbers::is_integer;
use std::borrow::Cow;

/// Number of bytes of an escape such as `\u00e9`.
const ESCAPE: usize = 6;
/// The digits of the replacement character's escape.
const REPLACEMENT: &str = "fffd";

/// Puts every number outside the range of a double in quotes, and replaces every escape of a lone surrogate by that of
/// the replacement character. Templates print such a string without quotes, like a number.
pub fn repair(json: &str) -> Cow<'_, str> {
    let bytes = json.as_bytes();
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'"' => {
                while let Some(byte) = bytes.get(at) {
                    let (length, is_lone) = character(&bytes[at..]);
                    if is_lone {
                        out.extend([&json[copied..at + 2], REPLACEMENT]);
                        copied = at + length;
                    }
                    at += length;
                    if *byte == b'"' {
                        break;
                    }
                }
            }
            b'-' | b'0'..=b'9' => {
                at += bytes[at..].iter().take_while(|b| b.is_ascii_digit() || b"+-.eE".contains(b)).count();
                let number = &json[start..at];
                if is_integer(number).is_some() && number.parse().is_ok_and(f64::is_infinite) {
                    out.extend([&json[copied..start], "\"", number, "\""]);
                    copied = at;
                }
            }
            _ => {}
        }
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    out.push_str(&json[copied..]);
    Cow::Owned(out)
}

/// Replaces every escape of a lone surrogate in JSON by that of the replacement character.
pub fn replace_lone_surrogates(json: &mut [u8]) {
    let mut at = 0;
    while let Some(rest) = json.get_mut(at..) {
        let Some(escape) = rest.iter().position(|&byte| byte == b'\\') else { return };
        let (length, is_lone) = character(&rest[escape..]);
        if is_lone {
            rest[escape + 2..escape + ESCAPE].copy_from_slice(REPLACEMENT.as_bytes());
        }
        at += escape + length;
    }
}

/// Number of bytes of the byte, the escape, or the two escapes of a pair of surrogates at the start of `json`, and
/// whether it is a lone surrogate. An escape at the end may be longer than `json`.
fn character(json: &[u8]) -> (usize, bool) {
    match json {
        [b'\\', ..] => match surrogate(json) {
            Some(Surrogate::High) if surrogate(&json[ESCAPE..]) == Some(Surrogate::Low) => (2 * ESCAPE, false),
            Some(_) => (ESCAPE, true),
            None => (2, false),
        },
        _ => (1, false),
    }
}

#[derive(PartialEq, Eq)]
enum Surrogate {
    High,
    Low,
}

/// The surrogate whose escape is at the start of `json`.
fn surrogate(json: &[u8]) -> Option<Surrogate> {
    match json {
        [b'\\', b'u', b'd' | b'D', kind, digits @ ..]
            if digits.iter().take(2).filter(|b| b.is_ascii_hexdigit()).count() == 2 =>
        {
            match kind.to_ascii_lowercase() {
                b'8'..=b'9' | b'a'..=b'b' => Some(Surrogate::High),
                b'c'..=b'f' => Some(Surrogate::Low),
                _ => None,
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fmt::Write;

    #[test]
    fn only_huge_numbers_become_strings() {
        let big = "9".repeat(309);
        let text = r#"{"a": [1, -2.5e3, "1e999 \" 1e999"], "b": 1e308}"#;
        assert!(matches!(repair(text), Cow::Borrowed(same) if same == text));
        let sent = format!(r#"{{"a": {big}, "b": [-1e999, "\\"], "c": 1e999}}"#);
        assert_eq!(repair(&sent), format!(r#"{{"a": "{big}", "b": ["-1e999", "\\"], "c": "1e999"}}"#));
        assert!(serde_json::from_str::<serde_json::Value>(&repair(&sent)).is_ok());
        // Invalid JSON stays unchanged.
        for text in ["1e999.5", "{\"a", "\"\\", "1e9999e", "--1e999", "\"\\ud8", "\"\\ud80g\""] {
            assert_eq!(repair(text), text);
            let mut bytes = text.as_bytes().to_vec();
            replace_lone_surrogates(&mut bytes);
            assert_eq!(bytes, text.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn lone_surrogates_become_replacement_characters(
            units in prop::collection::vec(prop_oneof![
                prop::sample::select(vec![0xd7ff, 0xd800, 0xd83d, 0xdbff, 0xdc00, 0xde00, 0xdfff, 0xe000, 0x22, 0x5c, 0x75, 0x64]),
                any::<u16>(),
            ], 0..20),
            is_upper: bool,
        ) {
            let mut json = String::from("[1e999, \"");
            for unit in &units {
                match unit {
                    0x22 => json += "\\\"",
                    0x5c => json += "\\\\",
                    0x64 | 0x75 => json.push(*unit as u8 as char),
                    _ if is_upper => write!(json, "\\u{unit:04X}").unwrap(),
                    _ => write!(json, "\\u{unit:04x}").unwrap(),
                }
            }
            json += "\"]";
            let expected = String::from_utf16_lossy(&units);
            let mut bytes = json.replacen("1e999", "0", 1).into_bytes();
            replace_lone_surrogates(&mut bytes);
            let read: (u8, String) = serde_json::from_slice(&bytes).unwrap();
            prop_assert_eq!(read.1, expected.as_str());
            let read: (String, String) = serde_json::from_str(&repair(&json)).unwrap();
            prop_assert_eq!(read.1, expected);
        }
    }
}
