//! Tests of the full queue: which client gets a place, how a request learns that it lost its place, and many requests
//! at once.

use super::{
    client::{Answer, events},
    connections::post,
    server::{CHAT, COMPLETIONS, MESSAGES, RESPONSES, Server, Setup, wait_until, with},
};
use moestro_engine::DEFAULT_MAX_QUEUE;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use test_support::own_process::ran_in_own_process;
use tokio::{net::TcpSocket, time::timeout};

const FULL: &str = "Too many requests are waiting";

/// A short request of an API.
fn question(path: &str, stream: bool) -> Value {
    let messages = json!([{"role": "user", "content": "Count."}]);
    let body = match path {
        RESPONSES => json!({"input": "Count."}),
        COMPLETIONS => json!({"prompt": "Count.", "max_tokens": 400}),
        "/api/chat" => json!({"model": "mock", "messages": messages}),
        _ => json!({"messages": messages, "max_tokens": 400}),
    };
    with(body, json!({"stream": stream}))
}

async fn ask(server: &Server, key: &str, path: &str, body: &Value) -> Answer {
    let key = format!("Bearer {key}");
    let headers = [("authorization", key.as_str()), ("content-type", "application/json")];
    server.send("POST", path, &headers, Some(body.to_string().as_bytes())).await
}

/// A server that repeats its prompt and runs one request at a time. Its model computes nothing until
/// [`Server::resume`], so that requests run and wait for as long as a test takes.
fn stopped(max_queue: usize) -> Setup {
    Setup { max_queue, context: 2048, stops_at: 0, ..Setup::default() }
}

/// Begins a request with a prompt of many tokens.
async fn begin_long(server: &Server, key: &str) -> Answer {
    let long = json!({"prompt": vec![7; 1000], "max_tokens": 1000, "stream": true});
    ask(server, key, COMPLETIONS, &long).await
}

/// A body with ten tools. Their many small JSON values take ten times as much memory as the text.
fn agent_body() -> Value {
    let letters: Vec<_> = (0..20).map(|index| format!("{index}")).collect();
    let param = json!({"type": "string", "enum": letters});
    let params: serde_json::Map<_, _> = (0..8).map(|index| (format!("p{index}"), param.clone())).collect();
    let schema = json!({"type": "object", "properties": params});
    let tools: Vec<_> = (0..10).map(|index| json!({"name": format!("t{index}"), "input_schema": schema})).collect();
    json!({"messages": [{"role": "user", "content": "Count."}], "tools": tools, "max_tokens": 100})
}

#[tokio::test]
async fn many_requests_at_once_are_all_answered() {
    let says = Some("</think>\n\nHello.");
    let few = Setup { max_queue: DEFAULT_MAX_QUEUE, parallel: 4, says, ..Setup::default() };
    let few = Setup { delay: Duration::from_micros(300), ..few };
    // The parsed bodies of all agents together need three times the memory for requests.
    let agents = Setup { max_queue: DEFAULT_MAX_QUEUE, parallel: 4, says, context: 16384, ..Setup::default() };
    let agents = Setup { configure: |state| state.memory.set_plan(40 << 20), ..agents };
    for (setup, path, body, count) in [(few, CHAT, question(CHAT, false), 200), (agents, MESSAGES, agent_body(), 80)] {
        let server = Arc::new(setup.start().await);
        let asked: Vec<_> = (0..count)
            .map(|number| {
                let server = server.clone();
                let body = with(body.clone(), json!({"stream": number % 2 == 0}));
                tokio::spawn(async move {
                    let answer = server.post(path, &body).await;
                    (answer.status, answer.text().await)
                })
            })
            .collect();
        for (number, answer) in asked.into_iter().enumerate() {
            let (status, text) = answer.await.unwrap();
            assert_eq!(status, 200, "{path} {number}: {text}");
            let is_stream = text.starts_with("data: ") || text.starts_with("event: ");
            assert!(text.contains("Hello") && is_stream == (number % 2 == 0), "{path} {number}: {text}");
        }
    }
}

#[tokio::test]
async fn key_with_most_requests_loses_its_newest() {
    for (path, end) in [
        (CHAT, r#""code":"queue_full""#),
        (COMPLETIONS, r#""code":"queue_full""#),
        (MESSAGES, "event: error\ndata: "),
        (RESPONSES, r#""code":"rate_limit_exceeded""#),
        ("/api/chat", "{\"error\":"),
    ] {
        let server = Setup { api: moestro::http::ApiSet::WithOllama, ..stopped(2) }.start().await;
        let server = Arc::new(server);
        let _running = begin_long(&server, "a").await;
        server.load(1, 0).await;
        let _older = ask(&server, "a", CHAT, &question(CHAT, true)).await;
        server.load(1, 1).await;
        // A stream that has begun ends with an error in the format of its API.
        let newest = ask(&server, "a", path, &question(path, true)).await;
        assert_eq!(newest.status, 200);
        server.load(1, 2).await;
        let other = ask(&server, "b", CHAT, &question(CHAT, true)).await;
        assert_eq!(other.status, 200, "{path}");
        let text = timeout(Duration::from_secs(60), newest.text()).await.expect("the stream ends");
        assert!(text.contains(FULL) && text.contains(end) && !text.contains("[DONE]"), "{path}: {text}");
        // Both keys have one waiting request now.
        for key in ["a", "b", "c"] {
            let refused = ask(&server, key, CHAT, &question(CHAT, false)).await;
            assert_eq!((refused.status, refused.header("retry-after")), (429, Some("2")), "{key}");
        }
        drop(other);
        server.load_after_steps(1, 1).await;
        // An answer that has not begun gets the status.
        let body = tokio::spawn({
            let server = server.clone();
            async move { ask(&server, "a", path, &question(path, false)).await }
        });
        server.load(1, 2).await;
        let _other = ask(&server, "b", CHAT, &question(CHAT, true)).await;
        let refused = timeout(Duration::from_secs(60), body).await.expect("the request ends").unwrap();
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("2")), "{path}");
        assert!(refused.text().await.contains(FULL));
    }
}

#[tokio::test]
async fn new_user_each_time_gains_nothing() {
    let server = stopped(4).start().await;
    let with_user = |user: usize| with(question(CHAT, true), json!({"user": user.to_string()}));
    let _running = begin_long(&server, "a").await;
    server.load(1, 0).await;
    let mut waiting = Vec::new();
    for user in 0..4 {
        waiting.push(ask(&server, "a", CHAT, &with_user(user)).await);
        server.load(1, user + 1).await;
    }
    let statuses = [("b", 10), ("b", 11), ("b", 12), ("a", 13)];
    for ((key, user), status) in statuses.into_iter().zip([200, 200, 429, 429]) {
        let answer = ask(&server, key, CHAT, &with_user(user)).await;
        assert_eq!(answer.status, status, "{key} {user}");
        waiting.push(answer);
    }
}

/// Clients of one address cannot keep out another address with invented keys.
#[tokio::test]
async fn new_key_each_time_gains_nothing() {
    let server = stopped(4).start().await;
    let socket = TcpSocket::new_v4().unwrap();
    if socket.bind("127.0.0.2:0".parse().unwrap()).is_err() {
        println!("skipped: this machine has no second loopback address");
        return;
    }
    let _running = begin_long(&server, "a").await;
    server.load(1, 0).await;
    let mut waiting = Vec::new();
    for key in 0..4 {
        waiting.push(ask(&server, &key.to_string(), CHAT, &question(CHAT, true)).await);
        server.load(1, key + 1).await;
    }
    let other = socket.connect(server.address).await.unwrap();
    post(&other, CHAT, &question(CHAT, true)).await;
    let text = timeout(Duration::from_secs(60), waiting.pop().unwrap().text()).await.expect("the stream ends");
    assert!(text.contains(FULL), "{text}");
}

#[tokio::test]
async fn given_up_choice_is_queued_again() {
    // Other tests can disable log lines for all threads of their process.
    if ran_in_own_process(given_up_choice_is_queued_again) {
        return;
    }
    let setup = |stops_at| Setup { parallel: 2, max_queue: 2, context: 2048, stops_at, ..Setup::default() };
    let body = json!({"prompt": "A fox and a dog.", "n": 4, "max_tokens": 20, "seed": 3, "temperature": 1});
    // The log of both servers: all tasks run on the thread of the test.
    let file = tempfile::NamedTempFile::new().unwrap();
    let writer = file.reopen().unwrap();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.try_clone().unwrap());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let alone = setup(usize::MAX).start().await.ask(COMPLETIONS, &body).await;
    for stream in [false, true] {
        let server = Arc::new(setup(0).start().await);
        let running = [begin_long(&server, "c").await, begin_long(&server, "c").await];
        server.load_after_steps(2, 0).await;
        let asking = tokio::spawn({
            let (server, body) = (server.clone(), with(body.clone(), json!({"stream": stream})));
            async move { ask(&server, "a", COMPLETIONS, &body).await.text().await }
        });
        // The first choice and the second choice wait.
        server.load(2, 2).await;
        let other = ask(&server, "b", CHAT, &question(CHAT, true)).await;
        assert_eq!(other.status, 200);
        drop(running);
        server.resume();
        let text = timeout(Duration::from_secs(60), asking).await.expect("the answer ends").unwrap();
        if stream {
            for (index, choice) in alone["choices"].as_array().unwrap().iter().enumerate() {
                assert_eq!(text_of_choice(&text, index), choice["text"].as_str().unwrap(), "choice {index}");
            }
        } else {
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["choices"], alone["choices"]);
        }
    }
    // The line of a request is written after its last byte.
    let read = || std::fs::read_to_string(file.path()).unwrap();
    let is_answer = |line: &&str| line.contains(COMPLETIONS) && line.contains("cut_short=false");
    wait_until(|| read().lines().filter(is_answer).count() == 3, read).await;
    let log = read();
    let answered = log.lines().filter(is_answer);
    let prompt_tokens = |line: &str| line.split_once("prompt_tokens=")?.1.split(' ').next()?.parse::<usize>().ok();
    let counted: Vec<_> = answered.map(prompt_tokens).collect();
    assert!(counted[0].is_some(), "{log}");
    assert_eq!(counted, [counted[0]; 3], "a choice that was queued twice counts once: {log}");
}

/// The text of one choice of a stream.
fn text_of_choice(stream: &str, index: usize) -> String {
    let chunks = events(stream.strip_suffix("data: [DONE]\n\n").expect("a complete stream"));
    let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).filter(|choice| choice["index"] == index);
    choices.filter_map(|choice| choice["text"].as_str()).collect()
}

#[tokio::test]
async fn health_lists_the_oldest_waiting_requests() {
    let server = stopped(50).start().await;
    let _running = begin_long(&server, "a").await;
    server.load(1, 0).await;
    let prompt = |tokens: usize| json!({"prompt": vec![7; tokens], "stream": true});
    let mut waiting = Vec::new();
    for number in 0..40 {
        waiting.push(ask(&server, "a", COMPLETIONS, &prompt(100 + number)).await);
        server.load(1, number + 1).await;
    }
    let health = server.get("/health").await.json().await;
    assert_eq!(health["requests"], json!({"running": 1, "queued": 40}));
    let first = &health["queue"][0];
    assert_eq!((&first["position"], &first["waits_for"]), (&json!(1), &json!("requests")), "{health}");
    assert!(first["waiting_seconds"].is_number(), "{health}");
    let lengths: Vec<_> = health["queue"].as_array().unwrap().iter().map(|entry| &entry["prompt_tokens"]).collect();
    assert_eq!(lengths, (100..132).collect::<Vec<_>>());
}

#[tokio::test]
async fn memory_of_waiting_requests_is_limited() {
    // A token takes 8 bytes of memory.
    let setup = Setup { context: 8192, max_queue_bytes: 70_000, ..stopped(16) };
    let server = setup.start().await;
    let _running = begin_long(&server, "a").await;
    server.load(1, 0).await;
    let large = |tokens: usize| json!({"prompt": vec![7; tokens], "max_tokens": 1, "stream": true});
    let waiting = ask(&server, "a", COMPLETIONS, &large(5000)).await;
    assert_eq!(waiting.status, 200);
    for key in ["a", "b"] {
        let refused = ask(&server, key, COMPLETIONS, &large(5000)).await;
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("2")), "{key}");
    }
    let _small = ask(&server, "a", COMPLETIONS, &large(1000)).await;
    server.load(1, 2).await;
    let newest = ask(&server, "a", COMPLETIONS, &large(2000)).await;
    server.load(1, 3).await;
    // The newest request of the key that holds most memory makes room.
    let other = ask(&server, "b", COMPLETIONS, &large(2000)).await;
    assert_eq!(other.status, 200);
    let text = timeout(Duration::from_secs(60), newest.text()).await.expect("the stream ends");
    assert!(text.contains(FULL), "{text}");
    assert_eq!(server.engine.load(), (1, 3));
}
