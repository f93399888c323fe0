//! Tests of the binary on a terminal, which `script` of util-linux provides. Also tests the version and model names.
#![cfg(target_os = "linux")]

use crate::{
    process::{Process, exchange},
    program::{MOESTRO, isolate, quoted},
};
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};
use test_support::demo;

const LEFT: &str = "\x1b[D";
const UP: &str = "\x1b[A";
const BACKSPACE: &str = "\x7f";
const CTRL_A: &str = "\x01";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_E: &str = "\x05";

const CHAT: &str = "run --temp 0 --thinking off --max-tokens 24";

/// A command that runs `program` on the CPU without settings from the environment. The program's files are in `home`.
fn isolated(program: &str, home: &Path) -> Command {
    let mut command = Command::new(program);
    isolate(&mut command, home);
    for (name, dir) in [("STATE", "state"), ("CACHE", "cache"), ("CONFIG", "config"), ("DATA", "data")] {
        command.env(format!("XDG_{name}_HOME"), home.join(dir));
    }
    command
}

/// `moestro` running on a terminal.
struct Terminal {
    script: Child,
    keys: ChildStdin,
    shown: Arc<Mutex<String>>,
    /// Number of bytes of `shown` that were checked.
    seen: usize,
}

impl Terminal {
    fn begin(home: &Path, args: &str) -> Self {
        Self::begin_with(home, "", args)
    }

    /// `variable` has the form `NAME=value` and is an environment variable for the program.
    fn begin_with(home: &Path, variable: &str, args: &str) -> Self {
        Self::begin_in(home, "true", variable, args)
    }

    /// Runs the shell command `setup` on the terminal first.
    fn begin_in(home: &Path, setup: &str, variable: &str, args: &str) -> Self {
        let mut command = isolated("script", home);
        // `exec` replaces the shell, because a signal would end the shell instead of the program.
        let line = format!("{setup}; exec env {variable} {} {args}", quoted(MOESTRO));
        command.args(["-qefc", &line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env("TERM", "xterm").env("SHELL", "/bin/sh");
        let mut script = command.spawn().expect("script, of util-linux");
        let (keys, mut screen) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let shown = Arc::new(Mutex::new(String::new()));
        let to = shown.clone();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
        });
        Self { script, keys, shown, seen: 0 }
    }

    /// Waits for new output that contains `words`. Returns the new output up to the end of `words`.
    fn wait(&mut self, words: &str) -> String {
        let begin = Instant::now();
        loop {
            let shown = self.shown.lock().unwrap().clone();
            if let Some(at) = shown[self.seen..].find(words) {
                let end = self.seen + at + words.len();
                return shown[std::mem::replace(&mut self.seen, end)..end].to_owned();
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "no {words:?} in {:?}", &shown[self.seen..]);
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    fn chat(home: &Path) -> Self {
        let mut chat = Self::begin(home, CHAT);
        chat.wait(">>> ");
        chat
    }

    /// Types a text. Waits for `answer`, and then for the next prompt.
    fn say(&mut self, keys: &str, answer: &str) {
        self.press(keys);
        self.press("\r");
        self.wait(answer);
        self.wait(">>> ");
    }

    fn end(mut self, keys: &str) {
        self.press(keys);
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.script.try_wait().unwrap() {
                break status;
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "still running: {:?}", self.shown.lock().unwrap());
            thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn version_names_the_commit() {
    let home = tempfile::tempdir().unwrap();
    let text = isolated(MOESTRO, home.path()).arg("--version").output().unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.starts_with(concat!("moestro ", env!("CARGO_PKG_VERSION"), " (")) && text.contains("features: "),
        "{text}"
    );
    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    if let Some(git) = git.ok().filter(|git| git.status.success()) {
        let commit = String::from_utf8(git.stdout).unwrap();
        assert!(text.contains(&format!("(commit {}, ", &commit[..12])), "{text} is not of {commit}");
    }
}

#[test]
fn unknown_model_name_gets_a_hint() {
    let home = tempfile::tempdir().unwrap();
    let coder = home.path().join("data/moestro/models/coder");
    std::fs::create_dir_all(&coder).unwrap();
    std::fs::copy(demo().join("config.json"), coder.join("config.json")).unwrap();
    let say = |name: &str| {
        let mut command = isolated(MOESTRO, home.path());
        let output = command.args(["run", name, "-p", "What is 12+7?", "--temp", "0", "--thinking", "off"]).output();
        let output = output.unwrap();
        String::from_utf8(output.stdout).unwrap() + std::str::from_utf8(&output.stderr).unwrap()
    };
    assert_eq!(say("moestro-dmeo"), "moestro: no such directory: moestro-dmeo (did you mean moestro-demo?)\n");
    let foo = say("foo");
    assert!(foo.contains("no such directory: foo; ") && foo.contains("org/name"), "{foo}");
    assert_eq!(say("./foo"), "moestro: no such directory: ./foo\n");
    // Models of `moestro list` can be used by name: the demo, and a model in the user's directory, which has no
    // tokenizer in this test.
    assert!(say("moestro-demo").starts_with("12 + 7 = 19.\n"), "{}", say("moestro-demo"));
    assert!(say("coder").contains("tokenizer"), "{}", say("coder"));
}

/// As with systemd, the port is open before the server starts, and the first request waits for the model.
#[test]
fn inherited_port_loads_on_demand() {
    let home = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    let mut command = isolated("sh", home.path());
    let line = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" serve";
    command.args(["-c", line, MOESTRO]).stdin(OwnedFd::from(port)).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = command.spawn().unwrap();
    let ask = |line: &str, body: &str| exchange(address.port(), line, "", body);
    assert!(ask("GET /health", "").contains(r#""model":null,"next":"moestro-demo""#));
    let question =
        r#"{"messages": [{"role": "user", "content": "What is 12+7?"}], "temperature": 0, "enable_thinking": false}"#;
    let answer = ask("POST /v1/chat/completions", question);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("12 + 7 = 19."), "{answer}");
    server.kill().unwrap();
    server.wait().unwrap();
}

/// `--host localhost` has two addresses, and launchd then passes two sockets.
#[test]
fn every_inherited_port_is_served() {
    let home = tempfile::tempdir().unwrap();
    let ports = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = ports.each_ref().map(|port| port.local_addr().unwrap());
    let mut command = isolated("sh", home.path());
    let line = "exec 3<&0 4>&2 </dev/null 2>/dev/null; export LISTEN_PID=$$ LISTEN_FDS=2; exec \"$0\" serve";
    let [first, second] = ports.map(OwnedFd::from);
    command.args(["-c", line, MOESTRO]).stdin(first).stdout(Stdio::null()).stderr(second);
    let mut server = command.spawn().unwrap();
    drop(command); // Its copies of the sockets.
    for address in addresses {
        let answer = exchange(address.port(), "GET /health", "", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{address}: {answer}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn server_prints_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    let mut server = Terminal::begin(home.path(), "serve --port 0");
    let text = server.wait("(Ctrl-C ends it)");
    assert!(
        text.contains("moestro-demo answers on cpu, all experts in memory, context 65536: http://127.0.0.1:"),
        "{text}"
    );
    let more = server.wait("a 9 MB toy");
    for repeated in ["\"event\"", "memory plan of", "serving moestro-demo"] {
        assert!(!text.contains(repeated) && !more.contains(repeated), "{text}{more}");
    }
    server.end(CTRL_C);
}

#[test]
fn chat_line_is_edited_and_recalled() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::chat(home.path());
    // The keys change "hat is 12+8?" to "What is 12+7?".
    chat.say(&format!("hat is 12+8?{LEFT}{BACKSPACE}7{CTRL_A}W{CTRL_E}"), "12 + 7 = 19.");
    chat.say("/clear", "the conversation is empty");
    chat.say(&format!("{UP}{UP}"), "12 + 7 = 19.");
    // Three ways to enter several lines: a backslash, quotes, and a pasted text.
    chat.say("/set system one\\\rtwo", "one\r\ntwo");
    chat.say("\"\"\"/set system three\rfour\"\"\"", "three\r\nfour");
    chat.say("\x1b[200~/set system five\rsix\x1b[201~", "five\r\nsix");
    chat.say("/set se\t", "seed            random");
    // Ctrl-C discards the line that is being typed.
    for _ in 0..2 {
        chat.press("/set seed 3");
        chat.wait("seed 3");
        chat.press(CTRL_C);
        chat.wait(">>> ");
    }
    assert!(!chat.shown.lock().unwrap().contains("Ctrl-D ends"), "Ctrl-C on a text only clears it");
    chat.say("/set", "seed            random");
    chat.say(" /set seed 4", "seed            4");
    chat.end(CTRL_D);

    let file = home.path().join("state/moestro/history");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nWhat is 12+7?\n") && text.contains("\n/set system five\\nsix\n"), "{text}");
    assert!(!text.contains("seed 3") && !text.contains("seed 4"), "discarded, and after a space: {text}");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));

    let mut chat = Terminal::chat(home.path());
    chat.press("\x12What");
    chat.wait("What is 12+7?");
    chat.say("", "12 + 7 = 19.");
    chat.press(CTRL_C);
    chat.wait(">>> ");
    chat.end(CTRL_C);
}

#[test]
fn chat_commands_work() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("chat.json");
    let mut chat = Terminal::chat(home.path());
    assert!(chat.shown.lock().unwrap().contains("moestro-demo on cpu, all experts in memory, context "));
    chat.say("/retry", "there is no message");
    chat.say("What is 12+7?", "12 + 7 = 19.");
    chat.say("/retry", "12 + 7 = 19.");
    chat.say(&format!("/save {}", file.display()), "saved 2 messages");
    chat.say("/clear", "the conversation is empty");
    chat.say(&format!("/load {}", file.display()), "loaded 2 messages");
    chat.say(&format!("/load {}/none", home.path().display()), "No such file");
    chat.say("/show", "2 messages");
    chat.say("/hlep", "no command /hlep; /help lists the commands");
    chat.say("/modle moestro-demo", "no command /modle; /help lists the commands");
    chat.say("/model", "* moestro-demo");
    chat.say("/model ./nowhere", "no such directory: ./nowhere");
    chat.say("/model moestro-demo", "moestro-demo on cpu");
    chat.say("/retry", "12 + 7 = 19.");
    chat.end("/bye\r");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "What is 12+7?");
}

#[test]
fn narrow_terminal_breaks_no_words() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::begin_in(home.path(), "stty rows 24 cols 40", "", CHAT);
    let shown = chat.wait(">>> ");
    let notes = &shown[shown.find("moestro-demo is").unwrap()..shown.find("/help").unwrap()];
    assert!(notes.lines().all(|line| line.chars().count() <= 40), "{notes}");
    chat.say("/bye now", "/bye alone ends the chat");
    chat.end(CTRL_D);
}

#[test]
fn failed_retry_keeps_the_old_answer() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::begin(home.path(), &format!("{CHAT} --ctx-size 128"));
    chat.wait(">>> ");
    chat.say("What is 12+7?", "12 + 7 = 19.");
    chat.say(&format!("/set system {}", "zebra ".repeat(60)), "zebra");
    chat.say("/retry", "the context 128");
    chat.say("/show", "2 messages");
    chat.end("/bye\r");
}

/// Scripts, and terminals without bracketed paste, send several lines at once.
#[test]
fn text_typed_ahead_is_kept() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::chat(home.path());
    chat.press("/set seed 5\rWhat is 12+7?\r/set\r");
    chat.wait("seed            5");
    chat.wait("12 + 7 = 19.");
    chat.wait("seed            5");
    chat.end(CTRL_D);
}

#[test]
fn chat_asks_server_that_has_the_model() {
    let home = tempfile::tempdir().unwrap();
    let server = Process::start(&[]);
    let address = format!("--port {}", server.port);
    let mut chat = Terminal::begin(home.path(), &format!("{CHAT} {address}"));
    chat.wait(&format!("moestro-demo at http://127.0.0.1:{} on cpu", server.port));
    chat.wait(">>> ");
    chat.say("What is 12+7?", "12 + 7 = 19.");
    chat.say("/retry", "12 + 7 = 19.");
    chat.end(CTRL_D);
    // If a flag changes the memory plan, the chat loads its own copy of the model.
    let mut chat = Terminal::begin(home.path(), &format!("{CHAT} {address} --ctx-size 4096"));
    chat.wait("moestro-demo on cpu, all experts in memory, context 4096");
    chat.wait(">>> ");
    chat.end(CTRL_D);
}

/// A checkpoint that sees images, in the fixtures.
const VISION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision/mlx_4bit");

#[test]
fn images_are_shown_to_every_model() {
    let home = tempfile::tempdir().unwrap();
    let image = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision/images/noise.jpg");
    let broken = home.path().join("broken.png");
    std::fs::write(&broken, "no image").unwrap();
    let server = Process::start(&[VISION, "--ctx-size", "1024"]);
    let remote = format!("--port {}", server.port);
    for (flags, name) in [(remote.as_str(), "mlx_4bit at http://"), ("--ctx-size 1024", "mlx_4bit on cpu")] {
        let mut chat = Terminal::begin(home.path(), &format!("run {} --temp 0 --max-tokens 4 {flags}", quoted(VISION)));
        chat.wait(name);
        chat.wait(">>> ");
        chat.say(&format!("/image {}", broken.display()), "broken.png: the image ");
        chat.say(&format!("/image {image}"), "noise.jpg: 10 tokens; the next text goes with it");
        chat.say("What is this?", "answer 4 tokens");
        chat.say("/retry", "answer 4 tokens");
        chat.say("/save chat.json", "the conversation has images; /clear deletes it");
        chat.say("And now?", "answer 4 tokens");
        // A failed message leaves its image for the next one.
        chat.say("/clear", "the conversation is empty");
        chat.say(&format!("/image {image}"), "noise.jpg: 10 tokens");
        chat.say(&format!("/set system {}", "zebra ".repeat(600)), "zebra");
        chat.say("What is this?", "the image goes with the next text");
        chat.say("/set system", "system");
        chat.say("What is this?", "answer 4 tokens");
        chat.say("/save chat.json", "the conversation has images");
        chat.say("And now?", "answer 4 tokens");
        chat.end(CTRL_D);
    }
    let mut chat = Terminal::chat(home.path());
    chat.say(&format!("/image {image}"), "this model cannot see images");
    chat.end(CTRL_D);
}

/// A server whose answers have this content. If `is_endless`, a stream stays open until the client closes it. Returns
/// the port, and a receiver of one message for each closed stream.
fn scripted_server(content: &str, is_endless: bool) -> (u16, mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (closed, is_closed) = mpsc::channel();
    let event = serde_json::json!({"choices": [{"delta": {"content": content}}]});
    let end = if is_endless { "" } else { "data: [DONE]\n\n" };
    let stream = format!("data: {event}\n\n{end}");
    thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let mut head = [0; 4096];
            let length = socket.read(&mut head).unwrap();
            let asked = String::from_utf8_lossy(&head[..length]).into_owned();
            if asked.starts_with("POST") {
                let _ = write!(socket, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{stream}");
                if !is_endless {
                    let _ = socket.shutdown(Shutdown::Write);
                }
                while socket.read(&mut head).is_ok_and(|length| length > 0) {}
                let _ = closed.send(());
                continue;
            }
            let body = if asked.starts_with("GET /health") {
                r#"{"status": "ok", "model": "moestro-demo", "version": "0"}"#
            } else {
                r#"{"data": [{"id": "moestro-demo"}]}"#
            };
            let _ = write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    (port, is_closed)
}

#[test]
fn interrupted_answer_closes_the_stream() {
    let home = tempfile::tempdir().unwrap();
    let (port, is_closed) = scripted_server("An answer ", true);
    let mut chat = Terminal::begin(home.path(), &format!("{CHAT} --port {port}"));
    chat.wait(">>> ");
    for _ in 0..2 {
        chat.press("Hi\r");
        chat.wait("An answer");
        chat.press(CTRL_C);
        chat.wait("interrupted");
        chat.wait(">>> ");
        is_closed.recv_timeout(Duration::from_secs(60)).expect("the stream is closed while the chat waits for a text");
    }
    chat.say("/show", "4 messages");
    chat.end(CTRL_D);
}

#[test]
fn answer_is_drawn_on_a_terminal_only() {
    let home = tempfile::tempdir().unwrap();
    let markdown = "Use **bold words** and `code`:\n\n- one item that is longer than a line\n";
    let (port, _) = scripted_server(markdown, false);
    let args = format!("run --port {port} -p Hi");
    let mut terminal = Terminal::begin(home.path(), &args);
    let shown = terminal.wait("answer 0 tokens");
    assert!(shown.contains("Use \x1b[1mbold words\x1b[22m and \x1b[36mcode\x1b[39m:\r\n\r\n• one item"), "{shown:?}");
    let mut narrow = Terminal::begin_in(home.path(), "stty rows 24 cols 28", "NO_COLOR=1", &args);
    let shown = narrow.wait("answer 0\r\ntokens");
    assert!(shown.contains("Use **bold words** and\r\n`code`:"), "{shown:?}");
    let piped = isolated(MOESTRO, home.path()).args(args.split(' ')).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&piped.stdout), format!("{markdown}\n"));
}

#[test]
fn windows_line_ends_become_line_ends() {
    let home = tempfile::tempdir().unwrap();
    let (port, _) = scripted_server("one\r\n\r\ntwo\r\n", false);
    let args = format!("run --port {port} -p Hi");
    let shown = Terminal::begin(home.path(), &args).wait("answer 0 tokens");
    assert!(shown.contains("one\r\n\r\ntwo\r\n") && !shown.contains('\u{fffd}'), "{shown:?}");
    let piped = isolated(MOESTRO, home.path()).args(args.split(' ')).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&piped.stdout), "one\r\n\r\ntwo\r\n\n");
}

/// After an answer, the program handles Ctrl-C itself for the rest of its life.
#[cfg(feature = "hub")]
#[test]
fn ctrl_c_interrupts_download_of_other_model() {
    use test_support::hub::TestHub;

    let hub = TestHub::new(&[("config.json", b"{}".to_vec()), ("model.safetensors", vec![1; 16 << 20])]);
    hub.change(|state| state.bytes_per_second = Some(1 << 20));
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::begin_with(home.path(), &format!("HF_ENDPOINT={}", hub.endpoint), CHAT);
    chat.wait(">>> ");
    for _ in 0..2 {
        chat.say("What is 12+7?", "12 + 7 = 19.");
        chat.press("/model org/name\r");
        chat.wait("MiB of 16");
        chat.press(CTRL_C);
        chat.wait("the download of org/name was interrupted; its progress is saved");
        chat.wait(">>> ");
    }
    chat.say("/show", "moestro-demo on cpu");
    chat.end(CTRL_D);
}

#[test]
fn plain_terminals_get_no_colours() {
    let home = tempfile::tempdir().unwrap();
    for (variable, dims) in [("NO_COLOR=", true), ("NO_COLOR=1", false), ("TERM=dumb", false)] {
        let mut terminal = Terminal::begin_with(home.path(), variable, "run -p 12+7? --temp 0 -n 9");
        terminal.wait("tok/s");
        let shown = terminal.shown.lock().unwrap().clone();
        assert_eq!(shown.contains("\x1b[2m"), dims, "{variable}: {shown:?}");
    }
}

#[test]
fn long_prompt_shows_progress() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("prompt");
    std::fs::write(&file, "What is 12+7? ".repeat(125)).unwrap();
    let mut chat = Terminal::begin(home.path(), &format!("run -p \"$(cat {})\" --temp 0 -n 4", file.display()));
    let shown = chat.wait("tok/s");
    assert!(shown.contains("\r\x1b[K\x1b[2mreading the prompt: "), "{shown:?}");
    // The program erases the line before it prints the answer.
    let after = &shown[shown.rfind("reading the prompt: ").unwrap()..];
    assert!(after.contains("\r\x1b[K"), "{shown:?}");
}

#[test]
fn bash_completes_model_names() {
    let home = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(MOESTRO, home.path().join("moestro")).unwrap();
    let complete = "eval \"$(moestro completions bash)\"; COMP_WORDS=(moestro $WORDS); COMP_CWORD=2; \
                    _moestro_with_models moestro \"${COMP_WORDS[2]}\" \"${COMP_WORDS[1]}\"; echo \"${COMPREPLY[@]}\"";
    for (words, expected) in [("run moe", "moestro-demo"), ("serve --memory", "--memory-limit")] {
        let mut bash = isolated("bash", home.path());
        let path = format!("{}:/usr/bin:/bin", home.path().display());
        let said = bash.args(["-c", complete]).env("PATH", path).env("WORDS", words).current_dir(home.path());
        let said = String::from_utf8(said.output().unwrap().stdout).unwrap();
        assert!(said.split_whitespace().any(|word| word == expected), "{words}: {said}");
    }
}

/// Names of directories and of a server's model may contain escape sequences.
#[test]
fn escape_sequences_do_not_reach_the_terminal() {
    let home = tempfile::tempdir().unwrap();
    let hostile = home.path().join("data/moestro/models/a\x1b]0;owned\x07b");
    std::fs::create_dir_all(&hostile).unwrap();
    std::fs::copy(demo().join("config.json"), hostile.join("config.json")).unwrap();
    let mut list = Terminal::begin(home.path(), "list");
    list.wait("moestro-demo");
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in server.incoming().flatten() {
            let _ = stream.read(&mut [0; 1024]);
            let body = r#"{"status": "ok", "model": "a\u001b]0;owned\u0007b", "version": "0"}"#;
            let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    let mut ps = Terminal::begin(home.path(), &format!("ps --port {port}"));
    ps.wait("running");
    for shown in [&list, &ps].map(|terminal| terminal.shown.lock().unwrap().clone()) {
        assert!(shown.contains("owned") && !shown.contains("\x1b]0;") && !shown.contains('\x07'), "{shown:?}");
    }
}

#[test]
fn unwritable_history_does_not_end_chat() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("state"), "not a directory").unwrap();
    let mut chat = Terminal::chat(home.path());
    chat.say("What is 12+7?", "12 + 7 = 19.");
    chat.say(UP, "12 + 7 = 19.");
    chat.end("/bye\r");
}

#[test]
fn closed_terminal_ends_the_server() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::begin(home.path(), "serve --port 0");
    let shown = terminal.wait("(Ctrl-C ends it)");
    let (_, rest) = shown.split_once("http://").unwrap();
    let address = rest.split_once('/').unwrap().0.to_owned();
    assert!(TcpStream::connect(&address).is_ok());
    // When `script` ends, the terminal is closed.
    drop(terminal);
    let start = Instant::now();
    while TcpStream::connect(&address).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(60), "the server still listens");
        thread::sleep(Duration::from_millis(50));
    }
}
