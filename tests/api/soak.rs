//! A soak test: 200 requests one after another, then 32 at a time. A third of the clients disconnect early. The server
//! must not leak file descriptors or memory, and every answer must be correct.

use crate::server::{COMPLETIONS, Server, Setup, streamed};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use test_support::{
    own_process::ran_in_own_process,
    process_memory::{memory, open_files},
};

/// Sends a request and checks the answer. For some values of `number`, the client disconnects early.
async fn request(server: &Server, number: usize) {
    let text = format!("This is request {number} of many.");
    let stream = number.is_multiple_of(2);
    let body = json!({"prompt": text, "max_tokens": 60, "stream": stream});
    if number.is_multiple_of(3) {
        // A third of the clients disconnect immediately, after the head of the response, or after a few tokens.
        match number % 9 {
            0 => drop(tokio::time::timeout(Duration::from_millis(2), server.post(COMPLETIONS, &body)).await),
            3 => drop(server.post(COMPLETIONS, &streamed(&body)).await),
            _ => {
                let mut answer = server.post(COMPLETIONS, &streamed(&body)).await;
                if answer.status == 200 {
                    answer.chunk().await;
                }
            }
        }
        return;
    }
    let answer = if stream {
        let chunks = server.stream(COMPLETIONS, &body).await;
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
        chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect()
    } else {
        let answer = server.ask(COMPLETIONS, &body).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(answer, text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_clients_leak_nothing() {
    if ran_in_own_process(disconnected_clients_leak_nothing) {
        return;
    }
    let setup = Setup { delay: Duration::from_micros(100), max_queue: 64, ..Setup::default() };
    let server = Arc::new(setup.start().await);
    for number in 0..40 {
        request(&server, number).await;
    }
    server.idle().await;
    let (files_before, memory_before) = (open_files("self"), memory("self", "VmRSS"));
    for number in 0..200 {
        request(&server, number).await;
        if number % 20 == 0 {
            assert_eq!(server.get("/health").await.status, 200);
        }
    }
    for round in 0..5 {
        let requests: Vec<_> = (0..32)
            .map(|number| {
                let server = server.clone();
                tokio::spawn(async move { request(&server, round * 32 + number).await })
            })
            .collect();
        for request in requests {
            request.await.unwrap();
        }
        assert_eq!(server.get("/health").await.status, 200);
    }
    server.idle().await;
    // The server closes abandoned connections some time later.
    let mut files_after = open_files("self");
    for _ in 0..1200 {
        if files_after <= files_before + 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        files_after = open_files("self");
    }
    assert!(files_after <= files_before + 4, "{files_before} descriptors became {files_after}");
    let grown = memory("self", "VmRSS").saturating_sub(memory_before);
    assert!(grown < 32 << 20, "memory grew by {} KiB", grown >> 10);
    assert_eq!(server.engine.load(), (0, 0));
}
