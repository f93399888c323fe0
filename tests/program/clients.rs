//! Tests many clients of one server: the memory and the files that the process uses must not grow with the number of
//! requests.

use crate::process::Process;
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};
use test_support::{
    formats::Source,
    process_memory::{memory, open_files},
};

const CLIENTS: usize = 16;

/// Number of resident bytes and of open files of the server.
fn held(server: &Process) -> (u64, usize) {
    (memory(server.id(), "VmRSS"), open_files(server.id()))
}

/// Sends `count` requests of random size from 16 clients.
fn send(server: &Process, count: usize, seed: usize) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let mut random = Source::new(&[], (seed * 1_000_000 + number) as u64);
                    let (max_tokens, n) = (1 + random.below(16), 1 + random.below(2));
                    let prompt: Vec<usize> = (0..1 + random.below(200)).map(|_| 100 + random.below(1500)).collect();
                    let body = json!({"prompt": prompt, "max_tokens": max_tokens, "n": n});
                    let answer = server.ask("POST", "/v1/completions", &body.to_string());
                    let answer: Value = serde_json::from_str(&answer).unwrap();
                    assert!(answer["choices"].is_array(), "{answer}");
                }
            });
        }
    });
}

/// The environment variable `MOESTRO_REQUESTS` sets the number of requests.
#[test]
#[ignore = "long: hundreds of requests"]
fn many_requests_leak_nothing() {
    let count = std::env::var("MOESTRO_REQUESTS").map_or(400, |count| count.parse().unwrap());
    let server = Process::start(&["--parallel", "4", "--max-queue", "64", "--prompt-cache", "4M"]);
    // The first requests fill buffers and the prompt cache.
    send(&server, count / 4, 1);
    let before = held(&server);
    send(&server, count - count / 4, 2);
    let after = held(&server);
    println!("{before:?} after a quarter, {after:?} after {count} requests");
    assert!(after.0 < before.0 + before.0 / 20, "memory grew from {} to {} bytes", before.0, after.0);
    assert!(after.1 <= before.1 + 2, "open files grew from {} to {}", before.1, after.1);
    assert_eq!(server.metric("moestro_requests_running"), 0);
    assert_eq!(server.metric("moestro_requests_queued"), 0);
}
