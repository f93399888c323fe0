//! Tests SIGHUP: the server reloads its configuration while it runs.

#![cfg(unix)]

use crate::process::{self, Process};
use serde_json::Value;
use std::{fs, path::Path, thread, time::Duration};
use test_support::{
    DEMO,
    files::{copy_dir, copy_files},
};

/// Copies the demo model to a new directory.
fn copy_demo(to: &Path) {
    copy_dir(DEMO, to);
}

#[test]
fn hangup_reloads_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("moestro.toml");
    fs::write(&file, "api-key = \"old\"\nmemory-limit = \"512M\"\n").unwrap();
    let logs = dir.path().join("logs");
    let [file, prompts, log_dir] = [&file, dir.path(), &logs].map(|path| path.to_str().unwrap());
    let server = Process::start(&["--config", file, "--prompt-cache-dir", prompts, "--log-dir", log_dir]);
    let accepts = |key: &str| server.ask("GET", &format!("/v1/models?key={key}"), "").contains("moestro-demo");
    assert!(accepts("old") && !accepts("new"));

    fs::write(file, "api-key = \"new\"\nkeep-alive = \"200ms\"\n").unwrap();
    let line = process::reload(server.id(), &logs);
    assert!(line.contains("cannot reload the configuration"), "{line}");
    assert!(accepts("old") && !accepts("new"), "an invalid file changes nothing");

    fs::write(file, "api-key = \"new\"\nkeep-alive = \"0.2\"\n").unwrap();
    let line = process::reload(server.id(), &logs);
    assert!(line.contains("reloaded the configuration"), "{line}");
    assert!(accepts("new") && !accepts("old"));
    let is_unloaded = |_| {
        thread::sleep(Duration::from_millis(50));
        server.ask("GET", "/health", "").contains("\"model\":null")
    };
    assert!((0..1200).any(is_unloaded), "the new keep-alive unloads the model");
}

#[test]
fn model_directory_is_found_after_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let mine = dir.path().join("mine");
    copy_demo(&mine);
    let prompts = dir.path().to_str().unwrap();
    let server = Process::start(&[mine.to_str().unwrap(), "--memory-limit", "512M", "--prompt-cache-dir", prompts]);
    for model in ["mine", "moestro-demo", "mine"] {
        let body = format!(r#"{{"model": "{model}", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}}"#);
        let answer: Value = serde_json::from_str(&server.ask("POST", "/v1/completions", &body)).unwrap();
        assert_eq!(answer["model"], model, "{answer}");
        assert!(answer["choices"][0]["text"].is_string(), "{answer}");
    }
}

/// An editor may have written only a part of the file when the server reads it.
#[test]
fn half_written_file_is_not_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let [file, models, prompts, logs] = ["moestro.toml", "models", "prompts", "logs"].map(|name| dir.path().join(name));
    copy_demo(&models.join("mine"));
    let lines = [
        "# settings",
        "memory-limit = \"512M\"",
        "api-key = \"old\"",
        "allowed-host = \"host.example\"",
        &format!("models-dir = {:?}", models.to_str().unwrap()),
        "keep-alive = \"600\"",
        "max-tokens = 2",
    ];
    fs::write(&file, lines.join("\n")).unwrap();
    let [config, prompts, log_dir] = [&file, &prompts, &logs].map(|path| path.to_str().unwrap());
    let server = Process::start(&["--config", config, "--prompt-cache-dir", prompts, "--log-dir", log_dir]);
    let reload = |text: &str| {
        fs::write(&file, text).unwrap();
        process::reload(server.id(), &logs)
    };
    // Each text is the beginning of the file, or lacks a line.
    let without = |name: &str| lines.into_iter().filter(|line| !line.starts_with(name)).collect::<Vec<_>>().join("\n");
    let refused = [
        (String::new(), "the file is empty"),
        (lines[0].to_owned(), "the file is empty"),
        (lines[..2].join("\n"), "no longer has api-key"),
        (lines[..3].join("\n"), "no longer has models-dir"),
        (lines[..4].join("\n"), "no longer has models-dir"),
        (lines.join("\n")[..lines[..4].join("\n").len() + 20].to_owned(), "TOML"),
        (without("api-key"), "no longer has api-key"),
        (without("models-dir"), "no longer has models-dir"),
        (without("allowed-host"), "no longer has allowed-host"),
    ];
    for (text, why) in refused {
        let last = reload(&text);
        assert!(last.contains("cannot reload the configuration") && (why == "TOML" || last.contains(why)), "{last}");
        let list = server.ask("GET", "/v1/models?key=old", "");
        assert!(list.contains("mine") && list.contains("moestro-demo"), "{text}: {list}");
        assert!(!server.ask("GET", "/v1/models", "").contains("moestro-demo"), "{text}");
    }
    fs::remove_file(&file).unwrap();
    let last = process::reload(server.id(), &logs);
    assert!(last.contains("cannot reload the configuration"), "{last}");
    // The models of the old configuration are loaded with its settings.
    for model in ["mine", "moestro-demo"] {
        let body = format!(r#"{{"model": "{model}", "messages": [{{"role": "user", "content": "One, two,"}}]}}"#);
        let answer: Value = serde_json::from_str(&server.ask("POST", "/v1/chat/completions?key=old", &body)).unwrap();
        assert_eq!((&answer["model"], &answer["usage"]["completion_tokens"]), (&model.into(), &2.into()), "{answer}");
    }
    reload(&lines.join("\n").replace("old", "new"));
    assert!(server.ask("GET", "/v1/models?key=new", "").contains("mine"));
}

#[test]
fn unusable_checkpoint_keeps_the_loaded_model() {
    // In the build directory, because the directory for temporary files may be small.
    let mut dir = tempfile::Builder::new();
    let dir = dir.prefix("Bob, O'Neil (\u{fc}): ").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["tensors", "shard", "tokens", "memory"] {
        copy_demo(&path("models").join(name));
    }
    let edit = |file: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let file = path("models").join(file);
        let mut content = fs::read(&file).unwrap();
        edit(&mut content);
        fs::write(&file, content).unwrap();
    };
    let edit_config = |content: &mut Vec<u8>| {
        let mut config: Value = serde_json::from_slice(content).unwrap();
        let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
        text["hidden_size"] = 96.into();
        *content = serde_json::to_vec(&config).unwrap();
    };
    edit("tensors/config.json", &edit_config);
    edit("shard/model.safetensors", &|content| content.truncate(content.len() / 2));
    edit("tokens/tokenizer.json", &|content| content.truncate(content.len() / 2));
    fs::write(path("moestro.toml"), "memory-limit = \"512M\"\n[models.memory]\nmemory-limit = \"1M\"\n").unwrap();
    let [file, models] = [path("moestro.toml"), path("models")].map(|path| path.display().to_string());
    let server = Process::start(&["--config", &file, "--models-dir", &models]);
    let ask = |model: &str| -> Value {
        let body = format!(r#"{{"model": "{model}", "prompt": "One, two,", "max_tokens": 4}}"#);
        serde_json::from_str(&server.ask("POST", "/v1/completions", &body)).unwrap()
    };
    for model in ["tensors", "shard", "tokens", "memory"] {
        let refused = ask(model);
        assert_eq!(refused["error"]["code"], "model_not_loaded", "{model}: {refused}");
        assert!(!refused.to_string().contains("Neil"), "{model}: {refused}");
        let health: Value = serde_json::from_str(&server.ask("GET", "/health", "")).unwrap();
        assert_eq!(health["model"], "moestro-demo", "{model}: {refused}");
    }
    assert!(ask("moestro-demo")["choices"][0]["text"].is_string());
}

#[test]
fn draft_is_used_with_its_model_only() {
    let dir = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mine, other) = (dir.path().join("mine"), dir.path().join("other"));
    copy_demo(&mine);
    copy_demo(&other);
    // Copy a model with another architecture and the same tokenizer.
    copy_files(root.join("tests/fixtures/drafts/model"), &other, &["config.json", "model.safetensors"]);
    let _ = fs::remove_file(other.join("model.safetensors.index.json"));
    let (draft, path) = (root.join("models/demo/moestro-demo-dflash"), |path: &Path| path.display().to_string());
    let server = Process::start(&[
        &path(&mine),
        "--models-dir",
        &path(dir.path()),
        "--draft-model",
        &path(&draft),
        "--speculation",
        "force",
    ]);
    for (model, drafts) in [("mine", true), ("other", false), ("mine", true)] {
        let drafted = || {
            let text = server.ask("GET", "/metrics", "");
            let cycles =
                text.lines().find_map(|line| line.strip_prefix("moestro_draft_cycles_total{kind=\"dflash\"} "));
            cycles.map_or(0, |cycles| cycles.parse::<u64>().unwrap())
        };
        let before = drafted();
        let body = format!(r#"{{"model": "{model}", "prompt": "One, two,", "max_tokens": 9, "temperature": 0}}"#);
        let answer: Value = serde_json::from_str(&server.ask("POST", "/v1/completions", &body)).unwrap();
        assert_eq!(answer["model"], model, "{answer}");
        assert!(answer["choices"][0]["text"].is_string(), "{answer}");
        assert_eq!(drafted() > before, drafts, "{model}");
    }
}
