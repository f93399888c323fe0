//! Tests of commands whose output cannot be written, and of servers that answer with an error.
#![cfg(target_os = "linux")]

use crate::program;
use std::{
    fs::File,
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    thread,
};

const COMMANDS: [&str; 14] = [
    "run -p What+is+12+7? --temp 0 --thinking off",
    "generate -p Hi --max-tokens 2",
    "list",
    "cache",
    "cache --remove other --yes",
    "config",
    "info",
    "completions bash",
    "service install --dry-run",
    "rm --yes nothing",
    "pack --out pack",
    "pull no-id",
    "ps --port 1",
    "frobnicate",
];

/// Exit code of a program that panics.
const PANIC: i32 = 101;

/// Runs each command with outputs that `set` chooses, and returns the exit codes.
fn exit_codes(home: &Path, set: impl Fn(&mut Command)) -> Vec<i32> {
    let exit_code = |line: &str| {
        let mut command = program::moestro(home);
        command.args(line.split(' ')).current_dir(home).stdin(Stdio::null());
        set(&mut command);
        command.status().unwrap().code().expect("no signal")
    };
    COMMANDS.map(exit_code).into()
}

/// A pipe whose reader is closed.
fn closed_pipe() -> Stdio {
    let (_, write) = std::io::pipe().unwrap();
    write.into()
}

#[test]
fn unwritable_output_never_panics() {
    let home = tempfile::tempdir().unwrap();
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    for output in [&full as &dyn Fn() -> Stdio, &closed_pipe] {
        let usual = exit_codes(home.path(), |command| _ = command.stdout(Stdio::null()).stderr(Stdio::null()));
        let no_stderr = exit_codes(home.path(), |command| _ = command.stdout(Stdio::null()).stderr(output()));
        assert_eq!(no_stderr, usual);
        let neither = exit_codes(home.path(), |command| _ = command.stdout(output()).stderr(output()));
        assert!(!neither.contains(&PANIC), "{neither:?}");
    }
}

/// A server that sends the same response to each request.
fn server(status: &'static str, body: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.read(&mut [0; 4096]);
            let _ = write!(socket, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    port
}

#[test]
fn error_of_a_server_is_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    for (status, body, sentence) in [
        ("404 Not Found", "<html>", "the server answers with status 404 Not Found"),
        ("404 Not Found", "{\"detail\": \"x\"}", "the server answers with status 404 Not Found"),
        ("502 Bad Gateway", "", "the server answers with status 502 Bad Gateway"),
        ("500 Internal Server Error", "{\"error\": \"out of order\"}", "moestro: out of order"),
        ("401 Unauthorized", "{\"error\": {\"message\": \"no key\"}}", "moestro: no key"),
        ("200 OK", "<html>", "the server's answer is not JSON"),
    ] {
        let port = server(status, body).to_string();
        for command in ["ps", "stop", "stop x"] {
            let mut asked = program::moestro(home.path());
            let output = asked.args(command.split(' ')).args(["--port", &port]).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains(sentence), "{command}: {status} {body}: {stderr}");
            assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
            assert!(output.stdout.is_empty());
        }
    }
    // A server that has no model yet is no failure.
    let port = server("503 Service Unavailable", r#"{"status": "loading", "version": "0"}"#).to_string();
    let output = program::moestro(home.path()).args(["ps", "--port", &port]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "no model is in memory: loading\n");
}
