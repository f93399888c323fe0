//! Tests of the memory of requests: a request that does not fit even alone gets 413, and answers are counted.

use super::server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Server, Setup, chat, with};
use moestro::http::{ApiSet, ServerState};
use serde_json::{Value, json};
use std::sync::Arc;

/// Memory that the plan sets aside for a step, plus `bytes` for requests.
fn plan(state: &mut ServerState, bytes: u64) {
    state.memory.set_plan(8_192_000 + bytes);
}

/// Requests of all APIs with `count` tools or messages and a text of `text` bytes.
fn requests(count: usize, text: usize) -> Vec<(&'static str, Value)> {
    let words = "word ".repeat(text / 5 + 1);
    let [short, message] = ["word", &words].map(|text| json!({"role": "user", "content": text}));
    let functions = vec![json!({"type": "function", "name": "f"}); count];
    let tools = vec![json!({"type": "function", "function": {"name": "f"}}); count];
    let inputs = vec![json!({"name": "f", "input_schema": {"type": "object"}}); count];
    let codex = json!([{"type": "additional_tools", "tools": functions}, message]);
    vec![
        (CHAT, json!({"messages": vec![short; count], "max_tokens": 1})),
        (CHAT, json!({"messages": [message], "tools": tools, "max_tokens": 1})),
        (COMPLETIONS, json!({"prompt": vec!["word"; count], "max_tokens": 1})),
        (RESPONSES, json!({"input": codex, "store": false, "max_output_tokens": 1})),
        (RESPONSES, json!({"input": [message], "tools": functions, "store": false, "max_output_tokens": 1})),
        (MESSAGES, json!({"messages": [message], "tools": inputs, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": [message], "tools": inputs})),
        ("/api/chat", json!({"model": "m", "messages": [message], "tools": tools, "stream": false})),
        ("/tokenize", json!({"content": words})),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn lone_request_never_waits_for_others() {
    let setup = || Setup { configure: |state| plan(state, 1_500_000), api: ApiSet::WithOllama, ..Setup::default() };
    let server = setup().start().await;
    let (mut fitting, mut refused) = (0, 0);
    for step in 0..10 {
        // Sizes from 6 to 1,536 tools, and texts from 100 bytes to 128 KB.
        let size = 1.85_f64.powi(step);
        for (path, body) in requests((6.0 * size) as usize, if step % 2 == 0 { 100 } else { (500.0 * size) as usize }) {
            let first = server.post(path, &body).await;
            let status = first.status;
            let text = first.text().await;
            assert!([200, 400, 413].contains(&status), "{path}, step {step}: {status} {text}");
            server.memory_is_free().await;
            fitting += usize::from(status == 200);
            if status == 413 {
                assert!(text.contains("the server has 1 MiB for requests"), "{path}: {text}");
                assert_eq!(server.post(path, &body).await.status, 413, "{path}, step {step}");
                refused += 1;
            }
        }
    }
    assert!(fitting > 15 && refused > 15, "{fitting} and {refused}");
    server.memory_is_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn growing_answer_gets_413_alone() {
    let says = Some("</think>\n\none two three four five six seven eight nine ten");
    let server = Setup { says, configure: |state| plan(state, 3_000_000), ..Setup::default() }.start().await;
    let body = |stream: bool| {
        let more = json!({"n": 128, "logprobs": true, "top_logprobs": 20, "max_tokens": 16, "stream": stream});
        with(chat("Hi"), more)
    };
    for _ in 0..2 {
        assert_eq!(server.refused(CHAT, &body(false), 413).await["code"], "request_too_large");
    }
    // A stream sends each choice when it is complete.
    assert!(server.post(CHAT, &body(true)).await.text().await.ends_with("data: [DONE]\n\n"));
    server.memory_is_free().await;
}

#[tokio::test]
async fn product_of_prompts_and_n_is_limited() {
    let server = Setup::default().start().await;
    for (prompts, n) in [(17, 128), (128, 17), (2048, 2)] {
        let body = json!({"prompt": vec!["a"; prompts], "n": n, "max_tokens": 1});
        let error = server.refused(COMPLETIONS, &body, 400).await;
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["param"], "n");
        let parts = [format!("n is {n}"), format!("prompt has {prompts} prompts"), (prompts * n).to_string()];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let body = json!({"prompt": vec!["a"; 16], "n": 128, "max_tokens": 0, "echo": true});
    assert_eq!(server.ask(COMPLETIONS, &body).await["choices"].as_array().unwrap().len(), 2048);
}

/// The text of an answer that is not a stream is kept until the answer is complete.
#[tokio::test(flavor = "multi_thread")]
async fn answer_text_counts_as_memory() {
    let start = |says: String| async {
        let says = Some(&*says.leak());
        let configure = |state: &mut ServerState| plan(state, 100_000);
        Setup { says, context: 8192, api: ApiSet::WithOllama, configure, ..Setup::default() }.start().await
    };
    let argument = format!("<tool_call>\n<function=f>\n<parameter=days>\n{}\n</parameter>", "word ".repeat(2600));
    let message = json!([{"role": "user", "content": "Hi"}]);
    let [plain, function] =
        [json!([{"type": "function", "function": {"name": "f"}}]), json!([{"name": "f", "type": "function"}])];
    let tool = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    for says in [
        format!("</think>\n\n{}", "word ".repeat(2600)),
        "word ".repeat(2600),
        format!("</think>\n\n{argument}\n</function>\n</tool_call>"),
    ] {
        let server = start(says).await;
        let requests = |tokens: usize, stream: bool| {
            [
                (CHAT, json!({"messages": message, "tools": plain, "max_tokens": tokens})),
                (COMPLETIONS, json!({"prompt": "Hi", "max_tokens": tokens})),
                (RESPONSES, json!({"input": message, "tools": function, "store": false, "max_output_tokens": tokens})),
                (MESSAGES, json!({"messages": message, "tools": tool, "max_tokens": tokens})),
                ("/api/chat", json!({"model": "m", "messages": message, "options": {"num_predict": tokens}})),
            ]
            .map(|(path, body)| (path, with(body, json!({"stream": stream}))))
        };
        for (path, body) in requests(4500, false) {
            assert_eq!(status(&server, path, &body).await, 413, "{path}");
        }
        for (path, body) in requests(100, false).into_iter().chain(requests(100, true)) {
            assert_eq!(status(&server, path, &body).await, 200, "{path}");
        }
        server.memory_is_free().await;
    }
}

/// The body repeats the prompt in each choice.
#[tokio::test]
async fn echoed_prompt_counts_for_every_choice() {
    let server = Setup { configure: |state| plan(state, 1_000_000), ..Setup::default() }.start().await;
    let body = |n: usize| json!({"prompt": "word ".repeat(200), "n": n, "max_tokens": 0, "echo": true});
    assert_eq!(status(&server, COMPLETIONS, &body(2)).await, 200);
    assert_eq!(status(&server, COMPLETIONS, &body(128)).await, 413);
}

/// A request that waits for its turn holds its body. Only the request at its turn holds the memory for rendering.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_share_the_memory_of_steps() {
    let configure = |state: &mut ServerState| plan(state, 1_500_000);
    let server = Arc::new(Setup { context: 8192, max_queue: 64, configure, ..Setup::default() }.start().await);
    for (count, text) in [(64, 100), (16, 20_000)] {
        let body = with(chat(&"word ".repeat(text / 5)), json!({"max_tokens": 1}));
        let asking = (0..count).map(|_| {
            let (server, body) = (server.clone(), body.clone());
            tokio::spawn(async move { status(&server, CHAT, &body).await })
        });
        let mut statuses = Vec::new();
        for asking in asking.collect::<Vec<_>>() {
            statuses.push(asking.await.unwrap());
        }
        assert_eq!(statuses, vec![200; count], "{count} requests of {text} bytes");
    }
    server.metric("moestro_request_memory_bytes 0").await;
}

async fn status(server: &Server, path: &str, body: &Value) -> u16 {
    let answer = server.post(path, body).await;
    let status = answer.status;
    let text = answer.text().await;
    server.memory_is_free().await;
    assert!(status != 200 || !text.contains("request_too_large"), "{path}: {text}");
    status
}
