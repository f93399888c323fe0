//! Tests of clients that disconnect: in a stream, in the queue, or while the server waits for a body. The engine must
//! be free within one token.

use super::server::{Server, Setup};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

const LONG: &str = "</think>\n\none two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
                    sixteen seventeen eighteen nineteen twenty, and that is all there is to say about it today.";

async fn slow() -> Server {
    Setup { says: Some(LONG), delay: Duration::from_millis(20), ..Setup::default() }.start().await
}

fn question(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "Count."}], "stream": stream})
}

#[tokio::test]
async fn disconnect_in_stream_stops_generation() {
    let server = slow().await;
    let mut answer = server.post(CHAT, &question(true)).await;
    for _ in 0..3 {
        assert!(answer.chunk().await.is_some());
    }
    assert_eq!(server.engine.load().0, 1);
    drop(answer);
    server.idle().await;
    let evaluated = server.evaluated();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(server.evaluated(), evaluated, "the model still runs after the client has disconnected");
    assert!(evaluated < 40, "{evaluated} tokens were evaluated");
    server.metric("moestro_request_seconds_count 1").await;
}

#[tokio::test]
async fn disconnect_before_body_stops_generation() {
    for (path, body) in [(CHAT, question(false)), (TEXT, json!({"prompt": ["Count.", "Again."], "max_tokens": 60}))] {
        let server = Arc::new(slow().await);
        let asking = tokio::spawn({
            let (server, body) = (server.clone(), body.clone());
            async move { server.post(path, &body).await.status }
        });
        server.load(1, 0).await;
        asking.abort();
        server.idle().await;
        assert!(server.evaluated() < 40, "{} tokens were evaluated", server.evaluated());
        server.metric(&format!("moestro_requests_total{{endpoint=\"{path}\",status=\"499\"}} 1")).await;
        assert!(server.metrics.render().contains("moestro_answers_total{finish_reason=\"cancelled\"} 1"));
    }
}

#[tokio::test]
async fn disconnect_in_prefill_stops_it() {
    // A chunk has 32 tokens and takes 160 ms. The prompt has 13 chunks.
    for stream in [true, false] {
        let server = Setup { says: Some(LONG), delay: Duration::from_millis(5), ..Setup::default() }.start().await;
        let server = Arc::new(server);
        let tokens = 400;
        let body = json!({"prompt": vec![7; tokens], "stream": stream});
        let asking = tokio::spawn({
            let server = server.clone();
            async move { server.post(TEXT, &body).await.text().await }
        });
        while server.evaluated() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let before = server.evaluated();
        asking.abort();
        server.idle().await;
        // The engine finishes the current chunk. If the client disconnects between two chunks, one more chunk may
        // start.
        assert!(server.evaluated() <= before + 2 * 32, "{} of {tokens} after {before}", server.evaluated());
    }
}

#[tokio::test]
async fn disconnect_in_queue_removes_request() {
    let server = slow().await;
    let mut running = server.post(CHAT, &question(true)).await;
    running.chunk().await.unwrap();
    let waiting = server.post(CHAT, &question(true)).await;
    server.load(1, 1).await;
    drop(waiting);
    server.load(1, 0).await;
    assert!(running.text().await.ends_with("data: [DONE]\n\n"), "the running request is not affected");
}
