//! Fuzzes the parser of answers: cuts do not change the calls, and the arguments of each call are an object.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_chat::{json_repair, parser::{Delta, Parser}};
use serde_json::{Map, Value, json};

fuzz_target!(|input: (Vec<u8>, &str)| {
    let (lengths, text) = input;
    let parameters = json!({"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}});
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
    let (mut pieces, mut rest) = (Vec::new(), text);
    for length in lengths {
        let at = rest.char_indices().nth(usize::from(length)).map_or(rest.len(), |(at, _)| at);
        let (piece, later) = rest.split_at(at);
        pieces.push(piece);
        rest = later;
    }
    pieces.push(rest);
    let whole = calls(&tools, vec![text]);
    assert_eq!(calls(&tools, pieces), whole);
    for arguments in whole {
        assert!(serde_json::from_str::<Map<String, Value>>(&json_repair::repair(&arguments)).is_ok());
    }
});

fn calls(tools: &[Value], pieces: Vec<&str>) -> Vec<String> {
    let mut parser = Parser::new(false, tools);
    let mut deltas: Vec<Delta> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish(false));
    let mut calls = Vec::new();
    for delta in deltas {
        match delta {
            Delta::ToolCall { .. } => calls.push(String::new()),
            Delta::Arguments { index, json } => calls[index] += &json,
            _ => {}
        }
    }
    calls
}
