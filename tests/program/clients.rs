//! Tests many clients of one server: the memory and the files that the process uses must not grow with the number of
//! requests.

use crate::{process::Process, process_memory::memory};
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

const CLIENTS: usize = 16;

/// Number of resident bytes and of open files of the server.
fn held(server: &Process) -> (u64, usize) {
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count();
    (memory(server.id(), "VmRSS"), files)
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
                    let dice = |salt: usize, sides: usize| {
                        let mixed = (number * 31 + seed * 17 + salt).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                        (mixed >> 33) % sides
                    };
                    let prompt: Vec<usize> = (0..1 + dice(1, 200)).map(|at| 100 + dice(at + 9, 1500)).collect();
                    let body = json!({"prompt": prompt, "max_tokens": 1 + dice(2, 16), "n": 1 + dice(3, 2)});
                    let answer = server.ask("POST", "/v1/completions", &body.to_string());
                    let answer: Value = serde_json::from_str(&answer).unwrap();
                    assert!(answer["choices"].is_array(), "{answer}");
                }
            });
        }
    });
}

/// The environment variable `MOESTRO_REQUESTS` sets the number of requests. The figure in the documentation is for
/// 10,000 requests.
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
