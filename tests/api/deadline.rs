//! `--request-timeout`: one deadline for all of a request.

use super::server::{Server, Setup};
use moestro::http::HostTimeouts;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_millis(300);

/// A server whose answers take about a third of the limit each.
async fn server() -> Server {
    let says = Some("</think>\n\none two three four five six seven eight nine ten.");
    let delay = Duration::from_millis(3);
    let configure = |state: &mut moestro::http::ServerState| {
        state.models.set_timeouts(HostTimeouts { request: Some(LIMIT), ..HostTimeouts::default() })
    };
    Setup { says, delay, configure, ..Setup::default() }.start().await
}

fn asked(n: usize, stream: bool) -> [(&'static str, Value); 2] {
    let messages = json!([{"role": "user", "content": "Count."}]);
    [
        ("/v1/chat/completions", json!({"messages": messages, "n": n, "stream": stream})),
        ("/v1/completions", json!({"prompt": "Count.", "max_tokens": 40, "n": n, "stream": stream})),
    ]
}

#[tokio::test]
async fn all_answers_to_a_request_have_one_deadline() {
    let server = server().await;
    for (path, body) in asked(1, false) {
        server.ask(path, &body).await;
    }
    for (path, body) in asked(30, false) {
        let begun = Instant::now();
        let answer = server.post(path, &body).await;
        assert_eq!((answer.status, answer.json().await["error"]["code"].clone()), (504, json!("timeout")), "{path}");
        assert!(begun.elapsed() >= LIMIT && begun.elapsed() < 6 * LIMIT, "{path}: {:?}", begun.elapsed());
    }
    for (path, body) in asked(30, true) {
        let begun = Instant::now();
        let text = server.post(path, &body).await.text().await;
        assert!(text.contains("\"timeout\"") && !text.contains("[DONE]"), "{path}: {text}");
        assert!(begun.elapsed() >= LIMIT && begun.elapsed() < 6 * LIMIT, "{path}: {:?}", begun.elapsed());
    }
    server.idle().await;
    let metrics = server.metrics.render();
    assert!(!metrics.contains("moestro_answers_total{finish_reason=\"error\"} 0\n"), "{metrics}");
}

#[tokio::test]
async fn a_body_that_is_late_is_late_for_everything() {
    let server = server().await;
    let begun = Instant::now();
    let length = [("content-type", "application/json"), ("content-length", "100")];
    let answer = server.bare("POST", "/v1/chat/completions", &length, b"{").await;
    assert_eq!(answer.status, 504);
    assert!(begun.elapsed() < 6 * LIMIT, "{:?}", begun.elapsed());
}
