//! Tests of `moestro launch` with scripts in place of the agents.

use crate::{
    process::Process,
    program::{self, MOESTRO, moestro},
};
use serde_json::Value;
use std::{
    fs,
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Installs a script under the agent's name. The script prints its settings and exits with code 7.
fn install(home: &Path, agent: &str) {
    let bin = home.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let script = "#!/bin/sh\n\
        echo \"base $ANTHROPIC_BASE_URL$OPENAI_BASE_URL model $ANTHROPIC_MODEL$OPENAI_MODEL window $CLAUDE_CODE_MAX_CONTEXT_TOKENS\"\n\
        echo \"key $ANTHROPIC_AUTH_TOKEN$OPENAI_API_KEY$MOESTRO_API_KEY removed $ANTHROPIC_API_KEY.\"\n\
        echo \"arguments $*\"\n\
        echo \"copilot $COPILOT_PROVIDER_BASE_URL $COPILOT_MODEL $COPILOT_PROVIDER_API_KEY\"\n\
        echo \"tokens $COPILOT_PROVIDER_MAX_PROMPT_TOKENS $COPILOT_PROVIDER_MAX_OUTPUT_TOKENS\"\n\
        test -n \"$OPENCODE_CONFIG\" && cat \"$OPENCODE_CONFIG\"\n\
        test -n \"$CLEANER\" && \"$CLEANER\" cache --remove logs --yes\n\
        exit 7\n";
    let path = bin.join(agent);
    fs::write(&path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn launch(home: &Path, args: &[&str]) -> Output {
    launch_with(home, &[], args)
}

fn launch_with(home: &Path, variables: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = moestro(home);
    let path = format!("{}:/usr/bin:/bin", home.join("bin").display());
    command.env("PATH", path).env("ANTHROPIC_API_KEY", "mine");
    command.envs(variables.iter().copied());
    command.arg("launch").args(args).stdin(Stdio::null()).output().unwrap()
}

fn free_port() -> String {
    program::free_port().to_string()
}

#[test]
fn agent_runs_with_own_server_and_settings() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    install(home.path(), "claude");
    let output = launch(home.path(), &["claude", "--port", &port, "--", "-p", "hello there"]);
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(7), "the agent's exit code: {text}{log}");
    assert!(text.contains(&format!("base http://127.0.0.1:{port} model moestro-demo window 65536")), "{text}{log}");
    assert!(text.contains("key local removed .\n") && text.contains("arguments -p hello there\n"), "{text}");
    assert!(log.contains("starting a server") && log.contains("claude -p 'hello there'"), "{log}");
    assert!(log.contains("the demo model only tests the connection") && !log.contains("the context has"), "{log}");
    let address = format!("127.0.0.1:{port}");
    assert!(TcpStream::connect(address).is_err(), "the server ends with the agent");
}

#[test]
fn files_are_written_after_consent() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    install(home.path(), "opencode");
    let file = home.path().join(".local/share/moestro/agents/opencode.json");
    let dry = launch(home.path(), &["opencode", "--port", &port, "--dry-run"]);
    let shown = String::from_utf8_lossy(&dry.stdout);
    assert!(dry.status.success() && shown.contains("\"baseURL\": \"http://127.0.0.1:"), "{shown}");
    let asked = launch(home.path(), &["opencode", "--port", &port]);
    assert!(String::from_utf8_lossy(&asked.stderr).contains("Use --yes to confirm"), "{asked:?}");
    assert!(!file.exists());
    let args = ["opencode", "--port", &port, "--yes", "--api-key", "secret"];
    let output = launch_with(home.path(), &[("MOESTRO_CTX_SIZE", "32768")], &args);
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("key secret") && text.contains("\"context\": 32768"), "{text}{log}");
    assert!(log.contains("the context has 32768 tokens; agents need more than 32768"), "{log}");
    assert!(!log.contains("secret"), "{log}");
    assert!(file.exists() && !fs::read_to_string(&file).unwrap().contains("secret"));
}

#[test]
fn missing_agent_or_model_is_an_error() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    let stderr_of = |args: &[&str]| String::from_utf8(launch(home.path(), args).stderr).unwrap();
    let missing = stderr_of(&["aider", "--port", &port]);
    assert!(missing.contains("aider is not installed; install it with `python3 -m pip"), "{missing}");
    install(home.path(), "codex");
    let nowhere = stderr_of(&["codex", "--port", &port, "--model", "/no/model"]);
    assert!(nowhere.contains("the server did not start: no such directory: /no/model"), "{nowhere}");
}

#[test]
fn log_of_running_server_is_kept() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    install(home.path(), "claude");
    let log = home.path().join(".local/state/moestro/launch.log");
    // The agent cleans up while its server is running.
    let variables = [("CLEANER", MOESTRO), ("MOESTRO_LOG", "debug")];
    let output = launch_with(home.path(), &variables, &["claude", "--port", &port]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("a running server writes to it") && stderr.contains("freed 0"), "{stderr}");
    assert!(log.exists());
    let after = moestro(home.path()).args(["cache", "--remove", "logs", "--yes"]).output().unwrap();
    assert!(after.status.success() && !log.exists(), "{after:?}");
}

#[test]
fn copilot_gets_window_of_the_model() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    install(home.path(), "copilot");
    let output = launch(home.path(), &["copilot", "--port", &port, "--", "-p", "Hi"]);
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let settings = format!("copilot http://127.0.0.1:{port}/v1 moestro-demo local\ntokens 49152 16384\n");
    assert!(text.contains(&settings) && text.contains("arguments -p Hi\n"), "{text}{log}");
}

#[test]
fn pi_and_continue_get_a_file() {
    for (agent, program, name) in [("pi", "pi", "pi.js"), ("continue", "cn", "continue.yaml")] {
        let (home, port) = (tempfile::tempdir().unwrap(), free_port());
        install(home.path(), program);
        let output = launch(home.path(), &[agent, "--port", &port, "--yes", "--api-key", "hidden"]);
        let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(7), "{text}{log}");
        let file = home.path().join(".local/share/moestro/agents").join(name);
        let written = fs::read_to_string(&file).unwrap();
        let address = format!("http://127.0.0.1:{port}/v1");
        assert!(written.contains(&address) && written.contains("65536") && !written.contains("hidden"), "{written}");
        assert!(text.contains("key hidden") && text.contains(&*file.to_string_lossy()), "{text}");
    }
}

#[test]
fn dry_run_only_names_missing_agents() {
    let (home, port) = (tempfile::tempdir().unwrap(), free_port());
    for (agent, program, install) in [
        ("claude", "claude", "npm install -g @anthropic-ai/claude-code"),
        ("codex", "codex", "npm install -g @openai/codex"),
        ("copilot", "copilot", "npm install -g @github/copilot"),
        ("pi", "pi", "npm install -g @earendil-works/pi-coding-agent"),
        ("continue", "cn", "npm install -g @continuedev/cli"),
    ] {
        let output = launch(home.path(), &[agent, "--port", &port, "--dry-run", "--", "--flag"]);
        let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{text}{log}");
        assert!(log.contains(&format!("{program} is not installed; install it with `{install}`")), "{log}");
        let server = format!("moestro serve --host 127.0.0.1 --port {port}");
        assert!(text.starts_with(&server), "{text}");
        assert_eq!(text.lines().next().unwrap().ends_with("--reuse-tools"), agent == "codex", "{text}");
        let last = text.lines().next_back().unwrap();
        assert!(last.starts_with(program) && last.ends_with("--flag"), "{text}");
        assert_eq!(text.contains("unset ANTHROPIC_API_KEY"), agent == "claude", "{text}");
    }
    let own = [("MOESTRO_REUSE_TOOLS", "false")];
    let output = launch_with(home.path(), &own, &["codex", "--port", &port, "--dry-run"]);
    assert!(!String::from_utf8_lossy(&output.stdout).contains("--reuse-tools"), "{output:?}");
    assert!(!home.path().join(".local").exists(), "nothing is written");
    assert!(TcpStream::connect(format!("127.0.0.1:{port}")).is_err(), "no server is started");
}

#[test]
fn dry_run_loads_no_model() {
    let server = Process::start(&[]);
    let home = tempfile::tempdir().unwrap();
    let loaded = || serde_json::from_str::<Value>(&server.ask("GET", "/health", "")).unwrap()["model"].clone();
    server.ask("POST", "/models/unload", "{\"model\": \"moestro-demo\"}");
    let begin = Instant::now();
    while !loaded().is_null() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the model is not unloaded");
        thread::sleep(Duration::from_millis(20));
    }
    let output = launch(home.path(), &["pi", "--port", &server.port.to_string(), "--dry-run"]);
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("moestro serve"), "{text}{log}");
    assert!(log.contains("moestro-demo is not loaded, so its context length is not known"), "{text}{log}");
    assert_eq!(loaded(), Value::Null);
}
