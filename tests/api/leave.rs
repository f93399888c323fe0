//! Tests of clients that disconnect: in a stream, in the queue, or while the server waits for a body. The engine must
//! be free within one token.

use super::server::{CHAT, COMPLETIONS, Server, Setup, chat, streamed, with};
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const LONG: &str = "</think>\n\none two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
                    sixteen seventeen eighteen nineteen twenty, and that is all there is to say about it today.";

/// A server whose model waits after it has evaluated `stops_at` tokens. A test thus knows what the model has evaluated
/// when the client disconnects, and then calls [`Server::resume`].
async fn stopping(stops_at: usize) -> Server {
    Setup { says: Some(LONG), stops_at, ..Setup::default() }.start().await
}

/// Number of tokens that is greater than that of a question and less than that of a question and [`LONG`].
const IN_ANSWER: usize = 40;

#[tokio::test]
async fn disconnect_in_stream_stops_generation() {
    let server = stopping(IN_ANSWER).await;
    let mut answer = server.post(CHAT, &streamed(&chat("Count."))).await;
    for _ in 0..3 {
        assert!(answer.chunk().await.is_some());
    }
    server.stopped().await;
    assert_eq!(server.engine.load().0, 1);
    drop(answer);
    server.metric("moestro_request_seconds_count 1").await;
    server.resume();
    server.idle().await;
    assert_eq!(server.evaluated(), IN_ANSWER + 1, "the model ran after the client had disconnected");
}

#[tokio::test]
async fn disconnect_before_body_stops_generation() {
    let prompts = json!({"prompt": ["Count.", "Again."], "max_tokens": 60});
    // Clients may send a line break or another request after a request.
    for (path, body, more) in [
        (CHAT, chat("Count."), ""),
        (COMPLETIONS, prompts, ""),
        (CHAT, chat("Count."), "\r\n"),
        (CHAT, chat("Count."), "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    ] {
        let server = Arc::new(stopping(IN_ANSWER).await);
        let asking = tokio::spawn({
            let (server, body) = (server.clone(), body.to_string());
            let length = body.len().to_string();
            async move {
                let headers = [("content-type", "application/json"), ("content-length", &*length)];
                server.bare("POST", path, &headers, (body + more).as_bytes()).await.status
            }
        });
        server.stopped().await;
        asking.abort();
        server.metric(&format!("moestro_requests_total{{endpoint=\"{path}\",status=\"499\"}} 1")).await;
        server.resume();
        server.idle().await;
        assert_eq!(server.evaluated(), IN_ANSWER + 1, "{path}");
        server.metric("moestro_answers_total{finish_reason=\"cancelled\"} 1").await;
    }
}

#[tokio::test]
async fn disconnect_in_prefill_stops_it() {
    // A chunk has 32 tokens. The prompt has 13 chunks.
    for stream in [true, false] {
        let server = Arc::new(stopping(40).await);
        let body = json!({"prompt": vec![7; 400], "stream": stream});
        let asking = tokio::spawn({
            let server = server.clone();
            async move { server.post(COMPLETIONS, &body).await.text().await }
        });
        server.stopped().await;
        asking.abort();
        server.metric("moestro_request_seconds_count 1").await;
        server.resume();
        server.idle().await;
        assert_eq!(server.evaluated(), 64, "the engine finishes the current chunk");
    }
}

#[tokio::test]
async fn disconnect_in_queue_removes_request() {
    let server = stopping(IN_ANSWER).await;
    let mut running = server.post(CHAT, &streamed(&chat("Count."))).await;
    running.chunk().await.unwrap();
    let waiting = server.post(CHAT, &streamed(&chat("Count."))).await;
    server.load(1, 1).await;
    let admitted = server.metrics.admitted_tokens.get();
    drop(waiting);
    server.metric("moestro_request_seconds_count 1").await;
    server.resume();
    assert!(running.text().await.ends_with("data: [DONE]\n\n"), "the running request is not affected");
    server.idle().await;
    assert_eq!(server.metrics.admitted_tokens.get(), admitted, "the request left the queue to run");
}

#[tokio::test]
async fn disconnect_in_compilation_stops_it() {
    let server = Arc::new(Setup { says: Some(LONG), ..Setup::default() }.start().await);
    // The whole schema is too large, so the server compiles each property, to name the one that is too large.
    let properties: serde_json::Map<String, Value> =
        (0..200).map(|n| (format!("p{n}"), json!({"type": "integer", "multipleOf": 3000 + n}))).collect();
    let ask = |properties: &Value, stream: bool| {
        let schema = json!({"type": "object", "properties": properties});
        with(chat("Count."), json!({"guided_json": schema, "stream": stream}))
    };
    let large = Value::Object(properties);
    let begun = Instant::now();
    assert_eq!(server.post(CHAT, &ask(&large, false)).await.status, 400);
    let whole = begun.elapsed();
    // The number of requests that have ended with this status, or with any.
    let ended = |status: &str| -> u64 {
        let label = format!("moestro_requests_total{{endpoint=\"{CHAT}\",status=\"{status}");
        let metrics = server.metrics.render();
        let counts =
            metrics.lines().filter(|line| line.starts_with(&label)).filter_map(|line| line.split(' ').next_back());
        counts.map(|count| count.parse::<u64>().unwrap()).sum()
    };
    for stream in [true, false] {
        // A busy machine may stop the test or the server for a while, so one of several tries must be fast. A
        // compilation that nothing stops takes about as long as `whole` each time.
        let mut tries = Vec::new();
        while tries.iter().all(|seconds: &Duration| 2 * *seconds > whole) {
            assert!(tries.len() < 5, "after the client had left, the compilation ran for {tries:?}; alone {whole:?}");
            // The memory of the request before is freed after its answer.
            server.metric("moestro_request_memory_bytes 0").await;
            let [before, cancelled] = [ended(""), ended("499")];
            let asking = tokio::spawn({
                let (server, body) = (server.clone(), ask(&large, stream));
                async move { server.post(CHAT, &body).await.status }
            });
            // The memory of a compilation is reserved when it begins. On a busy machine, it may end unnoticed.
            while server.metrics.request_memory.get() < 8 << 20 && ended("") == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let begun = Instant::now();
            asking.abort();
            // No request holds memory when no compilation runs.
            server.metric("moestro_request_memory_bytes 0").await;
            let seconds = begun.elapsed();
            while ended("") == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // On a busy machine, the compilation may have ended before the client left.
            tries.push(if ended("499") > cancelled { seconds } else { whole });
            assert_eq!(server.engine.load(), (0, 0));
        }
        let other = server.ask(CHAT, &ask(&json!({"a": {"type": "integer"}}), false)).await;
        assert_eq!(other["choices"][0]["finish_reason"], "stop");
    }
}
