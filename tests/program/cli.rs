//! Tests of the binary from the outside: error messages, the ready line, signals, and the commands on local models.

use crate::{
    process::{self, Process},
    program::{self, signal},
};
use moestro::demo;
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};
use test_support::{
    DEMO,
    fifo::make_fifo,
    files::{copy_dir, copy_files},
};

/// A command that runs `moestro` on the CPU with a separate cache and without settings from the environment.
fn moestro(cache: &Path) -> Command {
    let mut command = program::moestro(cache);
    command.env("XDG_CACHE_HOME", cache);
    command
}

fn run(args: &[&str]) -> Output {
    moestro(tempfile::tempdir().unwrap().path()).args(args).output().unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Runs a command with a text on its stdin.
fn run_with_stdin(args: &[&str], text: &str) -> Output {
    let cache = tempfile::tempdir().unwrap();
    let mut command = moestro(cache.path());
    let command = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn prompt_is_read_from_a_pipe() {
    for (args, thinks) in [
        (&["run", "--temp", "0"][..], true),
        (&["run", "-p", "-", "--temp", "0", "--thinking", "off"], false),
        (&["generate", "--temp", "0", "--thinking", "off"], false),
    ] {
        let output = run_with_stdin(args, "What is 12+7?\n");
        let text = stderr(&output);
        assert!(output.status.success(), "{args:?}: {text}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "12 + 7 = 19.\n", "{args:?}");
        let is_about = |line: &str| line.starts_with("prompt ") || line == demo::ABOUT;
        let reasoning = text.lines().filter(|line| !line.is_empty() && !is_about(line)).count();
        assert_eq!(reasoning > 0, thinks, "{args:?}: {text}");
        let is_timings = |line: &&str| line.starts_with("prompt ") && line.contains("; answer ");
        assert_eq!(text.lines().filter(is_timings).count(), 1, "{args:?}: {text}");
        // Here, stderr is not a terminal.
        assert!(!text.contains('\x1b'), "{text}");
    }
    assert_eq!(run_with_stdin(&["run"], "").status.code(), Some(2), "the prompt is empty");
}

#[test]
fn models_are_listed_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let mine = home.path().join("org/mine");
    let copy_demo = |to: &Path| copy_files(DEMO, to, &["config.json", "model.safetensors"]);
    copy_demo(&mine);
    let cache = tempfile::tempdir().unwrap();
    let with = |args: &[&str]| {
        let mut command = moestro(cache.path());
        command.env("MOESTRO_MODELS_DIR", home.path()).env("HF_HUB_CACHE", cache.path()).args(args).output().unwrap()
    };
    let list = || {
        let list: Value = serde_json::from_slice(&with(&["list", "--json"]).stdout).unwrap();
        let ids = list["models"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(list(), ["org/mine", "moestro-demo"]);
    let table = with(&["ls"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("in the program"));
    let misspelt = with(&["rm", "org/mien"]);
    assert!(stderr(&misspelt).contains("did you mean org/mine?"), "{}", stderr(&misspelt));
    assert_eq!(with(&["rm", "org/mine"]).status.code(), Some(2), "without a terminal it needs --yes");
    let mut forced = moestro(cache.path());
    forced.env("MOESTRO_YES", "true").env("MOESTRO_MODELS_DIR", home.path()).env("HF_HUB_CACHE", cache.path());
    assert_eq!(forced.args(["rm", "org/mine"]).output().unwrap().status.code(), Some(2), "a variable does not confirm");
    assert!(mine.exists());
    assert!(with(&["rm", "org/mine", "--yes"]).status.success());
    assert!(!mine.exists());
    assert_eq!(list(), ["moestro-demo"]);
    assert!(stderr(&with(&["rm", "moestro-demo", "-y"])).contains("part of the program"));

    // A link in the model directory does not allow deleting a directory outside the model directory.
    let elsewhere = tempfile::tempdir().unwrap();
    let other = elsewhere.path().join("other");
    copy_demo(&other);
    std::fs::remove_dir(home.path().join("org")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), home.path().join("org")).unwrap();
    assert_eq!(list(), ["org/other", "moestro-demo"]);
    let refused = with(&["rm", "org/other", "--yes"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("leads outside of the model directory"), "{}", stderr(&refused));
    assert!(other.join("config.json").exists());
}

#[test]
fn running_server_shows_and_unloads_its_model() {
    let server = Process::start(&[]);
    let port = server.port.to_string();
    let ps = run(&["ps", "--port", &port]);
    let shown = String::from_utf8_lossy(&ps.stdout).into_owned();
    assert!(shown.starts_with("NAME ") && shown.contains("\nmoestro-demo  "), "{shown}");
    let health: Value = serde_json::from_str(&server.ask("GET", "/health", "")).unwrap();
    let (used, reserved) = (health["memory"]["used"].as_u64().unwrap(), health["memory"]["reserved"].as_u64().unwrap());
    assert!(used > 1 << 20 && used < reserved, "{used} {reserved}");
    assert_eq!(health["plan"]["reserved"], reserved);
    assert!(
        stderr(&run(&["stop", "other", "--port", &port]))
            .contains("`other` is not loaded. `moestro-demo` is in memory.")
    );
    assert!(run(&["stop", "--port", &port]).status.success(), "the loaded model needs no name");
    let gone = || String::from_utf8_lossy(&run(&["ps", "--port", &port]).stdout).contains("no model is in memory");
    assert!((0..1200).any(|_| gone() || {
        std::thread::sleep(Duration::from_millis(50));
        false
    }));
    drop(server);
    let ps = run(&["ps", "--port", &port]);
    assert!(!ps.status.success() && stderr(&ps).contains("`moestro serve` starts one"), "{ps:?}");
}

#[test]
fn pipe_as_checkpoint_file_is_refused() {
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        make_fifo(&path);
        let output = run(&["generate", dir.path().to_str().unwrap(), "-p", "Hi"]);
        let text = stderr(&output);
        assert!(text.contains(name) && text.contains("not a regular file"), "{text}");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let output = run(&["generate", dir.path().to_str().unwrap(), "-p", "Hi"]);
        assert!(stderr(&output).contains("not a regular file"), "{}", stderr(&output));
    }
}

#[test]
fn doctor_finds_no_fault() {
    let output = run(&["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    assert!(
        text.starts_with("moestro ") && text.contains("12 + 7 = 19.") && text.contains("everything agrees"),
        "{text}"
    );
    assert!(text.contains("scalar"), "{text}");
    let report: Value = serde_json::from_slice(&run(&["doctor", "--json"]).stdout).unwrap();
    assert_eq!(report["wrong"], json!([]));
    // The report has either the comparison of the kernels or the reason why there is no comparison.
    let absent = report["gpu"]["absent"].as_str();
    assert!(report["gpu"]["kernels"].is_array() != absent.is_some(), "{report}");
    assert!(absent.is_none_or(|why| text.contains(&format!("no GPU: {why}"))), "{text}");
    assert_eq!(text.ends_with("everything agrees; there was no GPU to compare\n"), absent.is_some(), "{text}");
    assert!(report["processor"].as_array().is_some_and(|all| all.iter().all(|one| one["agrees"] == true)));
    let answers = report["answers"].as_array().unwrap();
    // The CPU answers twice, then the GPU if there is one, then the reference.
    let reference = if absent.is_some() { 2 } else { 3 };
    assert_eq!(answers[0]["device"], "cpu, plain f32");
    assert_eq!(answers[reference]["device"], "reference, Candle's cpu");
    assert!(answers.iter().all(|answer| answer["ids"] == answers[0]["ids"]), "{report}");
}

#[test]
fn named_memory_limit_is_sufficient() {
    // The memory of the process differs between starts, so the test starts several servers.
    for _ in 0..10 {
        // These are the arguments of `Process::start`.
        let started = "serve --port 0 --device cpu --threads 2 --prompt-cache-dir off --memory-limit 1M";
        let refused = run(&started.split(' ').collect::<Vec<_>>());
        let text = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{text}");
        let limit = text.split_once("; use --memory-limit ").and_then(|(_, rest)| rest.split_once(" or more"));
        let (limit, _) = limit.unwrap_or_else(|| panic!("no limit in {text}"));
        Process::start(&["--memory-limit", limit]);
    }
}

/// Returns the head and the body of the answer.
fn exchange(server: &Process, line: &str, headers: &str, body: &str) -> String {
    process::exchange(server.port, line, headers, body)
}

fn chat(question: &str, stream: bool) -> String {
    json!({ "messages": [{ "role": "user", "content": question }], "stream": stream }).to_string()
}

#[test]
fn server_prints_ready_line_and_answers() {
    let mut server = Process::start(&[]);
    assert_eq!(server.ready["event"], "ready");
    assert_eq!(server.ready["model"], "moestro-demo");
    assert_eq!(server.ready["device"], "cpu");
    assert!(server.ready["plan"].is_object());
    assert!(exchange(&server, "GET /health", "", "").starts_with("HTTP/1.1 200"));
    assert!(server.ask("GET", "/v1/models", "").contains("moestro-demo"));
    signal("INT", server.id());
    assert_eq!(server.exit_code(), Some(0));
    let mut rest = String::new();
    server.stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "{\"event\":\"exiting\",\"reason\":\"SIGINT\"}\n");
}

#[test]
fn signal_lets_running_answer_end() {
    let mut server = Process::start(&["--temp", "0"]);
    // A short answer, which ends within the engine's grace period on a busy machine, too.
    let question = chat("What is 12 + 7?", true);
    let mut answer = BufReader::new(process::send(server.port, "POST /v1/chat/completions", "", &question));
    let mut text = String::new();
    while !text.contains("data: ") {
        answer.read_line(&mut text).unwrap();
    }
    signal("TERM", server.id());
    answer.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"finish_reason\":\"stop\"") && text.contains("data: [DONE]"), "{text}");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn full_disk_leaves_no_partial_file() {
    let cache = tempfile::tempdir().unwrap();
    let refused = moestro(cache.path()).args(["generate", "-p", "Hi", "--memory-limit", "1M"]).output().unwrap();
    let (_, rest) = stderr(&refused).rsplit_once("--memory-limit ").unwrap();
    let limit = format!("{}M", rest.split_once('M').unwrap().0.parse::<u32>().unwrap() + 1);
    // Limit the size of files to one block, to simulate a full disk. The list of hot experts is larger than one block.
    let shell = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    let mut limited = Command::new("bash");
    limited.args(["-c", shell, program::MOESTRO, "generate", "-p", "Hi", "--memory-limit", &limit]);
    program::isolate(limited.env("XDG_CACHE_HOME", cache.path()), cache.path());
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot save the list of hot experts"), "{}", stderr(&output));
    let hot = std::fs::read_dir(cache.path().join("moestro/hot")).unwrap();
    let left: Vec<_> = hot.map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Serves a copy of the demo with so little memory that every answer reads experts.
fn streaming(dir: &Path) -> Process {
    copy_dir(DEMO, dir);
    let model = dir.to_str().unwrap();
    let refused = run(&["serve", "--port", "0", "--threads", "2", model, "--memory-limit", "1M"]);
    let (_, rest) = stderr(&refused).rsplit_once("--memory-limit ").unwrap();
    let min_limit = rest.split_once('M').unwrap().0;
    let limit = format!("{}M", min_limit.parse::<u32>().unwrap() + 2);
    Process::start(&[model, "--memory-limit", &limit, "--temp", "0", "--thinking", "off"])
}

#[test]
fn truncated_file_fails_requests_until_restored() {
    let dir = tempfile::tempdir().unwrap();
    let server = streaming(dir.path());
    assert_eq!(server.ready["plan"]["strategy"], "streaming", "{}", server.ready);
    let get = |path: &str| exchange(&server, &format!("GET {path}"), "", "");
    let ask = |question: &str, stream| exchange(&server, "POST /v1/chat/completions", "", &chat(question, stream));
    let story = "Tell me a story about Paul and a dragon.";
    let (sum, whole) = (ask("What is 12+7?", false), ask(story, true));
    assert!(sum.contains("12 + 7 = 19."), "{sum}");
    assert!(whole.contains("\"finish_reason\":\"stop\""), "{whole}");

    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.set_len(bytes.len() as u64 / 2).unwrap();
    let answer = ask(story, false);
    assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
    let stream = ask(story, true);
    for failed in [answer, stream] {
        assert!(failed.contains("model.safetensors") && failed.contains("expert"), "{failed}");
        assert!(!failed.contains("\"finish_reason\":\""), "{failed}");
    }
    let health = get("/health");
    assert!(health.starts_with("HTTP/1.1 503") && health.contains("\"status\":\"degraded\""), "{health}");
    assert!(health.contains("\"reason\":") && health.contains("model.safetensors"), "{health}");
    assert!(server.metric("moestro_ssd_errors_total") >= 2);

    (&file).write_all(&bytes).unwrap();
    file.set_modified(modified).unwrap();
    let restored = ask("What is 12+7?", false);
    assert!(restored.contains("12 + 7 = 19."), "{restored}");
    assert!(get("/health").starts_with("HTTP/1.1 200"));
    let text = |answer: &str| answer.lines().filter(|line| line.contains("delta")).map(content).collect::<String>();
    assert_eq!(text(&ask(story, true)), text(&whole), "no data of the damaged file is used");
}

/// The content in one line of a stream.
fn content(line: &str) -> String {
    let event: Value = serde_json::from_str(line.trim_start_matches("data: ")).unwrap();
    event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn flags_are_defaults_of_requests() {
    let server = Process::start(&["--thinking", "off", "--temp", "0", "--api-key", "secret"]);
    let question = chat("What is 12+7?", false);
    assert!(exchange(&server, "POST /v1/chat/completions", "", &question).starts_with("HTTP/1.1 401"));
    let answer = exchange(&server, "POST /v1/chat/completions", "Authorization: Bearer secret\r\n", &question);
    assert!(answer.contains("12 + 7 = 19."), "{answer}");
    assert!(!answer.contains("\"reasoning_content\":\""), "{answer}");
}

#[test]
fn dead_stderr_does_not_end_requests() {
    let (reader, writer) = std::io::pipe().unwrap();
    let args = ["--temp", "0", "--thinking", "off"];
    let server = Process::spawn_with(Command::new(program::MOESTRO), &args, writer.into());
    drop(reader);
    for _ in 0..3 {
        let answer = server.ask("POST", "/v1/chat/completions", &chat("What is 12+7?", false));
        assert!(answer.contains("12 + 7 = 19."), "{answer}");
    }
}
