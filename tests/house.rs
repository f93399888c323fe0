//! Tests the design's rules about the source tree on the text of all crates.
//!
//! The compiler holds the walls between crates. Inside a crate, imports between rooms (top-level modules) must run one way,
//! and files and folders must not import each other in a cycle. A type name must be declared only once, files must stay
//! short, and `unsafe` and `target_os` may appear only in certain rooms. `docs/architecture.md` explains the rooms.

#[path = "house/page.rs"]
mod page;
#[path = "house/source.rs"]
mod source;

use source::{
    SourceFile, crates, cycles, file_imports, files, folder_imports, production_files, room_imports, without_comments,
    without_re_exports, without_test_modules,
};
use std::collections::{BTreeMap, BTreeSet};

const MAX_LINES: usize = 600;

/// Maximum number of bindings such as `let (a, b) = (x, y);` and of matches on booleans. It may only fall.
const MAX_PACKED_BINDINGS: usize = 26;

/// A room, and the rooms that it may import from. These are rooms of the same crate, and for the program also rooms of
/// other crates. A crate's name means all rooms of that crate. Every room may import `error`.
type ImportRule = (&'static str, &'static [&'static str]);

/// The rules of each crate with several rooms.
const ALLOWED_IMPORTS: &[(&str, &[ImportRule])] = &[
    ("crates/base/src", &[("platform", &[]), ("metrics", &["platform"]), ("error", &[])]),
    ("crates/compute/src", &[("device", &[]), ("ops", &["device"]), ("experts", &["device"])]),
    ("crates/model/src", &[("checkpoint", &[]), ("plan", &[]), ("model", &["checkpoint", "plan"]), ("error", &[])]),
    (
        "src",
        &[
            ("config", &["cli", "moestro_base", "moestro_engine", "moestro_model::plan"]),
            ("cli", &["moestro_compute", "moestro_engine", "moestro_model::plan"]),
            ("demo", &["moestro_base"]),
            ("http", &["moestro_base", "moestro_chat", "moestro_engine"]),
            ("service", &["moestro_base"]),
            ("error", &["moestro_base", "moestro_chat::error", "moestro_engine::error", "moestro_model::error"]),
            ("version", &[]),
        ],
    ),
];

/// Imports between folders that are ignored when looking for cycles, each with its reason.
const IGNORED_FOLDER_IMPORTS: &[(&str, &str, &str)] = &[
    ("ops/cpu", "ops/attention", "the limits of the backend name the cache format"),
    ("ops/cpu", "ops/block_attention", "the backend owns buffers that calls reuse"),
    ("ops/cpu", "ops/experts", "the backend owns buffers that calls reuse"),
    ("ops/cpu", "ops/linear", "the backend computes how much memory a product needs"),
    ("http/request", "http/openai", "requests of every API become requests of OpenAI's types"),
    ("http/output", "http/openai", "log-probabilities of completions are built in OpenAI's types"),
    ("http/output", "http/request", "the engine's requests of a prompt are built when they are submitted"),
];

/// Rooms that no other room may import. These rooms may import any room.
const TOP: &[&str] = &["main", "lib", "command", "tools"];

/// Type names that several files may declare.
const SHARED_TYPE_NAMES: &[&str] = &["Options"];

fn room_of(path: &str) -> &str {
    path.split('/').next().unwrap().trim_end_matches(".rs")
}

#[test]
fn imports_between_rooms_run_one_way() {
    let mut wrong = Vec::new();
    for (dir, rules) in ALLOWED_IMPORTS {
        for (from, targets) in room_imports(&production_files(dir)) {
            let room = room_of(&from);
            if TOP.contains(&room) {
                continue;
            }
            let Some((_, allowed)) = rules.iter().find(|(name, _)| *name == room) else {
                panic!("{dir}/{from}: room {room} has no rule in ALLOWED_IMPORTS");
            };
            for to in targets {
                let (krate, in_other_crate) =
                    to.split_once("::").map_or((to.as_str(), false), |(krate, _)| (krate, true));
                let is_free = room == to || to.ends_with("error") || in_other_crate && *dir != "src";
                if !is_free && !allowed.contains(&to.as_str()) && !allowed.contains(&krate) {
                    wrong.push(format!("{dir}/{from} imports {to}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn rooms_are_read_from_groups_and_paths() {
    let text = "use crate::{\n    chat::{Stop, parse},\n    engine,\n};\nlet x = crate::experts::open();\n\
                use moestro_model::plan::{Plan, Size};\nlet y = moestro_base::platform::os::cores();";
    let rooms = room_imports(&[SourceFile::new("http/chat.rs", text.to_owned())]);
    let expected = ["chat", "engine", "experts", "moestro_base::platform", "moestro_model::plan"];
    assert_eq!(Vec::from_iter(&rooms["http/chat.rs"]), expected);
}

#[test]
fn files_import_each_other_in_no_cycle() {
    let (mut found, mut imports) = (Vec::new(), 0);
    for dir in crates() {
        let edges = file_imports(&production_files(&dir));
        imports += edges.values().map(BTreeSet::len).sum::<usize>();
        for cycle in cycles(&edges) {
            for from in &cycle {
                let to: Vec<_> = edges[from].iter().filter(|to| cycle.contains(to)).collect();
                found.push(format!("{dir}/{from} -> {to:?}"));
            }
        }
    }
    assert!(imports > 500, "the imports were not read");
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn folders_import_each_other_in_no_cycle() {
    let mut ignored = IGNORED_FOLDER_IMPORTS.to_vec();
    let (mut found, mut imports) = (Vec::new(), 0);
    for dir in crates() {
        let mut edges = folder_imports(&file_imports(&production_files(&dir)));
        imports += edges.values().map(BTreeSet::len).sum::<usize>();
        ignored.retain(|(from, to, _)| !edges.get_mut(*from).is_some_and(|targets| targets.remove(*to)));
        found.extend(cycles(&edges));
    }
    assert!(imports > 100, "the imports were not read");
    assert!(found.is_empty(), "{found:#?}");
    assert!(ignored.is_empty(), "these imports do not exist: {ignored:#?}");
}

#[test]
fn planted_cycle_between_folders_is_found() {
    let cyclic = |edges: &[(&str, &str)]| {
        let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        cycles(&folder_imports(&imports))
    };
    let (op, check) = (("r/op/a.rs", "r/check/mod.rs"), ("r/check/list.rs", "r/op/b.rs"));
    assert_eq!(cyclic(&[op, check]), [["r/check", "r/op"]]);
    assert_eq!(cyclic(&[op, ("r/check/deep/list.rs", "r/op/b.rs")]), [["r/check", "r/op"]]);
    assert_eq!(cyclic(&[("r/op/x/a.rs", "r/op/y/a.rs"), ("r/op/y/b.rs", "r/op/x/b.rs")]), [["r/op/x", "r/op/y"]]);
    // A folder may import from its parent, and the parent from the folder.
    assert!(cyclic(&[("r/op/a.rs", "r/op.rs"), ("r/op.rs", "r/op/a.rs")]).is_empty());
    assert!(cyclic(&[op, ("r/check/list.rs", "r/check/deep/b.rs")]).is_empty());
}

#[test]
fn planted_cycle_through_re_export_is_found() {
    let file = |path: &str, text: &str| SourceFile::new(path, text.to_owned());
    let planted = |c: &str| {
        vec![
            file("lib.rs", "pub mod a;"),
            file("a/mod.rs", "mod b;\nmod c;\npub use b::Bee;\npub use c::*;"),
            file("a/b.rs", "use super::Cee;\npub struct Bee(Cee);"),
            file("a/c.rs", c),
        ]
    };
    let cycle = [vec!["a/b.rs".to_owned(), "a/c.rs".to_owned()]];
    for text in [
        "use crate::a::Bee;\npub struct Cee;",
        "pub struct Cee;\nfn f() { super::Bee::new() }",
        "use super::{\n    Bee as Other,\n};\npub struct Cee;",
    ] {
        assert_eq!(cycles(&file_imports(&planted(text))), cycle, "{text}");
    }
    for text in [
        "pub struct Cee;",
        "// use super::Bee;\npub struct Cee;",
        "pub struct Cee;\n#[cfg(test)]\nmod tests {\n    use super::super::Bee;\n}",
        "pub struct Cee;\nconst A: &str = \"super::Bee\";",
    ] {
        assert!(cycles(&file_imports(&planted(text))).is_empty(), "{text}");
    }
}

#[test]
fn test_modules_are_no_production_files() {
    let file = |path: &str, text: &str| SourceFile::new(path, text.to_owned());
    let files = vec![file("a.rs", "#[cfg(test)]\nmod tests;\nmod b;"), file("a/tests.rs", ""), file("a/b.rs", "")];
    let left: Vec<String> = without_test_modules(files).into_iter().map(|file| file.path).collect();
    assert_eq!(left, ["a.rs", "a/b.rs"]);
}

#[test]
fn type_names_are_declared_once() {
    let mut declared: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in crates().iter().flat_map(|dir| production_files(dir)) {
        for name in file.declared_types() {
            declared.entry(name).or_default().push(file.path.clone());
        }
    }
    assert!(declared.len() > 200, "the declarations were not read");
    declared.retain(|name, paths| paths.len() > 1 && !SHARED_TYPE_NAMES.contains(&name.as_str()));
    assert!(declared.is_empty(), "{} names: {declared:#?}", declared.len());
    assert!(SHARED_TYPE_NAMES.len() <= 20);
}

/// Values are bound one by one, unless they are one thing. A `match` on a boolean is an `if`.
#[test]
fn values_are_bound_one_by_one() {
    let count = |dir: String| production_files(&dir).iter().map(SourceFile::packed_bindings).sum::<usize>();
    let found: usize = crates().into_iter().map(count).sum();
    assert!(found <= MAX_PACKED_BINDINGS, "{found} of at most {MAX_PACKED_BINDINGS}");
}

#[test]
fn planted_packed_bindings_are_counted() {
    let count = |text: &str| SourceFile::new("a.rs", text.to_owned()).packed_bindings();
    assert_eq!(count("    let (a, mut b): (u8, u8) = (1, f(2));\n"), 1);
    assert_eq!(count("    let (a, b) = (\n        1,\n        2,\n    );\n    (a, b) = (b, a);\n"), 2);
    assert_eq!(count("match flag {\n    true => 1,\n    false => 2,\n}\n"), 1);
    let single =
        "let (a, b) = f((1, 2));\nlet a = (1, 2);\nlet (a, b) = (self.pair)(1);\n(a.0)(b);\nlet _ = f(true);\n";
    assert_eq!(count(single), 0);
}

/// The compiler does not warn about a `pub` function of a crate that no other crate calls.
#[test]
fn public_functions_of_crates_are_used() {
    let words = |text: &str| -> BTreeSet<String> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    let dirs = ["src", "crates", "tests", "benches"].map(|dir| files(dir, &["rs"]));
    let named: Vec<BTreeSet<String>> =
        dirs.concat().iter().map(|(_, text)| words(&without_re_exports(&without_comments(text)))).collect();
    let mut unused = Vec::new();
    for dir in crates().iter().skip(1) {
        for file in production_files(dir) {
            for name in file.public_functions() {
                if named.iter().filter(|words| words.contains(&name)).count() < 2 {
                    unused.push(format!("{dir}/{}: {name}", file.path));
                }
            }
        }
    }
    assert!(unused.is_empty(), "only their own file names {unused:#?}");
}

#[test]
fn types_have_at_most_two_impl_files() {
    let mut implemented: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for file in crates().iter().flat_map(|dir| production_files(dir)) {
        // An operation is one type with three files: `mod.rs` has its meaning, `cpu.rs` its CPU code, and `gpu.rs` its
        // GPU launches.
        let is_device_half = file.room() == "ops" && ["cpu", "gpu"].contains(&file.module.last().unwrap().as_str());
        if is_device_half {
            continue;
        }
        for name in file.implemented_types() {
            implemented.entry((file.room().to_owned(), name)).or_default().insert(file.path.clone());
        }
    }
    implemented.retain(|_, paths| paths.len() > 2);
    assert!(implemented.is_empty(), "{implemented:#?}");
}

#[test]
fn unsafe_and_target_os_stay_in_rooms() {
    // `metrics` may use `target_os`, because the prometheus crate has its process collector only on Linux.
    let may_have = [
        (
            "target_os",
            ["crates/base/src/platform/", "crates/base/src/metrics/", "crates/compute/src/device/", "src/service"]
                .as_slice(),
        ),
        ("unsafe", ["crates/base/src/platform/", "crates/compute/src/"].as_slice()),
    ];
    let mut wrong = Vec::new();
    for dir in crates() {
        for file in production_files(&dir) {
            let path = format!("{dir}/{}", file.path);
            for line in file.code.lines() {
                let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
                for (word, rooms) in may_have {
                    let is_allowed = rooms.iter().any(|room| path.starts_with(room));
                    if words.contains(&word) && !is_allowed {
                        wrong.push(format!("{path}: {line}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Releases are linked for glibc 2.28, where these functions are missing.
#[test]
fn functions_exist_in_glibc_2_28() {
    const NEWER: [&str; 14] = [
        "arc4random",
        "close_range",
        "closefrom",
        "epoll_pwait2",
        "execveat",
        "getcpu",
        "getdents64",
        "gettid",
        "mallinfo2",
        "pidfd_open",
        "process_madvise",
        "pthread_cond_clockwait",
        "strlcpy",
        "tgkill",
    ];
    for dir in source::crates() {
        for file in source::production_files(&dir) {
            let used = NEWER.iter().find(|name| file.code.contains(&format!("libc::{name}(")));
            assert!(used.is_none(), "{dir}/{}: glibc 2.28 has no {used:?}", file.path);
        }
    }
}

#[test]
fn files_have_at_most_600_lines() {
    let src = files("src", &["rs", "html", "css", "js"]);
    let all =
        [src, files("crates", &["rs"]), files("kernels", &["metal", "h"]), files("tests", &["rs", "mjs"])].concat();
    let long: Vec<String> = all
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "{long:#?}");
}
