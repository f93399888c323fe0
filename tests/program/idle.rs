//! Tests that an idle server frees its memory, uses no CPU time, and answers again at the next request.

#![cfg(target_os = "linux")]

use crate::process::{self, Process};
use serde_json::Value;
use std::{
    fs, thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Resident memory of the server in bytes.
fn memory(server: &Process) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", server.id())).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// CPU time of the server, in hundredths of a second.
fn ticks(server: &Process) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.id())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn answer(server: &Process) -> Value {
    let question = r#"{"prompt": "One, two,", "max_tokens": 8, "temperature": 0}"#;
    let answer: Value = serde_json::from_str(&server.ask("POST", "/v1/completions", question)).unwrap();
    answer["choices"][0]["text"].clone()
}

#[test]
fn idle_model_is_unloaded_and_reloaded() {
    let cache = tempfile::tempdir().unwrap();
    let prompts = cache.path().to_str().unwrap();
    let [file, logs] = ["moestro.toml", "logs"].map(|name| cache.path().join(name));
    fs::write(&file, "keep-alive = \"1h\"\nmemory-limit = \"512M\"\n").unwrap();
    let [config, log_dir] = [&file, &logs].map(|path| path.to_str().unwrap());
    let server = Process::start(&["--config", config, "--log-dir", log_dir, "--prompt-cache-dir", prompts]);
    let right = answer(&server);
    let loaded = memory(&server);
    // The parts of the plan add up to the memory that `/health` reports. A model that is not loaded reserves no memory.
    let held = || {
        let metrics = server.ask("GET", "/metrics", "");
        let parts = metrics.lines().filter_map(|line| line.strip_prefix("moestro_memory_bytes{")?.split_once("} "));
        parts.map(|(_, bytes)| bytes.parse::<u64>().unwrap()).sum::<u64>()
    };
    let health: Value = serde_json::from_str(&server.ask("GET", "/health", "")).unwrap();
    assert_eq!(health["memory"]["reserved"], held(), "{health}");
    assert!(health["memory"]["used"].as_u64().is_some_and(|used| used < held()), "{health}");
    // From now on, the model is unloaded a second after its last request.
    fs::write(&file, "keep-alive = \"1s\"\nmemory-limit = \"512M\"\n").unwrap();
    process::reload(server.id(), &logs);
    let begun = Instant::now();
    while held() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the model is still loaded");
        thread::sleep(Duration::from_millis(100));
    }
    assert!(server.ask("GET", "/health", "").contains("\"model\":null"));
    // On a busy machine, the threads that free memory may run late. Later, the server is idle for five seconds.
    let used = |_| {
        let before = ticks(&server);
        thread::sleep(Duration::from_secs(5));
        ticks(&server) - before
    };
    let ticks = (0..6).map(used).find(|ticks| *ticks <= 1);
    let idle = memory(&server);
    let begun = Instant::now();
    assert_eq!(answer(&server), right);
    let again = begun.elapsed();
    eprintln!(
        "{} MiB loaded, {} MiB idle, {ticks:?} hundredths of a second of CPU time in 5 s, {again:?} to eight tokens",
        loaded / MIB,
        idle / MIB
    );
    assert!(right.as_str().is_some_and(|text| !text.is_empty()), "{right}");
    assert!(idle < 60 * 1_000_000, "{idle} bytes without a model");
    assert!(idle < loaded, "{loaded} bytes became {idle}");
    assert!(ticks.is_some(), "the server without a model is never idle for five seconds");
}
