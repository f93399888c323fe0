//! `moestro pull` as a user runs it, against a hub of our own that `HF_ENDPOINT` names.

#![cfg(feature = "hub")]

#[path = "support/hub.rs"]
mod server;

use moestro::demo;
use server::{COMMIT, TestHub};
use std::{
    path::Path,
    process::{Command, Output},
};

fn moestro(args: &[&str], endpoint: &str, home: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moestro"))
        .args(args)
        .env_clear()
        .env("HOME", home)
        .env("HF_HOME", home.join("hf"))
        .env("HF_ENDPOINT", endpoint)
        .env("HF_TOKEN", "key")
        .output()
        .unwrap()
}

#[test]
fn the_demo_by_way_of_a_hub() {
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    let files: Vec<_> = names.iter().map(|&name| (name, demo::file(name).unwrap().to_vec())).collect();
    let hub = TestHub::new(&files);
    hub.change(|shelf| {
        shelf.breaks = vec![("model.safetensors".into(), 5_000_000)];
        shelf.token = Some("key".into());
    });
    let home = tempfile::tempdir().unwrap();

    let pulled = moestro(&["pull", "org/name"], &hub.endpoint, home.path());
    let (said, dir) = (String::from_utf8_lossy(&pulled.stderr), String::from_utf8_lossy(&pulled.stdout));
    assert!(pulled.status.success(), "{said}");
    assert_eq!(Path::new(dir.trim()), home.path().join("hf/hub/models--org--name/snapshots").join(COMMIT));
    assert_eq!(hub.starts("model.safetensors"), [0, 5_000_000], "it went on where the connection broke");
    for (name, bytes) in &files {
        assert_eq!(&std::fs::read(Path::new(dir.trim()).join(name)).unwrap(), bytes);
    }

    // From here on nobody answers.
    let nobody = "http://127.0.0.1:1";
    let again = moestro(&["pull", "org/name"], nobody, home.path());
    assert!(again.status.success() && again.stdout == pulled.stdout);
    assert!(String::from_utf8_lossy(&again.stderr).contains("the hub could not be asked"));
    let info = moestro(&["info", "org/name", "--json"], nobody, home.path());
    let report: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!((&report["model"], &report["plan"]["strategy"]), (&"org/name".into(), &"resident".into()));
    let other = moestro(&["serve", "org/other"], &hub.endpoint, home.path());
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.contains("org/other: the hub has no such model"), "{said}");
}
