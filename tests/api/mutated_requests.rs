//! Tests with randomly mutated requests, templates and model answers. No mutation may cause a panic, an abort or a
//! delay of ten seconds. A client's mistake must not be answered with status 500. The arguments of a tool call must not
//! depend on how the stream was split.
//!
//! A run takes a few seconds. `MOESTRO_MUTATE_SECONDS=60` runs each loop for a minute. `MOESTRO_MUTATE_SEED=N` repeats
//! the seed that a failure printed.

use crate::server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Setup, demo};
use moestro_chat::{
    Conversation, Template, json_repair,
    parser::{Delta, Parser},
};
use serde_json::{Map, Value, json};
use std::{
    env,
    time::{Duration, Instant},
};
use test_support::mutate::Dice;

const TOO_LONG: Duration = Duration::from_secs(60);
/// Minimum number of cases, for a machine that is too busy to run as many in the given time.
const MIN_COUNT: u64 = 100;

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// The seeds of a loop, until its time has passed.
fn seeds() -> impl Iterator<Item = u64> {
    let first = setting("MOESTRO_MUTATE_SEED").unwrap_or(20_260_101);
    let end = Instant::now() + Duration::from_secs(setting("MOESTRO_MUTATE_SECONDS").unwrap_or(1));
    (first..).take_while(move |seed| seed - first < MIN_COUNT || Instant::now() < end)
}

/// Picks a random value from a list of values that often cause errors.
fn odd_value(dice: &mut Dice) -> Value {
    let values = json!([
        null, true, 0, -1, u64::MAX, i64::MIN, 1e308, 0.5, "", "\u{0}", [], {}, [[[[[[[[[[0]]]]]]]]]], vec![1; 600],
        "<|im_start|>system\n<think></think>{{ 7*7 }}", "e\u{301}\u{1fbe}\u{308}\u{301}\u{202e}", "x ".repeat(3000),
        {"type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"role": "tool", "content": [{"type": "text", "text": "x"}]},
    ]);
    dice.pick(values.as_array().unwrap()).clone()
}

/// Mutates one place of a value: replaces, removes, duplicates or renames the value at that place.
fn mutate_value(value: &mut Value, dice: &mut Dice) {
    let deeper = dice.below(4) > 0;
    match value {
        Value::Array(items) if deeper && !items.is_empty() => {
            let at = dice.below(items.len());
            match dice.below(6) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => mutate_value(&mut items[at], dice),
            }
        }
        Value::Object(fields) if deeper && !fields.is_empty() => {
            let name = fields.keys().nth(dice.below(fields.len())).cloned().unwrap_or_default();
            match dice.below(8) {
                0 => drop(fields.remove(&name)),
                1 => {
                    let other = odd_value(dice).to_string();
                    let value = fields.remove(&name).unwrap_or_default();
                    fields.insert(other, value);
                }
                _ => mutate_value(&mut fields[&name], dice),
            }
        }
        other => *other = odd_value(dice),
    }
}

/// Pieces to insert into bodies and templates.
const PIECES: [&[u8]; 10] =
    [b"{", b"[", b"\"", b"\\u", b"\\ud800", b"\xff", b"e999", b"}}", b"null,", b"{% for x in y %}"];

/// Mutates bytes: flips a bit, removes or repeats a range, or inserts one of `pieces`.
fn mutate_bytes(bytes: &mut Vec<u8>, dice: &mut Dice, pieces: &[&[u8]]) {
    let at = dice.below(bytes.len() + 1);
    let end = (at + dice.below(12)).min(bytes.len());
    match dice.below(4) {
        0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let piece = bytes[at..end].to_vec();
            (0..=dice.below(50)).for_each(|_| drop(bytes.splice(at..at, piece.iter().copied())));
        }
        _ => drop(bytes.splice(at..at, dice.pick(pieces).iter().copied())),
    }
}

fn requests() -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}});
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let chat = json!({
        "model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ["a", "b"], "max_tokens": 3,
        "stream": false, "logprobs": true, "top_logprobs": 2, "logit_bias": {"5": 1}, "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": false, "x": [1, {"y": 2}]},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
    });
    let anthropic = json!({
        "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
        ],
    });
    let responses = json!({
        "model": "m", "instructions": "Be brief.", "max_output_tokens": 3, "temperature": 0.5, "stream": true,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "store": true,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ],
    });
    let schema = json!({
        "type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 9},
            "b": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,3}$"}, {"$ref": "#/$defs/c"}]},
        },
        "$defs": {"c": {"type": "array", "items": {"enum": ["x", null, 1.5]}, "minItems": 1, "maxItems": 2}},
    });
    let structured = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "enable_thinking": false,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}},
    });
    vec![
        (CHAT, chat),
        (CHAT, structured),
        (RESPONSES, responses),
        (COMPLETIONS, json!({"prompt": ["Hello", "Bye"], "max_tokens": 2, "echo": true, "logprobs": 2, "n": 1})),
        (COMPLETIONS, json!({"prompt": [[5, 6, 7], [8]], "max_tokens": 1, "stream": true})),
        (MESSAGES, anthropic.clone()),
        ("/v1/messages/count_tokens", anthropic),
        ("/tokenize", json!({"prompt": "Hello 123\n\n you", "return_token_strs": true})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": false})),
        ("/detokenize", json!({"tokens": [1, 2, 3, 2040]})),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_requests_get_a_valid_status() {
    let server = Setup { says: Some("</think>\n\nHello."), ..Setup::default() }.start().await;
    let requests = requests();
    for seed in seeds() {
        let mut dice = Dice(seed);
        let (path, mut body) = dice.pick(&requests).clone();
        (0..=dice.below(3)).for_each(|_| mutate_value(&mut body, &mut dice));
        let mut bytes = body.to_string().into_bytes();
        (0..dice.below(3)).for_each(|_| mutate_bytes(&mut bytes, &mut dice, &PIECES));
        let start = Instant::now();
        let answer = server.send("POST", path, &[], Some(&bytes)).await;
        let (status, text) = (answer.status, answer.text().await);
        let failure = || format!("seed {seed}: POST {path} {}\n{status} {text}", String::from_utf8_lossy(&bytes));
        assert!([200, 400, 404, 413, 422].contains(&status), "{}", failure());
        assert!(start.elapsed() < TOO_LONG, "{}", failure());
        assert!(status != 200 || !text.contains("\"server_error\""), "{}", failure());
    }
    server.idle().await;
}

/// `value` with the text `long` in each of its places, once as a value and once as the name of a field.
fn with_long_texts(value: &Value, long: &str) -> Vec<Value> {
    let mut all = vec![json!(long), json!([long]), json!({long: long})];
    match value {
        Value::Array(items) => {
            for at in 0..items.len() {
                for changed in with_long_texts(&items[at], long) {
                    let mut items = items.clone();
                    items[at] = changed;
                    all.push(items.into());
                }
            }
        }
        Value::Object(fields) => {
            for name in fields.keys() {
                for changed in with_long_texts(&fields[name], long) {
                    let mut fields = fields.clone();
                    fields[name] = changed;
                    all.push(fields.into());
                }
                let mut fields = fields.clone();
                let value = fields.remove(name).unwrap_or_default();
                fields.insert(long.into(), value);
                all.push(fields.into());
            }
        }
        _ => {}
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_quote_little_of_a_request() {
    let server = Setup { says: Some("</think>\n\nHello."), ..Setup::default() }.start().await;
    let mut refused = 0;
    let mut check = |status: u16, answer: &str, of: &str| {
        if status == 200 {
            return;
        }
        refused += 1;
        let answer: Value = serde_json::from_str(answer).unwrap();
        let error = &answer["error"];
        let message = error["message"].as_str().unwrap();
        let param = error["param"].as_str().unwrap_or_default();
        let is_long = message.len() > 600 || param.len() > 300;
        let has_control = message.chars().chain(param.chars()).any(|c| c.is_control() && c != '\n');
        assert!(!is_long && !has_control, "{status} {answer}\n{of:.300}");
    };
    let long = "\u{1b}[31m\u{fc}word ".repeat(400);
    for (path, body) in requests() {
        for changed in with_long_texts(&body, &long) {
            let body = changed.to_string();
            let answer = server.send("POST", path, &[], Some(body.as_bytes())).await;
            check(answer.status, &answer.text().await, &body);
        }
    }
    let word = "word".repeat(1000);
    for path in ["/", "/v1/models/", "/v1/responses/", "/v1/chat/completions/"] {
        for method in ["GET", "DELETE", "PUT"] {
            let path = format!("{path}{word}");
            let answer = server.send(method, &path, &[], None).await;
            check(answer.status, &answer.text().await, &path);
        }
    }
    for header in ["host", "origin"] {
        let answer = server.bare("GET", "/v1/models", &[(header, &format!("https://{word}.example"))], b"").await;
        check(answer.status, &answer.text().await, header);
    }
    println!("{refused} errors");
    assert!(refused > 300, "{refused}");
}

#[test]
fn mutated_templates_never_panic() {
    let source = std::fs::read(demo().join("chat_template.jinja")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}),
        json!({"role": "tool", "content": "2"}),
        json!({"role": "user", "content": "And?"}),
    ];
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})];
    let (mut count, mut rendered) = (0, 0);
    for seed in seeds() {
        let mut dice = Dice(seed);
        let mut mutated = source.clone();
        (0..=dice.below(6)).for_each(|_| mutate_bytes(&mut mutated, &mut dice, &PIECES));
        std::fs::write(dir.path().join("chat_template.jinja"), &mutated).unwrap();
        let start = Instant::now();
        if let Ok(template) = Template::load(dir.path()) {
            let kwargs = Map::new();
            let conversation =
                Conversation { messages: &messages, tools: Some(&tools), kwargs: &kwargs, add_generation_prompt: true };
            match template.render(&conversation) {
                Ok(_) => rendered += 1,
                Err(error) => assert!(!error.to_string().contains("panicked"), "seed {seed}: {error}"),
            }
        }
        assert!(start.elapsed() < TOO_LONG, "seed {seed}");
        count += 1;
    }
    eprintln!("{count} templates, {rendered} rendered");
    assert!(rendered > 0 && rendered < count);
}

/// Parses an answer that arrives in `pieces`. Returns the reasoning, the content, and the name and arguments of each
/// call.
fn parse<'a>(tools: &[Value], pieces: impl IntoIterator<Item = &'a str>, cut: bool) -> Vec<[String; 2]> {
    let mut parser = Parser::new(true, tools);
    let mut deltas: Vec<Delta> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish(cut));
    let mut parsed: Vec<[String; 2]> = Vec::new();
    for delta in deltas {
        let (kind, text) = match delta {
            Delta::Reasoning(text) => ("reasoning".into(), text),
            Delta::Content(text) => ("content".into(), text),
            Delta::ToolCall { index, name, .. } => (format!("{index}"), name + ">"),
            Delta::Arguments { index, json } => (format!("{index}"), json),
        };
        match parsed.last_mut() {
            Some([last, before]) if *last == kind => before.push_str(&text),
            _ => parsed.push([kind, text]),
        }
    }
    parsed
}

#[test]
fn mutated_answers_parse_independently_of_splits() {
    const ANSWER: &str = "I look twice.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=f>\n<parameter=s>\nOslo\n</parameter>\n\
        <parameter=n>\n-12\n</parameter>\n<parameter=o>\n{\"a\": [1, \"é\"]}\n</parameter>\n</function>\n</tool_call>\n\
        <tool_call>\n<function=f>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>";
    let tags = "<think> </think> <tool_call> </tool_call> <function=f> <function= </function> <parameter=n> \
        <parameter=o> </parameter> \n 1e999 \\ <";
    let tags: Vec<_> = tags.split(' ').map(str::as_bytes).collect();
    let properties = json!({"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"},
        "maybe": {"type": ["string", "null"]}});
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}})];
    let (mut count, mut calls) = (0, 0);
    for seed in seeds() {
        let mut dice = Dice(seed);
        let mut bytes = ANSWER.as_bytes().to_vec();
        (0..=dice.below(8)).for_each(|_| mutate_bytes(&mut bytes, &mut dice, &tags));
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (mut pieces, mut rest) = (Vec::new(), text.as_str());
        while !rest.is_empty() {
            let length = rest.char_indices().nth(1 + dice.below(9)).map_or(rest.len(), |(at, _)| at);
            let (piece, later) = rest.split_at(length);
            pieces.push(piece);
            rest = later;
        }
        for cut in [false, true] {
            let whole = parse(&tools, [text.as_str()], cut);
            assert_eq!(parse(&tools, pieces.iter().copied(), cut), whole, "seed {seed}: {text:?}");
            let mut arguments = vec![String::new(); whole.len()];
            for [kind, text] in &whole {
                if let Ok(index) = kind.parse::<usize>() {
                    arguments[index] += text;
                }
            }
            for call in arguments.iter().filter(|call| !cut && !call.is_empty()) {
                // After a mutation, the name may contain anything except the end of its tag.
                let json = call.split_once('>').map(|(_, json)| json_repair::repair(json)).unwrap_or_default();
                let object = serde_json::from_str::<Map<String, Value>>(&json);
                assert!(object.is_ok(), "seed {seed}: {call:?} of {text:?}");
                calls += 1;
            }
        }
        count += 1;
    }
    eprintln!("{count} answers, {calls} calls");
    assert!(calls > count / 4);
}
