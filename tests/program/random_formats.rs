//! Sends random output formats to a server in a control group whose limit is the server's memory limit plus 10 %. Each
//! request must get status 200, 400 or 413, no process may be killed, and the memory must stay below the limit. The
//! times are printed, but not checked.
//!
//! `MOESTRO_FORMATS` sets the number of formats. `MOESTRO_FORMATS_SEED` sets the seed of the first format.

#![cfg(target_os = "linux")]

use crate::{
    group::Group,
    process::{Process, send},
};
use serde_json::{Value, json};
use std::{
    env,
    io::Read,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};
use test_support::{
    formats::{self, Source},
    process_memory::memory,
    with,
};

const LIMIT: u64 = 512 << 20;
const COUNT: u64 = 40;
/// Maximum length of a prompt. Tools are a part of the prompt, and a long prompt takes long with any format.
const MAX_PROMPT: &str = "2000";

fn from_env(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Sends a request. Returns the status, the body, and the elapsed time.
fn ask(port: u16, body: &Value) -> (u16, String, Duration) {
    let (start, body) = (Instant::now(), body.to_string());
    let mut stream = send(port, "POST /v1/chat/completions", "", &body);
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .unwrap_or_else(|error| panic!("{error} after {:?}: {body:.2000}", start.elapsed()));
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, answer, start.elapsed())
}

/// Sets a flag when this value is dropped, even after a panic, so that the other client ends.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"messages": messages, "max_tokens": 6, "temperature": 1, "seed": 1, "enable_thinking": false});
    with(body, more)
}

#[test]
fn random_formats_are_answered_or_refused() {
    let group = Group::with_margin(LIMIT);
    let args = ["--memory-limit", &LIMIT.to_string(), "--max-prompt-tokens", MAX_PROMPT];
    let server = Process::spawn(crate::group::command(group.as_ref()), &args);
    let port = server.port;
    let (first, count) = (from_env("MOESTRO_FORMATS_SEED", 0), from_env("MOESTRO_FORMATS", COUNT));
    let (mut accepted, mut slowest) = (0, (Duration::ZERO, 0));
    let is_done = AtomicBool::new(false);
    let longest_wait = thread::scope(|scope| {
        let other_client = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_done.load(Relaxed) {
                let (status, answer, time) = ask(port, &chat(json!({"max_tokens": 1})));
                assert_eq!(status, 200, "{answer}");
                longest = longest.max(time);
                thread::sleep(Duration::from_millis(20));
            }
            longest
        });
        let guard = SetOnDrop(&is_done);
        for seed in first..first + count {
            let fields = formats::fields(&mut Source::new(&[], seed));
            let (status, answer, time) = ask(port, &chat(fields.clone()));
            let text = fields.to_string();
            // Status 413 means that the format needs more memory than the server reserves for requests.
            assert!([200, 400, 413].contains(&status), "seed {seed}: {status}: {answer:.600}\n{text:.2000}");
            if time > Duration::from_secs(1) {
                eprintln!("seed {seed}: status {status} after {time:.1?}: {text:.200}");
            }
            accepted += u64::from(status == 200);
            slowest = slowest.max((time, seed));
        }
        drop(guard);
        other_client.join().unwrap()
    });
    let peak = memory(server.id(), "VmHWM");
    eprintln!(
        "{count} formats, {accepted} accepted, slowest {:.2?} (seed {}); {} MiB at the peak; another client waited {longest_wait:.2?}",
        slowest.0,
        slowest.1,
        peak >> 20
    );
    assert!(accepted > count / 10, "most formats are refused");
    assert!(peak <= LIMIT, "{peak} bytes at the peak");
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
}
