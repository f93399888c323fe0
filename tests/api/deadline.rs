//! Tests of `--request-timeout`, which sets one deadline for the whole request.

use super::server::{CHAT, COMPLETIONS, Server, Setup, chat, with};
use moestro::http::HostTimeouts;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(1);

/// A server that takes at least a fifteenth of the time limit for each answer.
async fn server() -> Server {
    let says = Some("</think>\n\none two three four five six seven eight nine ten.");
    let delay = Duration::from_millis(3);
    let configure = |state: &mut moestro::http::ServerState| {
        state.models.set_timeouts(HostTimeouts { request: Some(LIMIT), ..HostTimeouts::default() })
    };
    Setup { says, delay, configure, ..Setup::default() }.start().await
}

fn requests(n: usize, stream: bool) -> [(&'static str, Value); 2] {
    [
        (CHAT, with(chat("Count."), json!({"n": n, "stream": stream}))),
        (COMPLETIONS, json!({"prompt": "Count.", "max_tokens": 40, "n": n, "stream": stream})),
    ]
}

#[tokio::test]
async fn choices_of_a_request_share_one_deadline() {
    let server = server().await;
    for (path, body) in requests(100, false) {
        let start = Instant::now();
        assert_eq!(server.refused(path, &body, 504).await["code"], "timeout", "{path}");
        assert!(start.elapsed() >= LIMIT && start.elapsed() < 60 * LIMIT, "{path}: {:?}", start.elapsed());
    }
    for (path, body) in requests(100, true) {
        let start = Instant::now();
        let text = server.post(path, &body).await.text().await;
        assert!(text.contains("\"timeout\"") && !text.contains("[DONE]"), "{path}: {text}");
        assert!(start.elapsed() >= LIMIT && start.elapsed() < 60 * LIMIT, "{path}: {:?}", start.elapsed());
    }
    server.idle().await;
    let metrics = server.metrics.render();
    assert!(!metrics.contains("moestro_answers_total{finish_reason=\"error\"} 0\n"), "{metrics}");
}

#[tokio::test]
async fn slow_body_exceeds_the_deadline() {
    let server = server().await;
    let start = Instant::now();
    let length = [("content-type", "application/json"), ("content-length", "100")];
    let answer = server.bare("POST", CHAT, &length, b"{").await;
    assert_eq!(answer.status, 504);
    assert!(start.elapsed() < 60 * LIMIT, "{:?}", start.elapsed());
}
