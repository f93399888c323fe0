//! Text that a model writes, with reasoning and tool calls, in pieces of a length that the first byte says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro::chat::parse::{Delta, Parser};
use serde_json::{Map, Value, json};

fn said<'a>(tools: &[Value], pieces: impl Iterator<Item = &'a str>) -> (String, String, Vec<(String, String)>) {
    let mut parser = Parser::new(true, tools);
    let mut deltas: Vec<Delta> = pieces.flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish(false));
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) => reasoning += &text,
            Delta::Content(text) => content += &text,
            Delta::ToolCall { name, .. } => calls.push((name, String::new())),
            Delta::Arguments { index, json } => calls[index].1 += &json,
        }
    }
    (reasoning, content, calls)
}

fuzz_target!(|data: &[u8]| {
    let Some((&length, text)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}});
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
    let whole = said(&tools, std::iter::once(&*text));
    let chars: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = chars.chunks(usize::from(length).max(1)).map(|piece| piece.iter().collect()).collect();
    assert_eq!(said(&tools, pieces.iter().map(String::as_str)), whole);
    for (_, arguments) in whole.2 {
        assert!(serde_json::from_str::<Map<String, Value>>(&arguments).is_ok(), "{arguments}");
    }
});
