//! Requests and templates that were changed at random: no panic, no abort, no 500 for a client's mistake, no answer that
//! takes ten seconds.
//!
//! A run takes a few seconds; `MOESTRO_MUTATE_SECONDS=60` makes each loop go on for a minute, `MOESTRO_MUTATE_SEED=N` repeats
//! what a failure has printed.

#[path = "api/client.rs"]
mod client;
#[path = "api/server.rs"]
mod server;

use moestro::chat::{Conversation, Template};
use serde_json::{Map, Value, json};
use server::{Setup, demo};
use std::{
    env,
    time::{Duration, Instant},
};

const TOO_LONG: Duration = Duration::from_secs(10);

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() >> 16) as usize % count.max(1)
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// Calls `once` with ever new randomness until the time is over; says how to repeat a failure.
fn seeds() -> (u64, Instant) {
    let seed = setting("MOESTRO_MUTATE_SEED").unwrap_or(20_260_101);
    let seconds = setting("MOESTRO_MUTATE_SECONDS").unwrap_or(4);
    (seed, Instant::now() + Duration::from_secs(seconds))
}

/// Values at which programs err.
fn odd(random: &mut Random) -> Value {
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e308),
        json!(0.5),
        json!(""),
        json!("\u{0}"),
        json!("<|im_start|>system\n<think></think>{{ 7*7 }}"),
        json!("e\u{301}\u{1fbe}\u{308}\u{301}\u{202e}"),
        json!("x ".repeat(3000)),
        json!([]),
        json!({}),
        json!([[[[[[[[[[0]]]]]]]]]]),
        json!({"type": "function", "function": {"name": "f", "arguments": "{}"}}),
        json!({"role": "tool", "content": [{"type": "text", "text": "x"}]}),
        json!(vec![1; 600]),
    ];
    random.of(&odd).clone()
}

/// Changes one place of a value: replaces, removes, doubles, or renames.
fn change(value: &mut Value, random: &mut Random) {
    let deeper = random.below(4) > 0;
    match value {
        Value::Array(items) if deeper && !items.is_empty() => {
            let at = random.below(items.len());
            match random.below(6) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => change(&mut items[at], random),
            }
        }
        Value::Object(fields) if deeper && !fields.is_empty() => {
            let name = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
            match random.below(8) {
                0 => drop(fields.remove(&name)),
                1 => {
                    let other = odd(random).to_string();
                    let value = fields.remove(&name).unwrap_or_default();
                    fields.insert(other, value);
                }
                _ => change(&mut fields[&name], random),
            }
        }
        other => *other = odd(random),
    }
}

/// Changes bytes: flips, cuts, doubles, inserts.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    const PIECES: [&[u8]; 10] =
        [b"{", b"[", b"\"", b"\\u", b"\\ud800", b"\xff", b"e999", b"}}", b"null,", b"{% for x in y %}"];
    let at = random.below(bytes.len() + 1);
    let end = (at + random.below(12)).min(bytes.len());
    match random.below(4) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let piece = bytes[at..end].to_vec();
            (0..=random.below(50)).for_each(|_| drop(bytes.splice(at..at, piece.iter().copied())));
        }
        _ => drop(bytes.splice(at..at, random.of(&PIECES).iter().copied())),
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
    vec![
        ("/v1/chat/completions", chat),
        ("/v1/completions", json!({"prompt": ["Hello", "Bye"], "max_tokens": 2, "echo": true, "logprobs": 2, "n": 1})),
        ("/v1/completions", json!({"prompt": [[5, 6, 7], [8]], "max_tokens": 1, "stream": true})),
        ("/v1/messages", anthropic.clone()),
        ("/v1/messages/count_tokens", anthropic),
        ("/tokenize", json!({"prompt": "Hello 123\n\n you", "return_token_strs": true})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": false})),
        ("/detokenize", json!({"tokens": [1, 2, 3, 2040]})),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_were_changed() {
    let server = Setup { says: Some("</think>\n\nHello."), ..Setup::default() }.start().await;
    let (mut seed, end) = seeds();
    let requests = requests();
    let mut count = 0;
    while Instant::now() < end {
        let mut random = Random(seed | 1);
        let (path, mut body) = random.of(&requests).clone();
        (0..=random.below(3)).for_each(|_| change(&mut body, &mut random));
        let mut bytes = body.to_string().into_bytes();
        (0..random.below(3)).for_each(|_| damage(&mut bytes, &mut random));
        let asked = Instant::now();
        let answer = server.send("POST", path, &[], Some(&bytes)).await;
        let (status, text) = (answer.status, answer.text().await);
        let told = || format!("seed {seed}: POST {path} {}\n{status} {text}", String::from_utf8_lossy(&bytes));
        assert!([200, 400, 404, 413, 422].contains(&status), "{}", told());
        assert!(asked.elapsed() < TOO_LONG, "{}", told());
        assert!(status != 200 || !text.contains("\"server_error\""), "{}", told());
        seed = seed.wrapping_add(1);
        count += 1;
    }
    server.idle().await;
    eprintln!("{count} requests");
    assert!(count > 20);
}

#[test]
fn templates_that_were_changed() {
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
    let (mut seed, end) = seeds();
    let (mut count, mut rendered) = (0, 0);
    while Instant::now() < end {
        let mut random = Random(seed | 1);
        let mut changed = source.clone();
        (0..=random.below(6)).for_each(|_| damage(&mut changed, &mut random));
        std::fs::write(dir.path().join("chat_template.jinja"), &changed).unwrap();
        let begun = Instant::now();
        if let Ok(template) = Template::load(dir.path()) {
            let kwargs = Map::new();
            let conversation =
                Conversation { messages: &messages, tools: Some(&tools), kwargs: &kwargs, add_generation_prompt: true };
            match template.render(&conversation) {
                Ok(_) => rendered += 1,
                Err(error) => assert!(!error.to_string().contains("panicked"), "seed {seed}: {error}"),
            }
        }
        assert!(begun.elapsed() < TOO_LONG, "seed {seed}");
        seed = seed.wrapping_add(1);
        count += 1;
    }
    eprintln!("{count} templates, {rendered} rendered");
    assert!(rendered > 0 && rendered < count);
}
