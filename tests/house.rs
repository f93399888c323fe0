//! The house's order (see `src/lib.rs`): imports between rooms run one way, `cfg(target_os)` stays in `platform` and
//! `device`, `unsafe` in `platform`, `device`, `experts` and `ops`, and no file grows beyond 400 lines.

use std::{fs, path::Path};

/// Every file below `dir` with one of the endings, with its text.
fn files(dir: &str, endings: &[&str]) -> Vec<(String, String)> {
    fn walk(dir: &Path, endings: &[&str], found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, endings, found);
            } else if endings.iter().any(|ending| path.extension().is_some_and(|found| found == *ending)) {
                found.push((path.to_str().unwrap().replace('\\', "/"), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir), endings, &mut found);
    assert!(!found.is_empty());
    found
}

/// The room a source file is in: `http/chat.rs` is in `http`, `plan.rs` and `plan/tests.rs` in `plan`.
fn room(path: &str) -> &str {
    let inside = path.rsplit_once("/src/").unwrap().1;
    inside.split('/').next().unwrap().trim_end_matches(".rs")
}

/// The rooms that `text` names after `crate::`, in `use` lines (grouped ones too) and in paths.
fn named(text: &str) -> Vec<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut rooms = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let Some(group) = rest.strip_prefix('{') else {
            rooms.push(word(rest));
            continue;
        };
        let (mut depth, mut start) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if start && !c.is_whitespace() => {
                    rooms.push(word(&group[at..]));
                    start = false;
                }
                _ => {}
            }
        }
    }
    rooms
}

#[test]
fn imports_run_one_way() {
    // The rooms that each may name besides itself and the leaves.
    let leaves = ["error", "metrics"];
    let allowed: &[(&str, &[&str])] = &[
        ("platform", &[]),
        ("device", &["platform"]),
        ("ops", &["device", "platform"]),
        ("experts", &["device", "platform"]),
        ("checkpoint", &["ops", "experts", "device", "platform"]),
        ("plan", &["platform", "config"]),
        ("model", &["checkpoint", "ops", "experts", "device", "platform", "plan"]),
        ("engine", &["model", "platform"]),
        ("chat", &[]),
        ("config", &["cli"]),
        ("cli", &[]),
        ("demo", &["platform"]),
        ("http", &["engine", "chat", "platform"]),
        ("metrics", &["platform"]),
        ("error", &[]),
        ("version", &[]),
    ];
    let mut wrong = Vec::new();
    for (path, text) in files("src", &["rs"]) {
        let from = room(&path);
        if ["main", "lib", "command", "tools"].contains(&from) {
            continue;
        }
        let Some((_, allowed)) = allowed.iter().find(|(room, _)| *room == from) else {
            panic!("{path}: a room that the house does not know");
        };
        for to in named(&text) {
            if to != from && !leaves.contains(&to.as_str()) && !allowed.contains(&to.as_str()) {
                wrong.push(format!("{path}: {from} -> {to}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn named_rooms_are_found() {
    let text = "use crate::{\n    chat::{Stop, parse},\n    engine,\n};\nlet x = crate::experts::open();";
    assert_eq!(named(text), ["chat", "engine", "experts"]);
}

#[test]
fn the_operating_system_and_unsafe_code_have_their_rooms() {
    let mut wrong = Vec::new();
    for (path, text) in files("src", &["rs"]) {
        let code = text.lines().map(|line| line.split("//").next().unwrap());
        for (number, line) in code.enumerate() {
            let at = || format!("{path}:{}: {line}", number + 1);
            // The prometheus crate has its process collector on Linux only.
            let may = ["platform", "device", "metrics"].contains(&room(&path)) || path.ends_with("tests.rs");
            if line.contains("target_os") && !may {
                wrong.push(at());
            }
            let may = ["platform", "device", "experts", "ops"].contains(&room(&path));
            if line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") && !may {
                wrong.push(at());
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_file_is_over_400_lines() {
    let all = [files("src", &["rs"]), files("kernels", &["metal", "h"]), files("tests", &["rs"])].concat();
    let long: Vec<String> = all
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > 400)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "{long:#?}");
}
