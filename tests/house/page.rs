//! Tests the files of the page: all are joined, and scripts depend on each other in one direction.

use super::files;
use std::collections::BTreeSet;

/// A script of the page.
struct Script {
    name: String,
    text: String,
}

impl Script {
    fn new(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), text: text.to_owned() }
    }

    /// Names that the script declares for all scripts.
    fn declared_names(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        for line in self.text.lines().map(|line| line.strip_prefix("async ").unwrap_or(line)) {
            if line.starts_with("const ") || line.starts_with("let ") {
                names.extend(line.match_indices(" = ").filter_map(|(at, _)| line[..at].rsplit(is_no_name).next()));
            } else if line.starts_with("function") || line.starts_with("class ") {
                names.extend(line.split(is_no_name).filter(|word| !word.is_empty()).nth(1));
            }
        }
        names
    }

    /// Names in the code of the script. Properties, comments and strings are left out.
    fn used_names(&self) -> BTreeSet<String> {
        let is_comment = |line: &&str| ["//", "/*", "*"].iter().any(|mark| line.trim_start().starts_with(mark));
        let mut names = BTreeSet::new();
        for line in self.text.lines().filter(|line| !is_comment(line)) {
            for code in line.replace("...", " ").split('"').step_by(2) {
                let words = code.split(|c| is_no_name(c) && c != '.' && c != ':').filter(|word| !word.ends_with(':'));
                names.extend(words.filter_map(|word| word.split('.').next()).map(str::to_owned));
            }
        }
        names
    }
}

fn is_no_name(c: char) -> bool {
    !c.is_alphanumeric() && c != '_' && c != '$'
}

/// Uses of names that only a later script declares.
fn early_uses(scripts: &[Script]) -> Vec<String> {
    let mut found = Vec::new();
    for (index, script) in scripts.iter().enumerate() {
        let used = script.used_names();
        for later in &scripts[index + 1..] {
            let early = later.declared_names().into_iter().filter(|name| used.contains(*name));
            found.extend(early.map(|name| format!("{} uses {name} of {}", script.name, later.name)));
        }
    }
    found
}

/// Names of the files that `page.rs` joins, in its order.
fn joined_names() -> Vec<String> {
    let (_, source) = files("src", &["rs"]).into_iter().find(|(path, _)| path.ends_with("/http/page.rs")).unwrap();
    let names = source.lines().filter_map(|line| line.trim().strip_prefix("include_str!(\"page/"));
    names.filter_map(|rest| rest.split_once('"')).map(|(name, _)| name.to_owned()).collect()
}

/// Names and texts of the files in `page/`.
fn page_files() -> Vec<(String, String)> {
    let all = files("src/http/page", &["html", "css", "js"]);
    all.into_iter().map(|(path, text)| (path.rsplit('/').next().unwrap().to_owned(), text)).collect()
}

#[test]
fn page_files_are_joined_once() {
    let (mut joined, mut found) = (joined_names(), page_files().into_iter().map(|(name, _)| name).collect::<Vec<_>>());
    joined.sort();
    found.sort();
    assert_eq!(joined, found);
}

#[test]
fn page_scripts_use_only_earlier_names() {
    let files = page_files();
    let text = |name: &String| files.iter().find(|(found, _)| found == name).map_or("", |(_, text)| text);
    let joined = joined_names();
    let scripts: Vec<Script> =
        joined.iter().filter(|name| name.ends_with(".js")).map(|name| Script::new(name, text(name))).collect();
    assert!(scripts.iter().map(|script| script.declared_names().len()).sum::<usize>() > 100, "no names were read");
    let early = early_uses(&scripts);
    assert!(early.is_empty(), "{early:#?}");
}

#[test]
fn planted_use_of_later_name_is_found() {
    let late = "const $ = id => 1, two = 2;\nlet $a = 0;\nasync function* list(x) {\n  const y = 1;\n}\nclass B {\n}";
    let early = |text: &str| early_uses(&[Script::new("a.js", text), Script::new("b.js", late)]);
    assert_eq!(early("f(`${$a}`);"), ["a.js uses $ of b.js", "a.js uses $a of b.js"]);
    assert_eq!(early("f(...two);"), ["a.js uses two of b.js"]);
    assert_eq!(early("  for (const a of list()) two.b();"), ["a.js uses list of b.js", "a.js uses two of b.js"]);
    assert_eq!(early("class A extends B {"), ["a.js uses B of b.js"]);
    for other in ["f(x.two, x?.list);", "f({two: 1});", "// two", "/** list */", "f(\"B\");", "f(y);"] {
        assert!(early(other).is_empty(), "{other}");
    }
}
