//! Tests of the line `{"event":"exiting",...}` of a server that fails before it is ready. Programs that start a server
//! read the reason there.

use crate::program::moestro;
use serde_json::{Value, json};
use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Command, Output, Stdio},
};

/// `moestro serve` on the CPU with its own home directory.
fn serve(home: &Path, args: &[&str]) -> Command {
    let mut command = moestro(home);
    command.args(["serve", "--prompt-cache-dir", "off"]).args(args).stdin(Stdio::null());
    command
}

/// The only line that a server prints, and the error on its stderr.
fn exiting(output: &Output) -> (Value, &str) {
    let stdout = std::str::from_utf8(&output.stdout).unwrap();
    let stderr = std::str::from_utf8(&output.stderr).unwrap();
    assert_eq!((stdout.lines().count(), stderr.lines().count()), (1, 1), "{stdout} {stderr}");
    (serde_json::from_str(stdout).unwrap(), stderr.trim_end().strip_prefix("moestro: ").unwrap())
}

#[test]
fn failed_start_prints_its_reason() {
    let home = tempfile::tempdir().unwrap();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let broken = home.path().join("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("config.json"), "{}").unwrap();
    let broken = broken.to_str().unwrap();
    for (reason, args) in [
        ("port_conflict", &["--port", &port][..]),
        ("port_conflict", &["--port", "0", "--ollama-port", &port]),
        ("model_load_failed", &["--port", "0", "/no/such/directory"]),
        ("model_load_failed", &["--port", "0", "moestro-dmo"]),
        ("model_load_failed", &["--port", "0", home.path().to_str().unwrap()]),
        ("model_load_failed", &["--port", "0", broken]),
        ("out_of_memory", &["--port", "0", "--memory-limit", "1M"]),
        ("error", &["--port", "0", "--host", "example.invalid"]),
    ] {
        let output = serve(home.path(), args).output().unwrap();
        let (event, stderr) = exiting(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_eq!((&event["event"], &event["reason"]), (&json!("exiting"), &json!(reason)), "{args:?}: {event}");
        assert_eq!(event["detail"], stderr, "{args:?}");
        assert!(stderr.starts_with(event["error"].as_str().unwrap()), "{args:?}: {event}");
    }
}

#[test]
fn usage_error_prints_no_event() {
    let home = tempfile::tempdir().unwrap();
    for line in ["serve --no-such-flag", "serve --top-p 2", "serve --port x", "", "generate", "dance"] {
        let output = moestro(home.path()).args(line.split_whitespace()).stdin(Stdio::null()).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{line}");
    }
}

#[test]
fn closed_stdout_does_not_change_the_error() {
    let home = tempfile::tempdir().unwrap();
    let mut command = serve(home.path(), &["--port", "0", "/no/such/directory"]);
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(server.stdout.take());
    let output = server.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stderr, b"moestro: no such directory: /no/such/directory\n");
}

#[cfg(feature = "hub")]
#[test]
fn signal_while_loading_is_the_reason() {
    let home = tempfile::tempdir().unwrap();
    // A hub that accepts connections and never answers.
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = serve(home.path(), &["--port", "0", "org/name"]);
    command.env("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap()));
    let server = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let connection = hub.accept().unwrap();
    crate::program::signal("TERM", server.id());
    let output = server.wait_with_output().unwrap();
    drop(connection);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, b"{\"event\":\"exiting\",\"reason\":\"SIGTERM\"}\n");
}
