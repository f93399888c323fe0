//! Tests of what a new user sees: names, settings, the demo, services, and files on the disk.

use crate::program;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};
use test_support::{DEMO, files::copy_dir};

/// Runs the program with variables, `NAME=VALUE`.
fn moestro(home: &Path, variables: &[&str], args: &[&str]) -> Output {
    let mut command = program::moestro(home);
    command.envs(variables.iter().map(|variable| variable.split_once('=').unwrap()));
    command.args(args).output().unwrap()
}

/// All that the program prints.
fn output_of(home: &Path, variables: &[&str], args: &[&str]) -> String {
    let output = moestro(home, variables, args);
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Copies the demo to the user's model directory.
fn copy_demo(home: &Path, name: &str) -> PathBuf {
    let dir = home.join(".local/share/moestro/models").join(name);
    copy_dir(DEMO, &dir);
    dir
}

fn write_settings(home: &Path, text: &str) {
    fs::create_dir_all(home.join(".config/moestro")).unwrap();
    fs::write(home.join(".config/moestro/moestro.toml"), text).unwrap();
}

#[test]
fn wrong_value_names_file_or_variable() {
    let home = tempfile::tempdir().unwrap();
    write_settings(
        home.path(),
        "temp = 0.5\nmax-queue = \"x\"\n\n[models.coder]\npath = \"org/name\"\nctx-size = \"many\"\n",
    );
    let text = output_of(home.path(), &[], &["config"]);
    assert!(text.contains("moestro.toml, line 2: invalid value 'x' for max-queue: it must"), "{text}");
    let text = output_of(home.path(), &["MOESTRO_MAX_QUEUE=1"], &["config", "coder"]);
    assert!(text.contains("moestro.toml, line 6: invalid value 'many' for ctx-size"), "{text}");
    let text = output_of(home.path(), &["MOESTRO_MAX_QUEUE=y"], &["config"]);
    assert!(text.contains("invalid value 'y' for the environment variable MOESTRO_MAX_QUEUE: it must"), "{text}");
    let sound = tempfile::tempdir().unwrap();
    write_settings(sound.path(), "port = 80\n");
    let text = output_of(sound.path(), &["MOESTRO_THREADS="], &["config", "-c", "4096"]);
    assert!(text.contains("invalid value '' for the environment variable MOESTRO_THREADS: it must"), "{text}");
    let text = output_of(sound.path(), &[], &["config", "--port", "z"]);
    assert!(text.contains("invalid value 'z' for '--port <PORT>'"), "{text}");
}

#[test]
fn misspelt_variable_is_a_warning() {
    let home = tempfile::tempdir().unwrap();
    let output = moestro(home.path(), &["MOESTRO_CTX_SIZ=9", "MOESTRO_SANITIZE=1"], &["list"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("(did you mean MOESTRO_CTX_SIZE?)"), "{text}");
    assert!(!text.contains("SANITIZE"), "{text}");
}

#[test]
fn model_has_one_name() {
    let home = tempfile::tempdir().unwrap();
    copy_demo(home.path(), "lab/S");
    write_settings(home.path(), "[models.coder]\npath = \"lab/S\"\n");
    let list = output_of(home.path(), &[], &["list"]);
    assert!(list.contains("\ncoder ") && list.contains("\nlab/S "), "{list}");
    for name in ["lab/S", "coder"] {
        let report: serde_json::Value =
            serde_json::from_slice(&moestro(home.path(), &[], &["info", name, "--json"]).stdout).unwrap();
        assert_eq!(report["model"], name);
    }
    let text = output_of(home.path(), &["MOESTRO_LOG=info"], &["generate", "lab/S", "-p", "hi", "--max-tokens", "1"]);
    assert!(text.contains("memory plan of lab/S:"), "{text}");
}

#[test]
fn demo_says_that_it_is_a_toy() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["run", "moestro-demo", "hello"][..], &["run", "-p", "hello"]] {
        let text = output_of(home.path(), &[], args);
        assert!(text.contains("a 9 MB toy") && text.contains("moestro run mlx-community/Qwen3.5-4B"), "{text}");
    }
    copy_demo(home.path(), "other");
    assert!(!output_of(home.path(), &[], &["run", "other", "hello"]).contains("toy"));
}

#[test]
fn info_without_model_ranks_models() {
    let home = tempfile::tempdir().unwrap();
    let text = output_of(home.path(), &[], &["info"]);
    assert!(text.contains("Qwen3.5-4B") && text.contains("397B") && text.contains("simulated"), "{text}");
    let text = output_of(home.path(), &[], &["info", "--like", "35b"]);
    assert!(text.contains("35B-A3B") && !text.contains("122B"), "{text}");
    let text = output_of(home.path(), &[], &["info", "moestro-demo"]);
    assert!(text.contains("moestro-demo"), "{text}");
}

#[test]
fn packs_are_shown_and_removed() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    copy_demo(home.path(), "lab/S");
    let packs = home.path().join(".cache/moestro/packs");
    let count = || fs::read_dir(&packs).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count();
    let pack = || assert!(moestro(home.path(), &[], &["pack", "lab/S"]).status.success());
    pack();
    let text = output_of(home.path(), &[], &["cache"]);
    assert!(text.lines().any(|line| line.starts_with("packs ") && line.contains(" lab/S ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("models ") && line.contains(" lab/S ")), "{text}");
    let text = output_of(home.path(), &[], &["cache", "--remove", "packs"]);
    assert!(text.contains("Use --yes to confirm"), "{text}");
    let before = count();
    let text = output_of(home.path(), &[], &["cache", "--remove", "packs,logs", "--yes"]);
    assert!(text.contains("freed ") && count() == before - 1, "{text}");
    pack();
    let text = output_of(home.path(), &[], &["rm", "--yes", "lab/S"]);
    assert!(text.contains("deleted lab/S; its pack (") && text.contains("moestro cache --remove packs"), "{text}");
    assert_eq!(count(), before);
    let text = output_of(home.path(), &[], &["cache"]);
    assert!(text.contains("no model on this machine"), "{text}");
    copy_demo(home.path(), "lab/S");
    let text = output_of(home.path(), &[], &["rm", "--yes", "--all", "lab/S"]);
    assert!(text.contains("deleted lab/S and its pack (") && count() == before - 1, "{text}");
}

#[test]
fn linked_and_partial_files_are_shown() {
    use std::os::unix::fs::symlink;

    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let elsewhere = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = copy_demo(home.path(), "lab/S");
    let moved = elsewhere.path().join("S");
    fs::rename(&model, &moved).unwrap();
    symlink(&moved, &model).unwrap();
    let cache = home.path().join(".cache/moestro");
    let fill = |dir: PathBuf| {
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("file"), vec![1; 100_000]).unwrap();
    };
    let target = elsewhere.path().join("kernels");
    fill(target.clone());
    fs::create_dir_all(&cache).unwrap();
    symlink(&target, cache.join("cuda")).unwrap();
    fill(cache.join("packs/.12-34.partial"));
    let pack = elsewhere.path().join("pack");
    let out = pack.to_str().unwrap();
    assert!(moestro(home.path(), &[], &["pack", "lab/S", "--out", out]).status.success());

    let text = output_of(home.path(), &[], &["cache"]);
    let row =
        |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"));
    assert!(row("models ").contains("lab/S (a link to "), "{text}");
    assert!(row("kernels ").contains("the GPU (a link to ") && row("kernels ").contains(" KiB "), "{text}");
    let packs: Vec<&str> = text.lines().filter(|line| line.starts_with("packs ")).collect();
    assert!(packs.iter().any(|line| line.contains("an interrupted `moestro pack` (not complete)")), "{text}");
    assert!(packs.iter().any(|line| line.contains("lab/S (a link to ")), "{text}");

    let text = output_of(home.path(), &[], &["cache", "--remove", "packs,kernels", "--yes"]);
    assert!(text.contains("freed ") && text.contains(" KiB"), "{text}");
    let count = |dir: &Path| fs::read_dir(dir).unwrap().count();
    assert_eq!((count(&target), cache.join("cuda").is_symlink()), (0, true));
    assert!(pack.join("pack.json").exists() || count(&pack) > 0, "only the link to a pack elsewhere is removed");
    assert!(!cache.join("packs/.12-34.partial").exists());
    let text = output_of(home.path(), &[], &["cache"]);
    assert!(!text.contains("packs "), "{text}");
}

/// A `systemctl` that does what `script` says, and no other program.
#[cfg(target_os = "linux")]
fn fake_systemctl(home: &Path, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt;

    let bin = home.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let program = bin.join("systemctl");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    format!("PATH={}", bin.display())
}

#[cfg(target_os = "linux")]
#[test]
fn failed_service_install_leaves_no_file() {
    let home = tempfile::tempdir().unwrap();
    let units = home.path().join(".config/systemd/user");
    let is_clean = || fs::read_dir(&units).map_or(0, Iterator::count) == 0;
    let path = fake_systemctl(home.path(), "echo 'Failed to connect to bus' >&2; exit 1");
    let install = ["service", "install", "--", "org/name"];
    let text = output_of(home.path(), &[&path], &install);
    assert!(text.contains("loginctl enable-linger") && text.contains("XDG_RUNTIME_DIR=/run/user/"), "{text}");
    assert!(is_clean(), "{text}");
    let path = fake_systemctl(home.path(), "[ \"$2\" = show-environment ] || exit 1");
    let text = output_of(home.path(), &[&path], &install);
    assert!(text.contains("`systemctl --user daemon-reload` failed") && is_clean(), "{text}");
    // Files of an earlier installation can be removed without a session.
    fs::create_dir_all(&units).unwrap();
    fs::write(units.join("moestro.service"), "").unwrap();
    let path = fake_systemctl(home.path(), "exit 1");
    let text = output_of(home.path(), &[&path], &["service", "uninstall"]);
    assert!(is_clean() && text.is_empty(), "{text}");
}

#[test]
fn wrong_arguments_of_a_service_are_refused() {
    let home = tempfile::tempdir().unwrap();
    for (args, reason) in [
        (&["--ctx-sze", "5"][..], "unexpected argument '--ctx-sze'"),
        (&["--port", "x"], "invalid value 'x' for '--port <PORT>'"),
        (&["org/name", "other"], "unexpected argument 'other'"),
        (&["--lora", "x"], "adapters are not supported"),
        (&["--api-key", "a", "--api-key-file", "b"], "cannot be used with"),
    ] {
        let output = moestro(home.path(), &[], &[&["service", "install", "--dry-run", "--"], args].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains("moestro serve would not start: ") && text.contains(reason), "{text}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    let text = output_of(home.path(), &[], &["service", "install", "--dry-run", "--", "org/name", "-ngl", "99"]);
    assert!(text.contains("\"org/name\" \"-ngl\" \"99\""), "{text}");
    // The service manager or the server opens the port.
    let address = ["service", "install", "--dry-run", "--port", "9", "--host", "::1"];
    let text = output_of(home.path(), &[], &address);
    assert!(text.contains(" serve \"--host=::1\" \"--port=9\""), "{text}");
    let text = output_of(home.path(), &[], &[&address[..], &["--on-demand"]].concat());
    assert!(text.contains("[::1]:9") && !text.contains("--port=9"), "{text}");
}
