//! Tests that the program answers if the home directory cannot hold its files.

#![cfg(unix)]

use crate::{
    process::exchange,
    program::{self, signal},
};
use serde_json::Value;
use std::{
    fs::{self, Permissions},
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

/// A command that runs the program with this home directory, or without one. Temporary files are in `dir`.
fn moestro(dir: &Path, home: Option<&str>) -> Command {
    let mut command = program::moestro(dir);
    match home {
        Some(home) => command.env("HOME", home),
        None => command.env_remove("HOME"),
    };
    command.env("TMPDIR", dir).current_dir(dir);
    command
}

/// Starts a server without a model, which serves the demo, and asks it. Returns the text of its answer and its log.
fn ask_server(mut command: Command) -> (String, String) {
    command.args(["serve", "--port", "0", "--threads", "2", "--temp", "0", "--thinking", "off"]);
    let mut server = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut ready, mut answer, mut log) = (String::new(), String::new(), String::new());
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    if let Some(port) = serde_json::from_str::<Value>(&ready).ok().and_then(|ready| ready["port"].as_u64()) {
        let body = r#"{"messages": [{"role": "user", "content": "What is 12+7?"}]}"#;
        answer = exchange(port.try_into().unwrap(), "POST /v1/chat/completions", "", body);
    }
    // A thread writes the log. SIGKILL would lose the lines that wait for it.
    signal("TERM", server.id());
    server.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    server.wait().unwrap();
    (answer, log)
}

#[test]
fn server_answers_without_a_usable_home() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("file"), "").unwrap();
    for (name, mode) in [("unwritable", 0o555), ("unsearchable", 0o000)] {
        fs::create_dir(at(name)).unwrap();
        fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
    }
    let no_home = "HOME is not set; running without the prompt cache on disk";
    let no_directory = "cannot open the prompt cache directory; running without a disk cache";
    let mut cases = vec![
        (None, no_home),
        (Some(String::new()), no_home),
        (Some(".".into()), no_home),
        (Some("/dev/null".into()), no_directory),
        (Some(at("file")), no_directory),
    ];
    if fs::write(at("unwritable/file"), "").is_ok() {
        println!("skipped: root may write to every directory");
    } else {
        cases.extend([(Some(at("unwritable")), no_directory), (Some(at("unsearchable")), no_directory)]);
        cases.push((Some(at("unsearchable")), "cannot look for"));
    }
    for (home, sentence) in cases {
        let (answer, log) = ask_server(moestro(dir.path(), home.as_deref()));
        assert!(answer.contains("12 + 7 = 19."), "{home:?}: {answer}\n{log}");
        assert!(log.contains(sentence), "{home:?}: {log}");
        assert!(log.contains("cannot write the demo model to the cache"), "{home:?}: {log}");
    }
    // The directory for temporary files can be removed only with these permissions.
    fs::set_permissions(at("unsearchable"), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn settings_of_the_working_directory_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join(".config/moestro");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("moestro.toml"), "not-a-setting = 1").unwrap();
    let config = |command: &mut Command| command.arg("config").output().unwrap();
    for home in ["", ".", "./"] {
        let output = config(&mut moestro(dir.path(), Some(home)));
        assert!(output.status.success(), "{home:?}: {}", String::from_utf8_lossy(&output.stderr));
        let output = config(moestro(dir.path(), Some(home)).env("XDG_CONFIG_HOME", ".config"));
        assert!(output.status.success(), "{home:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let output = config(&mut moestro(dir.path(), dir.path().to_str()));
    assert!(!output.status.success(), "an absolute path is used");
}

#[test]
fn unreadable_settings_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(".config/moestro/moestro.toml");
    let config = || moestro(dir.path(), dir.path().to_str()).arg("config").output().unwrap();
    fs::create_dir_all(&file).unwrap();
    let output = config();
    assert!(String::from_utf8_lossy(&output.stderr).contains("moestro.toml: not a regular file"), "{output:?}");
    fs::remove_dir(&file).unwrap();
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o000)).unwrap();
    if fs::read(&file).is_ok() {
        println!("skipped: root may read every file");
        return;
    }
    let output = config();
    assert!(String::from_utf8_lossy(&output.stderr).contains("moestro.toml: Permission denied"), "{output:?}");
}
