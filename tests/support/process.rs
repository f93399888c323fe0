//! [`Process`] runs the server as a separate process. [`agent`] creates the requests of a coding agent.
#![allow(dead_code)] // Each test binary uses only a part of this module.

use crate::program;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Sends SIGHUP to the server `id`, waits until it has read its configuration again, and returns the line of its log
/// that says so. `logs` is the directory of `--log-dir`.
pub fn reload(id: u32, logs: &Path) -> String {
    let lines = || -> Vec<String> {
        let files = fs::read_dir(logs).unwrap().map(|entry| entry.unwrap().path());
        let log: String = files.map(|path| fs::read_to_string(path).unwrap()).collect();
        // The last line may be incomplete.
        let lines =
            log.split_inclusive('\n').filter(|line| line.contains(" the configuration") && line.ends_with('\n'));
        lines.map(str::to_owned).collect()
    };
    let (before, begin) = (lines().len(), Instant::now());
    program::signal("HUP", id);
    loop {
        if let Some(line) = lines().get(before) {
            return line.clone();
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "the server does not reload its configuration");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a request to this computer, and returns the connection, which the server closes after the answer. `line` is the
/// method and the path, and each of `headers` ends with a line end.
pub fn send(port: u16, line: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
    write!(stream, "{line} HTTP/1.1\r\n{head}{headers}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

/// Sends a request, and returns the head and the body of the answer.
pub fn exchange(port: u16, line: &str, headers: &str, body: &str) -> String {
    let mut answer = String::new();
    send(port, line, headers, body).read_to_string(&mut answer).unwrap();
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.contains("transfer-encoding: chunked") => {
            format!("{head}\r\n\r\n{}", joined_chunks(body))
        }
        _ => answer,
    }
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

/// A server process. Dropping this value kills the server.
pub struct Process {
    child: Child,
    /// The server's stdout after the ready line.
    pub stdout: BufReader<ChildStdout>,
    /// The server's home directory.
    _home: tempfile::TempDir,
    pub port: u16,
    /// The server's JSON line that reports readiness.
    pub ready: Value,
}

impl Process {
    /// Starts `moestro serve` with the arguments `args`, on two threads of the CPU.
    pub fn start(args: &[&str]) -> Self {
        Self::spawn(Command::new(program::MOESTRO), args)
    }

    /// Runs `command` with the arguments of `moestro serve` on two threads of the CPU and with `args`. `command` is
    /// `moestro`, or a program that executes `moestro` with the arguments it gets. Memory limits in `args` thus suffice
    /// on machines with many cores, too. [`program::isolate`] is applied to `command`. Prompts are cached on disk only if
    /// `args` name the directory.
    pub fn spawn(command: Command, args: &[&str]) -> Self {
        Self::spawn_with(command, args, Stdio::null())
    }

    /// Like [`Process::spawn`], with another stderr.
    pub fn spawn_with(mut command: Command, args: &[&str], stderr: Stdio) -> Self {
        let home = tempfile::tempdir().unwrap();
        program::isolate(&mut command, home.path());
        let names_dir = args.contains(&"--prompt-cache-dir");
        let mut child = command
            .args(["serve", "--port", "0", "--device", "cpu", "--threads", "2"])
            .args(if names_dir { &[][..] } else { &["--prompt-cache-dir", "off"] })
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).expect("the ready line");
        Self { child, stdout, _home: home, port: ready["port"].as_u64().unwrap() as u16, ready }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the server has exited and returns its exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "still running");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a request and returns the response body.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let answer = exchange(self.port, &format!("{method} {path}"), "", body);
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Reads the value of a metric.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.ask("GET", "/metrics", "");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
    }

    pub fn chat(&self, messages: &[Value]) -> Value {
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 12});
        serde_json::from_str(&self.ask("POST", "/v1/chat/completions", &body.to_string())).unwrap()
    }
}

impl Drop for Process {
    /// Sends SIGKILL, so that the server has no time to write files.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The requests of a coding agent, one per turn. Each answer is followed by the result of a tool call. Every fourth
/// turn has a new question by the user. For such a turn, the template drops earlier reasoning.
pub fn agent(turns: usize, reasoning: bool) -> Vec<Vec<Value>> {
    let words = |n: usize, count: usize| {
        let word =
            |k: usize| ["slot", "plan", "limit", "file", "line", "read", "what", "is"][(n * 7 + k * k + k / 3) % 8];
        (0..count).map(word).collect::<Vec<_>>().join(" ")
    };
    let mut messages =
        vec![json!({"role": "system", "content": words(1, 60)}), json!({"role": "user", "content": words(2, 12)})];
    let mut sent = Vec::new();
    for turn in 0..turns {
        sent.push(messages.clone());
        let mut answer = json!({"role": "assistant", "content": words(turn + 3, 4)});
        if reasoning {
            answer["reasoning_content"] = words(turn + 5, 20).into();
        }
        messages.push(answer);
        messages.push(match turn % 4 {
            3 => json!({"role": "user", "content": words(turn + 11, 10)}),
            _ => json!({"role": "tool", "content": words(turn + 7, 90 + turn * 37 % 80)}),
        });
    }
    sent
}
