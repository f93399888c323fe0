//! Tests failures of the prompt cache's directory: a full disk, a directory that is not writable, damaged files, and a
//! second server. Answers must not change, and the log must have one warning.

use crate::{
    process::{Process, agent},
    program::{MOESTRO, signal},
};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};
use test_support::DEMO;

/// A server and its log directory.
struct Server {
    process: Process,
    logs: tempfile::TempDir,
}

impl Server {
    fn start(command: Command, cache: &Path) -> Self {
        let logs = tempfile::tempdir().unwrap();
        let [dir, log_dir] = [cache, logs.path()].map(|path| path.to_str().unwrap());
        let args = ["--memory-limit", "300M", "--prompt-cache-dir", dir, "--log-dir", log_dir, DEMO];
        Self { process: Process::spawn(command, &args), logs }
    }

    /// The choices of an answer, and the number of cached prompt tokens.
    fn ask(&self, messages: &[Value]) -> (Value, u64) {
        let answer = self.process.chat(messages);
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"].clone(), cached)
    }

    fn disk(&self) -> Value {
        let health: Value = serde_json::from_str(&self.process.ask("GET", "/health", "")).unwrap();
        health["prompt_cache"]["disk"].clone()
    }

    /// Waits until the status of the disk cache satisfies `is_done`.
    fn wait_for_disk(&self, is_done: impl Fn(&Value) -> bool) {
        let begun = Instant::now();
        while !is_done(&self.disk()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{} {:?}", self.disk(), self.warnings());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The warnings in the log, once there is one. A line is written a little after its event.
    fn wait_for_warnings(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            match self.warnings() {
                none if none.is_empty() && begun.elapsed() < Duration::from_secs(30) => {
                    thread::sleep(Duration::from_millis(20));
                }
                warnings => return warnings,
            }
        }
    }

    fn warnings(&self) -> Vec<String> {
        let files = fs::read_dir(self.logs.path()).unwrap().map(|entry| entry.unwrap().path());
        let text: String = files.map(|path| fs::read_to_string(path).unwrap()).collect();
        text.lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR")).map(str::to_owned).collect()
    }
}

/// The answers of a server without a disk cache.
fn answers(turns: &[Vec<Value>]) -> Vec<Value> {
    let server = Process::start(&["--memory-limit", "300M", "--prompt-cache-dir", "off", DEMO]);
    turns.iter().map(|messages| server.chat(messages)["choices"].clone()).collect()
}

#[test]
fn full_disk_is_not_used_again() {
    let (dir, turns) = (tempfile::tempdir().unwrap(), agent(3, true));
    // No file may exceed 64 blocks. This is enough for the log, but not for a snapshot.
    let mut limited = Command::new("sh");
    limited.args(["-c", r#"trap "" XFSZ; ulimit -f 64; exec "$0" "$@""#, MOESTRO]);
    let server = Server::start(limited, dir.path());
    assert!(server.disk().is_object(), "{:?}", server.warnings());
    let expected = answers(&turns);
    for (number, (messages, expected)) in turns.iter().zip(&expected).enumerate() {
        let (answer, cached) = server.ask(messages);
        assert_eq!(answer, *expected);
        // The cache in memory still works.
        assert_eq!(cached > 0, number > 0);
        server.wait_for_disk(Value::is_null);
    }
    let warnings = server.wait_for_warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("cannot write a prompt snapshot; running without a disk cache"), "{warnings:?}");
    // No temporary file is left.
    let names: Vec<PathBuf> = files(dir.path(), "");
    assert!(names.iter().all(|path| !path.to_str().unwrap().ends_with("partial")), "{names:?}");
}

/// The files below `dir` whose names end with `ending`, largest first.
fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let dirs = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let all = dirs.flat_map(|dir| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()));
    let mut all: Vec<PathBuf> = all.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    all.sort_by_key(|path| std::cmp::Reverse(path.metadata().unwrap().len()));
    all
}

#[test]
fn damaged_file_is_logged_once() {
    let turns = agent(3, true);
    let messages = &turns[2];
    let kept = tempfile::tempdir().unwrap();
    let first = Server::start(Command::new(MOESTRO), kept.path());
    let answer = first.process.chat(messages);
    let (expected, prompt) = (&answer["choices"], answer["usage"]["prompt_tokens"].as_u64().unwrap());
    let held = first.process.metric("moestro_prompt_cache_checkpoints{place=\"memory\"}");
    assert!(held > 1);
    first.wait_for_disk(|disk| disk["checkpoints"].as_u64() >= Some(held));
    assert_eq!(first.warnings(), [""; 0]);
    drop(first);
    type Damage = fn(&mut Vec<u8>, &[u8]);
    let damages: [(&str, Damage); 5] = [
        ("cut off", |bytes, _| bytes.truncate(bytes.len() * 2 / 3)),
        ("a bit of the state", |bytes, _| bytes[5000] ^= 4),
        ("a bit at the end", |bytes, _| *bytes.last_mut().unwrap() ^= 1),
        ("another model", |bytes, _| bytes[10] ^= 1),
        ("another prompt", |bytes, other| *bytes = other.to_vec()),
    ];
    for (what, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        for path in files(kept.path(), "") {
            let to = dir.path().join(path.strip_prefix(kept.path()).unwrap());
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(path, to).unwrap();
        }
        let states = files(dir.path(), ".state");
        let len = |path: &PathBuf| fs::metadata(path).unwrap().len();
        let tokens = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.split('-').next().unwrap().parse::<u64>().unwrap()
        };
        // This is the snapshot that the prompt would use. The snapshot at the end of the answer has more tokens.
        let wanted = states.iter().filter(|path| tokens(path) < prompt).max_by_key(|path| tokens(path)).unwrap();
        let other = states.iter().find(|path| len(path) != len(wanted)).unwrap();
        let mut bytes = fs::read(wanted).unwrap();
        damage(&mut bytes, &fs::read(other).unwrap());
        fs::write(wanted, bytes).unwrap();
        let mut second = Server::start(Command::new(MOESTRO), dir.path());
        let (answer, cached) = second.ask(messages);
        assert_eq!(answer, *expected, "{what}");
        // The prompt must use a snapshot with fewer tokens instead.
        assert!((1..tokens(wanted)).contains(&cached), "{what}: {cached} of {}", tokens(wanted));
        // All warnings are in the log after the server has exited.
        signal("TERM", second.process.id());
        assert_eq!(second.process.exit_code(), Some(0), "{what}");
        let warnings = second.warnings();
        assert_eq!(warnings.len(), 1, "{what}: {warnings:?}");
        let name = wanted.file_name().unwrap().to_str().unwrap();
        assert!(
            warnings[0].contains(name) || warnings[0].contains("cannot read a prompt snapshot"),
            "{what}: {warnings:?}"
        );
    }
}

#[test]
fn second_server_takes_over_after_kill() {
    let (dir, turns) = (tempfile::tempdir().unwrap(), agent(2, true));
    let first = Server::start(Command::new(MOESTRO), dir.path());
    let (expected, _) = first.ask(&turns[0]);
    first.wait_for_disk(|disk| disk["checkpoints"].as_u64() > Some(0));
    let second = Server::start(Command::new(MOESTRO), dir.path());
    let health =
        |server: &Server| -> Value { serde_json::from_str(&server.process.ask("GET", "/health", "")).unwrap() };
    assert_eq!(health(&second)["prompt_cache"]["disk_locked"], true);
    assert!(second.disk().is_null());
    assert_eq!(second.ask(&turns[0]), (expected.clone(), 0), "it answers without the disk cache");
    // Killing the first server by SIGKILL releases the lock.
    drop(first);
    second.wait_for_disk(|disk| disk["checkpoints"].as_u64() > Some(0));
    assert_eq!(health(&second)["prompt_cache"]["disk_locked"], false);
    assert_eq!(second.warnings(), [""; 0]);
}
