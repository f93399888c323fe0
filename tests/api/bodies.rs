//! Tests of compressed request bodies, of bodies that an error leaves unread, and of texts that are cut within a character.

use super::server::{CHAT, Server, Setup, chat, little_memory};
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use std::io::Write;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

async fn status(server: &Server, encoding: &str, body: &[u8]) -> (u16, Value) {
    let answer = server.send("POST", CHAT, &[("content-encoding", encoding)], Some(body)).await;
    (answer.status, answer.json().await)
}

fn question() -> Vec<u8> {
    chat("Hi").to_string().into_bytes()
}

#[tokio::test]
async fn gzip_body_is_decompressed() {
    let server = Server::saying("</think>\n\nHello.").await;
    for encoding in ["gzip", "GZIP", "x-gzip"] {
        let (code, answer) = status(&server, encoding, &gzip(&question())).await;
        assert_eq!((code, &answer["choices"][0]["message"]["content"]), (200, &json!("Hello.")));
    }
    assert_eq!(status(&server, "identity", &question()).await.0, 200);
}

#[tokio::test]
async fn invalid_encoding_is_refused() {
    let server = Server::saying("Hello.").await;
    let whole = gzip(&question());
    for body in [&question()[..], &whole[..whole.len() / 2], &[]] {
        let (code, answer) = status(&server, "gzip", body).await;
        assert_eq!((code, &answer["error"]["code"]), (400, &json!("invalid_json")), "{answer}");
    }
    for encoding in ["br", "zstd", "gzip, gzip"] {
        let (code, answer) = status(&server, encoding, &whole).await;
        assert_eq!((code, &answer["error"]["code"]), (415, &json!("unsupported_encoding")));
    }
}

#[tokio::test]
async fn decompressed_size_is_limited() {
    let server = Setup { configure: |state| state.body_limit = 1 << 20, ..Setup::default() }.start().await;
    let bomb = gzip(&vec![b' '; 256 << 20]);
    assert!(bomb.len() < 1 << 20);
    let (code, answer) = status(&server, "gzip", &bomb).await;
    assert_eq!((code, &answer["error"]["code"]), (413, &json!("request_too_large")));
}

#[tokio::test]
async fn decompressed_bytes_count_as_request_memory() {
    // The body is within the size limit but exceeds the memory of requests.
    let server = Setup { configure: little_memory, ..Setup::default() }.start().await;
    let body = gzip(&vec![b' '; 8 << 20]);
    assert!(body.len() < 64 << 10);
    let (code, answer) = status(&server, "gzip", &body).await;
    assert_eq!((code, &answer["error"]["code"]), (413, &json!("request_too_large")), "{answer}");
    server.memory_is_free().await;
}

#[tokio::test]
async fn declared_size_is_limited() {
    let server = Server::saying("Hello.").await;
    for length in [100_000_000, u64::MAX >> 1] {
        let length = length.to_string();
        let headers = [("content-type", "application/json"), ("content-length", length.as_str())];
        let answer = server.bare("POST", CHAT, &headers, b"{").await;
        assert_eq!((answer.status, &answer.json().await["error"]["code"]), (413, &json!("request_too_large")));
    }
}

#[tokio::test]
async fn errors_follow_whole_body() {
    // The client reads nothing before it has sent the body. The sockets' buffers hold less.
    let body = vec![b' '; 24 << 20];
    let server = Setup { configure: |state| state.body_limit = 16 << 20, ..Setup::default() }.start().await;
    let locked = Setup { api_key: Some("secret"), ..Setup::default() }.start().await;
    for (server, method, path, header, status) in [
        (&server, "POST", "/v1/nothing", ("x-a", "b"), 404),
        (&server, "PUT", CHAT, ("x-a", "b"), 405),
        (&server, "POST", CHAT, ("content-encoding", "br"), 415),
        (&server, "POST", CHAT, ("content-type", "text/plain"), 415),
        (&server, "POST", CHAT, ("x-a", "b"), 413),
        (&locked, "POST", CHAT, ("authorization", "Bearer wrong"), 401),
    ] {
        let answer = server.send(method, path, &[header], Some(&body)).await;
        assert_eq!(answer.status, status, "{method} {path} {header:?}");
        assert!(answer.json().await["error"]["message"].is_string());
    }
}

#[tokio::test]
async fn silent_body_does_not_delay_error() {
    let server = Server::saying("Hello.").await;
    let headers = [("content-type", "application/json"), ("content-length", "5")];
    // The limit for a silent body is 10 s.
    let start = std::time::Instant::now();
    assert_eq!(server.bare("POST", "/v1/nothing", &headers, b"").await.status, 404);
    assert!(start.elapsed() < server.state.timeouts.body, "{:?}", start.elapsed());
}

#[tokio::test]
async fn lone_surrogates_become_replacement_characters() {
    let server = Server::saying("</think>\n\nHello.").await;
    for (path, body) in [
        (CHAT, r#"{"cache_prompt": false, "messages": [{"role": "user", "content": "a CUT b"}]}"#),
        (
            CHAT,
            r#"{"cache_prompt": false, "messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
                   "function": {"name": "f", "arguments": "{\"x\": \"\CUT\"}"}}]}, {"role": "user", "content": "b"}]}"#,
        ),
        ("/v1/completions", r#"{"cache_prompt": false, "prompt": "a CUT b"}"#),
        ("/v1/responses", r#"{"cache_prompt": false, "input": "a CUT b"}"#),
        (
            "/v1/messages",
            r#"{"cache_prompt": false, "max_tokens": 9, "messages": [{"role": "user", "content": "a CUT b"}]}"#,
        ),
        ("/v1/messages/count_tokens", r#"{"messages": [{"role": "user", "content": "a CUT b"}]}"#),
        ("/tokenize", r#"{"content": "a CUT b"}"#),
    ] {
        let mut seen = Vec::new();
        for cut in [r"\ufffd", r"\ud83d", r"\uDE00"] {
            let body = body.replace("CUT", cut);
            let answer = server.send("POST", path, &[], Some(body.as_bytes())).await;
            assert_eq!(answer.status, 200, "{body}");
            let answer = answer.json().await;
            seen.push(["usage", "input_tokens", "tokens"].map(|field| answer[field].clone()));
        }
        assert!(seen.iter().all(|tokens| *tokens == seen[0]), "{path} {seen:?}");
    }
}
