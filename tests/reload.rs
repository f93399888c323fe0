//! SIGHUP: the configuration is read again while the server goes on.

#![cfg(unix)]

#[path = "support/process.rs"]
mod process;

use process::Process;
use std::{fs, process::Command, thread, time::Duration};

#[test]
fn a_hangup_reads_the_configuration_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("moestro.toml");
    fs::write(&file, "api-key = \"old\"\nmemory-limit = \"512M\"\n").unwrap();
    let (file, prompts) = (file.to_str().unwrap(), dir.path().to_str().unwrap());
    let server = Process::start(&["--config", file, "--prompt-cache-dir", prompts]);
    let opens = |key: &str| server.ask("GET", &format!("/v1/models?key={key}"), "").contains("moestro-demo");
    let hang_up = || {
        let sent = Command::new("kill").args(["-HUP", &server.id().to_string()]).status();
        assert!(sent.unwrap().success());
    };
    assert!(opens("old") && !opens("new"));

    fs::write(file, "api-key = \"new\"\nkeep-alive = \"200ms\"\n").unwrap();
    hang_up();
    thread::sleep(Duration::from_millis(500));
    assert!(opens("old") && !opens("new"), "a file with a mistake changes nothing");

    fs::write(file, "api-key = \"new\"\nkeep-alive = \"0.2\"\n").unwrap();
    hang_up();
    let soon = |what: &dyn Fn() -> bool| {
        (0..100).any(|_| {
            what() || {
                thread::sleep(Duration::from_millis(50));
                false
            }
        })
    };
    assert!(soon(&|| opens("new")));
    assert!(!opens("old"));
    assert!(soon(&|| server.ask("GET", "/health", "").contains("\"model\":null")), "its memory is given back, too");
}

#[test]
fn a_model_that_was_typed_is_found_again_after_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let mine = dir.path().join("mine");
    fs::create_dir(&mine).unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moestro-demo");
    for file in fs::read_dir(demo).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), mine.join(file.file_name())).unwrap();
    }
    let prompts = dir.path().to_str().unwrap();
    let server = Process::start(&[mine.to_str().unwrap(), "--memory-limit", "512M", "--prompt-cache-dir", prompts]);
    for model in ["mine", "moestro-demo", "mine"] {
        let body = format!(r#"{{"model": "{model}", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}}"#);
        let answer: serde_json::Value = serde_json::from_str(&server.ask("POST", "/v1/completions", &body)).unwrap();
        assert_eq!(answer["model"], model, "{answer}");
        assert!(answer["choices"][0]["text"].is_string(), "{answer}");
    }
}
