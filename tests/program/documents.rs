//! Checks the documents: their paths and links exist, their flags and commands parse, and their commands run.
//!
//! A command that this test does not run is listed in `tests/program/documents_not_run.txt` with the reason.

use crate::process::Process;
use clap::{CommandFactory, Parser};
use moestro::cli::Cli;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Flags that belong to other programs.
const FOREIGN_FLAGS: &[&str] =
    &["--release", "--test", "--lib", "--bench", "--locked", "--path", "--check", "--target", "--no-default-features"];
/// Pages about other programs' flags and settings.
const FOREIGN_PAGES: &[&str] = &["docs/migrating.md", "docs/clients.md"];

/// A document: its path from the repository's root, and its text.
struct Document {
    name: String,
    text: String,
}

fn documents() -> Vec<Document> {
    let mut paths = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md"].map(PathBuf::from).to_vec();
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(Path::new(ROOT).join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if Path::new(ROOT).join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                paths.push(path);
            }
        }
    }
    let read = |path: PathBuf| Document {
        text: fs::read_to_string(Path::new(ROOT).join(&path)).unwrap(),
        name: path.to_str().unwrap().to_owned(),
    };
    paths.into_iter().map(read).collect()
}

impl Document {
    /// The lines inside code fences. Comments after two spaces are removed, and lines that end in `\` are joined with
    /// the next line.
    fn code_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for block in self.text.split("```").skip(1).step_by(2) {
            let mut continues = false;
            for line in block.lines().skip(1) {
                let line = line.trim();
                let code = line.split("   ").next().unwrap_or("").split("  #").next().unwrap_or("").trim();
                let (text, more) = code.strip_suffix('\\').map_or((code, false), |text| (text, true));
                match lines.last_mut().filter(|_| continues) {
                    Some(last) => last.push_str(text),
                    None => lines.push(text.to_owned()),
                }
                continues = more;
            }
        }
        lines
    }

    /// The words in single backticks, outside code fences.
    fn code_words(&self) -> Vec<String> {
        let prose: String = self.text.split("```").step_by(2).collect();
        prose.split('`').skip(1).step_by(2).map(|word| word.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    /// The commands in code fences that run `moestro` or `curl`.
    fn commands(&self) -> Vec<String> {
        self.code_lines().into_iter().filter(|line| line.starts_with("moestro ") || line.starts_with("curl ")).collect()
    }
}

/// Splits a command at spaces outside of single and double quotes, as a shell does.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut quote) = (vec![String::new()], None);
    for letter in command.chars() {
        match (letter, quote) {
            ('\'' | '"', None) => quote = Some(letter),
            (_, Some(open)) if open == letter => quote = None,
            (' ', None) => words.push(String::new()),
            _ => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Paths of all files and folders of the repository, except build output.
fn repository() -> BTreeSet<String> {
    let (mut all, mut folders) = (BTreeSet::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(Path::new(ROOT).join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            let name = path.to_str().unwrap().to_owned();
            if name == "target" || name == ".git" || name.ends_with("node_modules") {
                continue;
            }
            if Path::new(ROOT).join(&path).is_dir() {
                folders.push(path);
                all.insert(name + "/");
            } else {
                all.insert(name);
            }
        }
    }
    all
}

/// True if a document may call the file or folder `path` by this name: the end of its path, without the `src` of a crate
/// that is one room.
fn is_called(path: &str, name: &str) -> bool {
    let (path, name) = (path.trim_end_matches('/'), name.trim_end_matches('/'));
    [name.to_owned(), name.replacen('/', "/src/", 1)]
        .iter()
        .any(|name| path == name || path.ends_with(&format!("/{name}")))
}

#[test]
fn paths_in_documents_exist() {
    let files = repository();
    let mut missing = Vec::new();
    for document in documents() {
        for word in document.code_words() {
            let is_path = word.len() > 4 && (word.ends_with(".rs") || word.ends_with(".csv"))
                || word.len() > 1 && word.ends_with('/');
            let is_rooted =
                ["src/", "crates/", "tests/", "benches/", "docs/", "deploy/"].iter().any(|root| word.starts_with(root));
            let plain = word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-./".contains(letter));
            let placeholder = word.contains("NAME") || word.starts_with('/');
            if !plain || placeholder || !(is_path || is_rooted) {
                continue;
            }
            if !files.iter().any(|file| is_called(file, &word)) {
                missing.push(format!("{}: {word}", document.name));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The section "Call by call" names functions, each with its file in the next column.
#[test]
fn calls_in_architecture_exist() {
    let text = fs::read_to_string(Path::new(ROOT).join("docs/architecture.md")).unwrap();
    let section = text.split("### Call by call").nth(1).unwrap();
    let files = repository();
    let (mut count, mut missing) = (0, Vec::new());
    for line in section.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, calls, file, ..] = cells[..] else { continue };
        let Some(file) = file.strip_prefix('`').and_then(|file| file.strip_suffix(".rs`")) else { continue };
        let place = files.iter().find(|name| is_called(name, &format!("{file}.rs")));
        let source = fs::read_to_string(Path::new(ROOT).join(place.unwrap_or_else(|| panic!("no {file}.rs")))).unwrap();
        for call in calls.split('`').skip(1).step_by(2) {
            count += 1;
            if !source.contains(&format!("fn {}", call.rsplit("::").next().unwrap())) {
                missing.push(format!("{file}.rs: {call}"));
            }
        }
    }
    assert!(count > 20 && missing.is_empty(), "{count} calls, {missing:#?} do not exist");
}

#[test]
fn links_in_documents_exist() {
    let mut missing = Vec::new();
    for document in documents() {
        let folder = Path::new(ROOT).join(&document.name);
        for link in document.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap();
            if !file.is_empty() && !file.contains("://") && !folder.parent().unwrap().join(file).exists() {
                missing.push(format!("{}: {link}", document.name));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn flags_in_documents_exist() {
    let (cli, mut known) = (Cli::command(), BTreeSet::from(["--help".to_owned(), "--version".to_owned()]));
    let mut commands = vec![&cli];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands());
        let long = command.get_arguments().flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default());
        known.extend(long.map(|name| format!("--{name}")));
    }
    let mut unknown = Vec::new();
    for document in documents().into_iter().filter(|document| !FOREIGN_PAGES.contains(&document.name.as_str())) {
        for word in document.code_words().iter().filter(|word| word.starts_with("--") || word.starts_with("moestro ")) {
            for flag in word.split([' ', '=']).filter(|flag| flag.starts_with("--") && flag.len() > 2) {
                if !known.contains(flag) && !FOREIGN_FLAGS.contains(&flag) {
                    unknown.push(format!("{}: {flag}", document.name));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn commands_in_documents_parse() {
    let mut wrong = Vec::new();
    for document in documents() {
        for command in document.commands().into_iter().filter(|command| command.starts_with("moestro ")) {
            if let Err(error) = Cli::try_parse_from(words(&command))
                && error.use_stderr()
            {
                wrong.push(format!("{}: {command}: {error}", document.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The list of commands that are not run. Each line has a prefix of the command, `#`, and the reason.
fn not_run() -> Vec<(String, String)> {
    let text = fs::read_to_string(Path::new(ROOT).join("tests/program/documents_not_run.txt")).unwrap();
    let entry =
        |line: &str| line.split_once('#').map(|(prefix, why)| (prefix.trim().to_owned(), why.trim().to_owned()));
    text.lines().map(|line| entry(line).unwrap_or_else(|| panic!("no reason: {line}"))).collect()
}

/// A command that runs `moestro` on the CPU with its own home directory and without settings from the environment.
fn moestro(home: &Path) -> Command {
    let mut command = crate::program::moestro(home);
    command.env("XDG_CACHE_HOME", home.join("cache")).env("XDG_CONFIG_HOME", home.join("config"));
    command.current_dir(home).stdin(Stdio::null()).stderr(Stdio::null());
    command
}

#[test]
fn commands_in_documents_run() {
    let (home, skipped) = (tempfile::tempdir().unwrap(), not_run());
    assert!(skipped.len() <= 25, "{} commands are not run", skipped.len());
    let commands: BTreeSet<String> = documents().iter().flat_map(Document::commands).collect();
    for (prefix, why) in &skipped {
        assert!(!why.is_empty() && commands.iter().any(|command| command.starts_with(prefix)), "obsolete: {prefix}");
    }
    let server = Process::start(&[]);
    let port = server.port;
    let here = [("localhost:5413", format!("localhost:{port}")), ("moestro ps", format!("moestro ps --port {port}"))];
    let mut failed = Vec::new();
    for command in commands {
        if command == "moestro serve" || skipped.iter().any(|(prefix, _)| command.starts_with(prefix)) {
            continue;
        }
        let words = words(&here.iter().fold(command.clone(), |text, (there, here)| text.replace(there, here)));
        let mut run = if words[0] == "curl" { Command::new("curl") } else { moestro(home.path()) };
        if words[0] == "curl" {
            run.args(["--fail", "--silent"]);
        }
        match run.args(&words[1..]).output() {
            Ok(output) if output.status.success() && !output.stdout.is_empty() => {}
            Err(_) if words[0] == "curl" => println!("skipped, because there is no curl: {command}"),
            other => failed.push(format!("{command}: {other:?}")),
        }
    }
    drop(server);
    assert!(failed.is_empty(), "{failed:#?}");
}
