//! Tests of `--reuse-tools`: a request without tools that continues a conversation with tools.

use super::server::{CHAT, MESSAGES, RESPONSES, Server, Setup, streamed, with};
use moestro::http::{RequestLimits, ServerState};
use serde_json::{Value, json};
use test_support::{formats::Source, random_cases::seeds};

const HEADER: &str = "x-moestro-reused-tools";
const SYSTEM: &str = "You are a careful assistant in a small workshop.";
const OPENING: &str = "Please read the list of parts and say which of them are missing.";
/// The user and the assistant speak in turn.
const TURNS: [&str; 5] = [OPENING, "I read it.", "Which are blue?", "Three are blue.", "Write a summary of all this."];

/// A server whose answers repeat the prompt, so that an answer shows what the model read.
async fn server(configure: fn(&mut ServerState), cache: Option<&tempfile::TempDir>) -> Server {
    let prompt_cache_dir = cache.map(|dir| dir.path().into());
    Setup { context: 8192, configure, prompt_cache_dir, ..Setup::default() }.start().await
}

fn tools(path: &str, names: &[&str]) -> Value {
    let schema = json!({"type": "object", "properties": {"path": {"type": "string", "description": "Where to look"}}});
    let tool = |name: &&str| match path {
        MESSAGES => json!({"name": name, "description": "Reads a part of the list.", "input_schema": schema}),
        RESPONSES => json!({"type": "function", "name": name, "description": "Reads the list.", "parameters": schema}),
        _ => {
            let function = json!({"name": name, "description": "Reads the list.", "parameters": schema});
            json!({"type": "function", "function": function})
        }
    };
    names.iter().map(tool).collect()
}

/// A request with a system prompt and turns, without tools.
fn request(path: &str, system: &str, turns: &[&str]) -> Value {
    let role = |index: usize| if index.is_multiple_of(2) { "user" } else { "assistant" };
    let turns = turns.iter().enumerate();
    let mut messages: Vec<_> = turns.map(|(index, text)| json!({"role": role(index), "content": text})).collect();
    match path {
        MESSAGES => json!({"system": system, "messages": messages, "max_tokens": 4000}),
        RESPONSES => json!({"instructions": system, "input": messages}),
        _ => {
            messages.insert(0, json!({"role": "system", "content": system}));
            json!({"messages": messages})
        }
    }
}

/// The request with tools whose calls are forbidden.
fn without_calls(path: &str, request: &Value, names: &[&str]) -> Value {
    let choice = if path == MESSAGES { json!({"type": "none"}) } else { json!("none") };
    with(request.clone(), json!({"tools": tools(path, names), "tool_choice": choice}))
}

/// The parts of an answer that the model wrote.
fn written(path: &str, answer: &Value) -> String {
    match path {
        MESSAGES => answer["content"].to_string(),
        RESPONSES => {
            let items = answer["output"].as_array().unwrap().iter();
            items.map(|item| json!([item["type"], item["content"], item["arguments"]]).to_string()).collect()
        }
        _ => answer["choices"].to_string(),
    }
}

/// Number of tokens of the prompt, and how many of them were cached.
fn prompt_tokens(path: &str, answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let count = |at: &str| usage.pointer(at).and_then(Value::as_u64).unwrap_or_default();
    match path {
        MESSAGES => {
            let cached = count("/cache_read_input_tokens");
            (count("/input_tokens") + count("/cache_creation_input_tokens") + cached, cached)
        }
        RESPONSES => (count("/input_tokens"), count("/input_tokens_details/cached_tokens")),
        _ => (count("/prompt_tokens"), count("/prompt_tokens_details/cached_tokens")),
    }
}

/// Sends a request. Returns the answer and the number of reused tools.
async fn ask(server: &Server, path: &str, key: &str, body: &Value) -> (Value, Option<String>) {
    let authorization = format!("Bearer {key}");
    let headers = [("authorization", &*authorization)];
    let answer = server.send("POST", path, &headers, Some(body.to_string().as_bytes())).await;
    let reused = answer.header(HEADER).map(str::to_owned);
    let status = answer.status;
    let body = answer.json().await;
    assert_eq!(status, 200, "{body}");
    (body, reused)
}

#[tokio::test]
async fn summary_equals_request_with_forbidden_calls() {
    let dir = tempfile::tempdir().unwrap();
    let reusing = server(ServerState::reuse_tools, Some(&dir)).await;
    let plain = server(|_| (), None).await;
    let names = ["read_list", "count_parts", "find_part"];
    for path in [CHAT, MESSAGES, RESPONSES] {
        for turns in [1, 3] {
            let before = with(request(path, SYSTEM, &TURNS[..turns]), json!({"tools": tools(path, &names)}));
            assert_eq!(ask(&reusing, path, "key", &before).await.1, None, "{path}");
        }
        let summary = request(path, SYSTEM, &TURNS);
        let expected = plain.ask(path, &without_calls(path, &summary, &names)).await;
        let (answer, reused) = ask(&reusing, path, "key", &summary).await;
        assert_eq!(reused.as_deref(), Some("3"), "{path}");
        assert_eq!(written(path, &answer), written(path, &expected), "{path}");
        assert!(written(path, &answer).contains("count_parts"), "{path}: the model reads the tools");
        let (tokens, cached) = prompt_tokens(path, &answer);
        assert_eq!(tokens, prompt_tokens(path, &expected).0, "{path}");
        assert!(tokens > 200 && tokens - cached < 60, "{path}: {cached} of {tokens} are cached");

        let today = plain.ask(path, &summary).await;
        assert!(!written(path, &today).contains("count_parts"), "{path}");
        let (uncached, reused) = ask(&reusing, path, "key", &with(summary, json!({"cache_prompt": false}))).await;
        assert_eq!((written(path, &uncached), reused), (written(path, &today), None), "{path}");
    }
}

#[tokio::test]
async fn other_requests_get_no_tools() {
    let reusing = server(ServerState::reuse_tools, None).await;
    let plain = server(|_| (), None).await;
    for path in [CHAT, MESSAGES, RESPONSES] {
        let before = with(request(path, SYSTEM, &TURNS[..3]), json!({"tools": tools(path, &["read_list"])}));
        let salted = with(before.clone(), json!({"cache_salt": "a"}));
        ask(&reusing, path, "key", &salted).await;
        let summary = request(path, SYSTEM, &TURNS);
        let salt = |salt: &str| with(summary.clone(), json!({"cache_salt": salt}));
        let mut other_turns = TURNS;
        other_turns[0] = "Please count the parts.";
        for (key, body) in [
            ("key", summary.clone()),
            ("key", salt("b")),
            ("other key", salt("a")),
            ("key", with(salt("a"), json!({"model": "mock"}))),
            ("key", with(request(path, "You write summaries.", &TURNS), json!({"cache_salt": "a"}))),
            ("key", with(request(path, SYSTEM, &other_turns), json!({"cache_salt": "a"}))),
            ("key", with(request(path, SYSTEM, &TURNS[..1]), json!({"cache_salt": "a"}))),
        ] {
            let (answer, reused) = ask(&reusing, path, key, &body).await;
            assert_eq!(reused, None, "{path}, {key}: {body}");
            assert_eq!(written(path, &answer), written(path, &plain.ask(path, &body).await), "{path}: {body}");
        }
        assert_eq!(ask(&reusing, path, "key", &salt("a")).await.1.as_deref(), Some("1"), "{path}");
    }
}

#[tokio::test]
async fn streams_and_counts_reuse_tools() {
    let reusing = server(ServerState::reuse_tools, None).await;
    for (path, counted) in
        [(MESSAGES, Some("/v1/messages/count_tokens")), (RESPONSES, Some("/v1/responses/input_tokens")), (CHAT, None)]
    {
        let before = with(request(path, SYSTEM, &TURNS[..1]), json!({"tools": tools(path, &["read_list", "find"])}));
        reusing.ask(path, &before).await;
        let summary = request(path, SYSTEM, &TURNS);
        let stream = reusing.post(path, &streamed(&summary)).await;
        assert_eq!(stream.header(HEADER), Some("2"), "{path}");
        assert_eq!((stream.status, stream.text().await.is_empty()), (200, false), "{path}");
        if let Some(counted) = counted {
            let answer = reusing.ask(path, &summary).await;
            let count = reusing.ask(counted, &summary).await;
            assert_eq!(count["input_tokens"], prompt_tokens(path, &answer).0, "{path}");
        }
    }
}

/// A request is answered with the tools exactly if its prompt and its answer then fit.
#[tokio::test]
async fn full_context_leaves_out_tools() {
    for most in [None, Some(5000)] {
        let limits = RequestLimits { max_prompt_tokens: most, ..RequestLimits::default() };
        let setup = || Setup { context: 8192, limits, ..Setup::default() };
        let reusing = Setup { configure: ServerState::reuse_tools, ..setup() }.start().await;
        let plain = setup().start().await;
        for path in [CHAT, MESSAGES, RESPONSES] {
            let mut seen = [0; 3];
            for words in (2000..9000).step_by(500) {
                let opening = format!("{words} {}", "word ".repeat(words));
                let mut turns = TURNS;
                turns[0] = &opening;
                let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
                let names: Vec<String> = (0..9).map(|number| format!("read_list_{number}")).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let earlier = with(request(path, SYSTEM, &turns[..3]), json!({"tools": tools(path, &names), limit: 1}));
                reusing.post(path, &earlier).await.text().await;
                let summary = with(request(path, SYSTEM, &turns), json!({limit: 1500}));
                let with_tools = plain.post(path, &without_calls(path, &summary, &names)).await;
                let fits = with_tools.status == 200;
                let with_tools = with_tools.json().await;
                let fits = fits && prompt_tokens(path, &with_tools).0 + 1500 <= 8192;
                let without = plain.post(path, &summary).await;
                let is_refused = without.status != 200;
                let (status, without) = (without.status, without.json().await);
                let answer = reusing.post(path, &summary).await;
                let reused = answer.header(HEADER).map(str::to_owned);
                assert_eq!(answer.status, status, "{path}, {words} words");
                assert_eq!(reused.as_deref(), fits.then_some("9"), "{path}, {words} words");
                if !is_refused {
                    let expected = if fits { with_tools } else { without };
                    assert_eq!(written(path, &answer.json().await), written(path, &expected), "{path}, {words} words");
                }
                seen[usize::from(!fits) + usize::from(is_refused)] += 1;
            }
            assert!(seen.iter().all(|&count| count > 0), "{path}: {seen:?}");
        }
    }
}

/// A step of a conversation.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    User,
    Call,
    CallResult,
    Assistant,
}

/// A random conversation that ends with a question of the user.
fn conversation(source: &mut Source) -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..1 + source.below(3) {
        steps.push(Step::User);
        for _ in 0..source.below(3) {
            steps.extend([Step::Call, Step::CallResult]);
        }
        steps.push(Step::Assistant);
    }
    steps.push(Step::User);
    steps
}

/// The message or item of an API for the step with this number.
fn item(path: &str, number: usize, step: Step) -> Value {
    let id = format!("call_{}", number - usize::from(step == Step::CallResult));
    let arguments = json!({"path": format!("shelf {number}")});
    let text = format!("This is step {number} of our work.");
    match (step, path) {
        (Step::User, _) => json!({"role": "user", "content": text}),
        (Step::Assistant, _) => json!({"role": "assistant", "content": text}),
        (Step::Call, MESSAGES) => {
            let call = json!({"type": "tool_use", "id": id, "name": "read_list", "input": arguments});
            json!({"role": "assistant", "content": [call]})
        }
        (Step::Call, RESPONSES) => {
            json!({"type": "function_call", "call_id": id, "name": "read_list", "arguments": arguments.to_string()})
        }
        (Step::Call, _) => {
            let function = json!({"name": "read_list", "arguments": arguments.to_string()});
            let call = json!({"id": id, "type": "function", "function": function});
            json!({"role": "assistant", "content": null, "tool_calls": [call]})
        }
        (Step::CallResult, MESSAGES) => {
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})
        }
        (Step::CallResult, RESPONSES) => json!({"type": "function_call_output", "call_id": id, "output": text}),
        (Step::CallResult, _) => json!({"role": "tool", "tool_call_id": id, "content": text}),
    }
}

#[tokio::test]
async fn random_conversations_equal_requests_with_forbidden_calls() {
    let reusing = server(ServerState::reuse_tools, None).await;
    let plain = server(|_| (), None).await;
    let names = ["read_list", "count_parts", "find_part", "move_part"];
    for seed in seeds(40) {
        let mut source = Source::new(&[], seed);
        let path = [CHAT, MESSAGES, RESPONSES][source.below(3)];
        let steps = conversation(&mut source);
        let body = |steps: &[Step]| {
            let items: Vec<_> = steps.iter().enumerate().map(|(number, step)| item(path, number, *step)).collect();
            let list = if path == RESPONSES { "input" } else { "messages" };
            let mut request = request(path, &format!("You work in shop {seed}."), &[]);
            request[list].as_array_mut().unwrap().extend(items);
            request
        };
        let names = &names[..1 + source.below(4)];
        // Some of the earlier requests: each ends before an answer or a call.
        let asked = |at: &usize| matches!(steps[*at], Step::User | Step::CallResult) && *at + 1 < steps.len();
        let mut ends: Vec<usize> = (0..steps.len()).filter(asked).collect();
        while ends.len() > 1 && source.below(3) > 0 {
            ends.remove(source.below(ends.len()));
        }
        for end in ends {
            let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
            let earlier = with(body(&steps[..=end]), json!({"tools": tools(path, names), limit: 1}));
            ask(&reusing, path, "key", &earlier).await;
        }
        let more = match (source.below(3), path) {
            (0, CHAT) => json!({"response_format": {"type": "json_object"}, "max_tokens": 30}),
            (1, CHAT) => json!({"n": 2}),
            (0, _) => json!({"temperature": 0}),
            _ => json!({}),
        };
        let summary = with(body(&steps), more);
        let (answer, reused) = ask(&reusing, path, "key", &summary).await;
        let expected = plain.ask(path, &without_calls(path, &summary, names)).await;
        assert_eq!(reused, Some(names.len().to_string()), "{seed}: {summary}");
        assert_eq!(written(path, &answer), written(path, &expected), "{seed}: {summary}");
        assert_eq!(prompt_tokens(path, &answer).0, prompt_tokens(path, &expected).0, "{seed}");
    }
}
