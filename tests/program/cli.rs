//! Tests of the binary from the outside: error messages, the ready line, signals, and the commands on local models.

use crate::{
    process,
    program::{self, signal},
};
use moestro::demo;
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, ChildStdout, Command, Output, Stdio},
    time::{Duration, Instant},
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

#[test]
fn errors_are_one_line() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let empty = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["serve", "--port", &port], "is in use"),
        (&["serve", "--port", "0", "/no/such/directory"], "no such directory: /no/such/directory"),
        (&["generate", "/no/such/directory", "-p", "Hi"], "no such directory: /no/such/directory"),
        (&["serve", "--port", "0", program::MOESTRO], "not a checkpoint: it is a file"),
        (&["serve", "--port", "0", empty.path().to_str().unwrap()], "not a checkpoint: it has no config.json"),
    ];
    for (args, words) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let text = stderr(&output);
        assert!(text.starts_with("moestro: ") && text.contains(words), "{args:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
        assert!(output.stdout.is_empty() || args[0] == "serve", "{args:?}");
    }
}

#[test]
fn usage_errors_exit_with_2() {
    for args in [&["serve", "--top-p", "2"][..], &["serve", "--no-such-flag"], &[], &["generate"], &["dance"]] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn generate_prints_one_answer() {
    let output = run(&["generate", "-p", "What is 12+7?", "--temp", "0", "--thinking", "off"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "12 + 7 = 19.\n");
    // In this test stderr is not a terminal, so it contains no reasoning and one line of timings.
    let text = stderr(&output);
    assert_eq!(
        text.lines().filter(|line| line.starts_with("prompt ") && line.contains("; answer ")).count(),
        1,
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
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
    let server = Server::start(&[]);
    let port = server.ready["port"].to_string();
    let ps = run(&["ps", "--port", &port]);
    let shown = String::from_utf8_lossy(&ps.stdout).into_owned();
    assert!(shown.starts_with("NAME ") && shown.contains("\nmoestro-demo  "), "{shown}");
    let health = server.ask("GET /health", "", "");
    let health: Value = serde_json::from_str(health.split_once("\r\n\r\n").unwrap().1).unwrap();
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
fn demo_needs_no_cache() {
    for cache in [Some("/dev/null/cache"), None] {
        let temporary = tempfile::tempdir().unwrap();
        let mut command = moestro(Path::new(cache.unwrap_or("/")));
        command.env("HOME", temporary.path());
        if cache.is_none() {
            command.env_remove("XDG_CACHE_HOME").env_remove("HOME");
        }
        let args = ["generate", "-p", "What is 12+7?", "--temp", "0", "--thinking", "off"];
        let output = command.args(args).env("TMPDIR", temporary.path()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "12 + 7 = 19.\n", "{}", stderr(&output));
    }
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
        let refused = run(&["serve", "--port", "0", "--device", "cpu", "--memory-limit", "1M"]);
        let text = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{text}");
        let limit = text.split_once("; use --memory-limit ").and_then(|(_, rest)| rest.split_once(" or more"));
        let (limit, _) = limit.unwrap_or_else(|| panic!("no limit in {text}"));
        Server::start(&["--device", "cpu", "--memory-limit", limit]);
    }
}

/// A running server. Dropping this value kills the server.
struct Server {
    child: Child,
    stdout: BufReader<ChildStdout>,
    ready: Value,
    _cache: tempfile::TempDir,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, Stdio::null())
    }

    fn start_with(args: &[&str], stderr: Stdio) -> Self {
        let cache = tempfile::tempdir().unwrap();
        let mut command = moestro(cache.path());
        command.args(["serve", "--port", "0"]).args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        Self { child, stdout, ready: serde_json::from_str(&line).unwrap(), _cache: cache }
    }

    /// Sends a request and returns the connection, which the server closes after the answer.
    fn send(&self, line: &str, headers: &str, body: &str) -> TcpStream {
        process::send(self.ready["port"].as_u64().unwrap().try_into().unwrap(), line, headers, body)
    }

    /// Returns the head and the body of the answer.
    fn ask(&self, line: &str, headers: &str, body: &str) -> String {
        let mut text = String::new();
        self.send(line, headers, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        if head.contains("transfer-encoding: chunked") {
            format!("{head}\r\n\r\n{}", joined_chunks(body))
        } else {
            text
        }
    }

    /// Waits until the server has exited and returns its exit code.
    fn exit_code(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "still running");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn chat(question: &str, stream: bool) -> String {
    json!({ "messages": [{ "role": "user", "content": question }], "stream": stream }).to_string()
}

#[test]
fn server_prints_ready_line_and_answers() {
    let mut server = Server::start(&[]);
    assert_eq!(server.ready["event"], "ready");
    assert_eq!(server.ready["model"], "moestro-demo");
    assert_eq!(server.ready["device"], "cpu");
    assert!(server.ready["plan"].is_object());
    assert!(server.ask("GET /health", "", "").starts_with("HTTP/1.1 200"));
    assert!(server.ask("GET /v1/models", "", "").contains("moestro-demo"));
    signal("INT", server.child.id());
    assert_eq!(server.exit_code(), Some(0));
    let mut rest = String::new();
    server.stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "{\"event\":\"exiting\",\"reason\":\"SIGINT\"}\n");
}

#[test]
fn signal_lets_running_answer_end() {
    let mut server = Server::start(&["--temp", "0"]);
    // A short answer, which ends within the engine's grace period on a busy machine, too.
    let question = chat("What is 12 + 7?", true);
    let mut answer = BufReader::new(server.send("POST /v1/chat/completions", "", &question));
    let mut text = String::new();
    while !text.contains("data: ") {
        answer.read_line(&mut text).unwrap();
    }
    signal("TERM", server.child.id());
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
fn streaming(dir: &Path) -> Server {
    copy_dir(DEMO, dir);
    let model = dir.to_str().unwrap();
    let refused = run(&["serve", "--port", "0", model, "--memory-limit", "1M"]);
    let (_, rest) = stderr(&refused).rsplit_once("--memory-limit ").unwrap();
    let min_limit = rest.split_once('M').unwrap().0;
    let limit = format!("{}M", min_limit.parse::<u32>().unwrap() + 2);
    Server::start(&[model, "--memory-limit", &limit, "--temp", "0", "--thinking", "off"])
}

#[test]
fn truncated_file_fails_requests_until_restored() {
    let dir = tempfile::tempdir().unwrap();
    let server = streaming(dir.path());
    assert_eq!(server.ready["plan"]["strategy"], "streaming", "{}", server.ready);
    let ask = |question: &str, stream| server.ask("POST /v1/chat/completions", "", &chat(question, stream));
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
    let health = server.ask("GET /health", "", "");
    assert!(health.starts_with("HTTP/1.1 503") && health.contains("\"status\":\"degraded\""), "{health}");
    assert!(health.contains("\"reason\":") && health.contains("model.safetensors"), "{health}");
    let metrics = server.ask("GET /metrics", "", "");
    let errors = metrics.lines().find_map(|line| line.strip_prefix("moestro_ssd_errors_total ")).unwrap();
    assert!(errors.trim().parse::<f64>().unwrap() >= 2.0, "{errors}");

    (&file).write_all(&bytes).unwrap();
    file.set_modified(modified).unwrap();
    assert!(ask("What is 12+7?", false).contains("12 + 7 = 19."));
    assert!(server.ask("GET /health", "", "").starts_with("HTTP/1.1 200"));
    let text = |answer: &str| answer.lines().filter(|line| line.contains("delta")).map(content).collect::<String>();
    assert_eq!(text(&ask(story, true)), text(&whole), "no data of the damaged file is used");
}

/// The data of a chunked body. A chunk may end within an event.
fn joined_chunks(mut chunks: &str) -> String {
    let mut data = String::new();
    while let Some((size, rest)) = chunks.split_once("\r\n") {
        let (chunk, rest) = rest.split_at(usize::from_str_radix(size, 16).unwrap());
        data += chunk;
        chunks = rest.strip_prefix("\r\n").unwrap();
    }
    data
}

/// The content in one line of a stream.
fn content(line: &str) -> String {
    let event: Value = serde_json::from_str(line.trim_start_matches("data: ")).unwrap();
    event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn flags_are_defaults_of_requests() {
    let server = Server::start(&["--thinking", "off", "--temp", "0", "--api-key", "secret"]);
    let question = chat("What is 12+7?", false);
    assert!(server.ask("POST /v1/chat/completions", "", &question).starts_with("HTTP/1.1 401"));
    let answer = server.ask("POST /v1/chat/completions", "Authorization: Bearer secret\r\n", &question);
    assert!(answer.contains("12 + 7 = 19."), "{answer}");
    assert!(!answer.contains("\"reasoning_content\":\""), "{answer}");
}

#[test]
fn dead_stderr_does_not_end_requests() {
    let (reader, writer) = std::io::pipe().unwrap();
    let server = Server::start_with(&["--temp", "0", "--thinking", "off"], writer.into());
    drop(reader);
    for _ in 0..3 {
        let answer = server.ask("POST /v1/chat/completions", "", &chat("What is 12+7?", false));
        assert!(answer.contains("12 + 7 = 19."), "{answer}");
    }
}

#[test]
fn reload_that_loses_the_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("moestro.toml");
    std::fs::write(&file, "api-key = \"secret\"").unwrap();
    let logs = dir.path().join("logs");
    let [config, log_dir] =
        [("config", &file), ("log-dir", &logs)].map(|(name, path)| format!("--{name}={}", path.display()));
    let server = Server::start(&[&config, &log_dir]);
    let status = |key: &str| {
        let headers = format!("Authorization: Bearer {key}\r\n");
        server.ask("GET /v1/models", &headers, "").lines().next().unwrap_or_default().to_owned()
    };
    // The three cases: a partially saved file, a file without the key, and no file.
    for text in [Some("api-key = \"oth"), Some(""), None] {
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        let line = process::reload(server.child.id(), &logs);
        assert!(line.contains("cannot reload the configuration"), "{text:?}: {line}");
        assert!(status("secret").contains("200") && status("").contains("401"), "{text:?}");
    }
    std::fs::write(&file, "api-key = \"other\"").unwrap();
    process::reload(server.child.id(), &logs);
    assert!(status("other").contains("200") && status("secret").contains("401"));
}
