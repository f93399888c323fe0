//! A tool call: its id, and its arguments, written as JSON while their text comes in.

use super::schema::Types;
use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering},
};

/// The call whose parameters are coming in.
pub(super) struct Call {
    /// The function's name.
    pub name: String,
    /// Parameters begun so far.
    pub parameters: usize,
}

/// One argument. A string is written as it comes. A value of another type is written when it is complete: only then is
/// it known to be valid.
pub(super) struct Argument {
    types: Types,
    /// Text not yet written; `None` once a string is being written.
    held: Option<String>,
    /// The newline after the opening tag has been dealt with.
    pub begun: bool,
}

impl Argument {
    /// An argument, and the beginning of its JSON.
    pub fn new(types: Types) -> (Self, &'static str) {
        if types.only_string() {
            (Self { types, held: None, begun: false }, "\"")
        } else {
            (Self { types, held: Some(String::new()), begun: false }, "")
        }
    }

    /// Takes the next piece of the value and gives the JSON that can be written.
    pub fn push(&mut self, text: &str) -> String {
        let Some(held) = &mut self.held else { return escaped(text) };
        held.push_str(text);
        if self.types.string_or_null() && !"null".starts_with(held.as_str()) {
            let json = format!("\"{}", escaped(held));
            self.held = None;
            return json;
        }
        String::new()
    }

    /// The value is complete: gives the rest of its JSON.
    pub fn finish(&self) -> String {
        self.held.as_ref().map_or_else(|| "\"".into(), |text| self.types.json(text))
    }
}

/// The inside of a JSON string. Characters are escaped one by one, so that pieces can be escaped on their own.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().into()
}

/// `call_` and 24 letters and digits: unique in this process by a counter, and unlike those of another process by the
/// random keys of the standard library's hasher.
pub(super) fn call_id() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut id = String::from("call_");
    for part in 0..3u64 {
        let mut bits = RandomState::new().hash_one((count, part));
        for _ in 0..8 {
            id.push(char::from(ALPHABET[(bits % 62) as usize]));
            bits /= 62;
        }
    }
    id
}
