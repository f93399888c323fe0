//! Reads the source of every crate as text: module paths, imports, type declarations, and code without comments, strings and test items.
//!
//! The reader understands the output of rustfmt, but not every form that Rust allows. If the reader misreads a file, it
//! finds imports that do not exist. The tests then fail, so that no real import is missed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
};

/// Crates that only tests use.
const TEST_CRATES: [&str; 2] = ["mock-model", "test-support"];

/// A file below a crate's `src`.
pub struct SourceFile {
    /// Path below `src`, for example `ops/attention/cpu.rs`.
    pub path: String,
    /// Module path, for example `["ops", "attention", "cpu"]`. Empty for `lib.rs`.
    pub module: Vec<String>,
    pub text: String,
    /// The text without comments, string contents and `#[cfg(test)]` items.
    pub code: String,
}

/// A name that a file imports or uses by path.
struct Import {
    /// Absolute module path of the name. The name is the last part.
    target: Vec<String>,
    /// Name by which the file refers to the import. `*` for a glob.
    alias: String,
    is_public: bool,
    /// True for a `use` declaration, false for a path in an expression.
    is_declaration: bool,
}

/// Path and text of every file below `dir` whose name has one of the endings.
pub fn files(dir: &str, endings: &[&str]) -> Vec<(String, String)> {
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
    assert!(!found.is_empty(), "no file below {dir}");
    found
}

/// The directories with the source of each crate. The program is the first.
pub fn crates() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found: Vec<String> = fs::read_dir(root.join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !TEST_CRATES.contains(&name.as_str()))
        .map(|name| format!("crates/{name}/src"))
        .collect();
    found.sort();
    found.insert(0, "src".into());
    found
}

/// All files of the crate whose source is in `dir`, except files that only `#[cfg(test)]` modules declare.
pub fn production_files(dir: &str) -> Vec<SourceFile> {
    let prefix = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir).to_str().unwrap().replace('\\', "/") + "/";
    let all = files(dir, &["rs"]).into_iter().map(|(path, text)| SourceFile::new(&path[prefix.len()..], text));
    without_test_modules(all.collect())
}

/// Removes the files that belong to declarations `#[cfg(test)] mod name;`.
pub fn without_test_modules(files: Vec<SourceFile>) -> Vec<SourceFile> {
    let mut test_modules = Vec::new();
    for file in &files {
        for (removed, _) in test_items(&without_comments(&file.text)) {
            let name = removed.trim_end_matches(';').rsplit_once("mod ").map(|(_, name)| name.trim());
            if let Some(name) = name.filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_')) {
                test_modules.push([file.module.as_slice(), &[name.to_owned()]].concat());
            }
        }
    }
    files.into_iter().filter(|file| !test_modules.iter().any(|module| file.module.starts_with(module))).collect()
}

impl SourceFile {
    pub fn new(path: &str, text: String) -> Self {
        let mut module: Vec<String> = path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
            module.pop();
        }
        let mut code = without_comments(&text);
        for (item, attribute) in test_items(&code.clone()) {
            code = code.replacen(&(attribute + &item), "", 1);
        }
        SourceFile { path: path.to_owned(), module, text, code }
    }

    /// First part of the module path, for example `http` for `http/openai/chat.rs`.
    pub fn room(&self) -> &str {
        self.module.first().map_or("lib", String::as_str)
    }

    /// Types that the file declares outside of tests, except associated types.
    pub fn declared_types(&self) -> Vec<String> {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let mut found = Vec::new();
        for line in self.code.lines() {
            let indented = line.starts_with(' ');
            let words: Vec<String> = words(line).into_iter().skip_while(|word| word.starts_with("pub")).collect();
            let [keyword, name, ..] = words.as_slice() else { continue };
            let declares = match keyword.as_str() {
                "struct" | "enum" | "trait" | "union" => true,
                "unsafe" => false,
                "type" => !indented,
                _ => false,
            };
            let name: String = name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if declares && name.starts_with(|c: char| c.is_uppercase()) {
                found.push(name);
            }
        }
        found
    }

    /// Number of tuples that bind or assign several values in one statement, and of matches on booleans.
    pub fn packed_bindings(&self) -> usize {
        let is_packed = |statement: &str| {
            let Some((pattern, value)) = statement.split_once(" = (") else { return false };
            let pattern = pattern.strip_prefix("let ").unwrap_or(pattern);
            pattern.starts_with('(') && closing_parenthesis(value) == Some(value.len() - 1)
        };
        let mut count = self.code.lines().filter(|line| line.trim_start().starts_with("true =>")).count();
        let mut at = 0;
        for line in self.code.split_inclusive('\n') {
            let rest = self.code[at..].trim_start();
            at += line.len();
            if rest.starts_with("let (") || rest.starts_with('(') && line.trim_start().starts_with('(') {
                count += usize::from(rest.split(';').next().is_some_and(is_packed));
            }
        }
        count
    }

    /// Names of functions that other crates may call.
    pub fn public_functions(&self) -> Vec<String> {
        let name = |line: &str| {
            let rest = line.trim_start().strip_prefix("pub ")?;
            let (keywords, rest) = rest.split_at(rest.find("fn ")?);
            let only_keywords = keywords.split_whitespace().all(|word| ["const", "unsafe", "async"].contains(&word));
            let name = rest["fn ".len()..].split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
            only_keywords.then(|| name.to_owned())
        };
        self.code.lines().filter_map(name).collect()
    }

    /// Types of inherent `impl` blocks, for example `Chunk` for `impl<'a> Chunk<'a> {`.
    pub fn implemented_types(&self) -> Vec<String> {
        let mut found = Vec::new();
        for line in self.code.lines() {
            let Some(rest) = line.strip_prefix("impl") else { continue };
            if !rest.starts_with([' ', '<']) || rest.contains(" for ") {
                continue;
            }
            let rest = rest.trim_start();
            let subject = rest.strip_prefix('<').map_or(rest, |generics| skip_generics(generics)).trim_start();
            found.push(subject.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
        found
    }

    /// Names from other modules that the file uses, as absolute paths.
    fn imports(&self, modules: &BTreeSet<Vec<String>>) -> Vec<Import> {
        let mut imports = Vec::new();
        let mut rest = String::new();
        let mut code = self.code.as_str();
        while let Some(at) = find_use(code) {
            rest.push_str(&code[..at]);
            let line = code[..at].rsplit('\n').next().unwrap();
            let end = code[at..].find(';').map_or(code.len(), |end| at + end);
            let mut paths = Vec::new();
            expand_use_tree(code[at + "use ".len()..end].trim(), &[], &mut paths);
            for (path, alias) in paths {
                if let Some(target) = self.absolute(&path, modules) {
                    let is_public = line.trim_start().starts_with("pub");
                    imports.push(Import { target, alias, is_public, is_declaration: true });
                }
            }
            code = &code[end..];
        }
        rest.push_str(code);
        for start in ["crate::", "self::", "super::", "moestro_"] {
            for (at, _) in rest.match_indices(start) {
                let before = rest[..at].chars().next_back();
                if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                    continue;
                }
                let path: String =
                    rest[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':').collect();
                let path: Vec<String> = path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
                if let Some(target) = self.absolute(&path, modules) {
                    imports.push(Import { target, alias: String::new(), is_public: false, is_declaration: false });
                }
            }
        }
        imports
    }

    /// Resolves `crate`, `self`, `super` and child modules in a path. A path into another crate of the workspace stays as
    /// it is. `None` for a path into any other crate.
    fn absolute(&self, path: &[String], modules: &BTreeSet<Vec<String>>) -> Option<Vec<String>> {
        let supers = path.iter().take_while(|part| *part == "super").count();
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([&self.module, &path[1..]].concat()),
            "super" => Some([&self.module[..self.module.len().checked_sub(supers)?], &path[supers..]].concat()),
            other if other.starts_with("moestro_") => Some(path.to_vec()),
            child => {
                let module = [self.module.as_slice(), &[child.to_owned()]].concat();
                modules.contains(&module).then(|| [&self.module, path].concat())
            }
        }
    }
}

/// For each file, the files it imports from. A name is followed through re-exports to the file that declares the name.
/// `mod x;`, re-exports and tests do not count as imports.
pub fn file_imports(files: &[SourceFile]) -> BTreeMap<String, BTreeSet<String>> {
    let modules: BTreeSet<Vec<String>> = files.iter().map(|file| file.module.clone()).collect();
    let by_module: HashMap<&[String], &SourceFile> = files.iter().map(|file| (file.module.as_slice(), file)).collect();
    let imports: HashMap<&[String], Vec<Import>> =
        files.iter().map(|file| (file.module.as_slice(), file.imports(&modules))).collect();
    let mut edges = BTreeMap::new();
    for file in files {
        let targets: &mut BTreeSet<String> = edges.entry(file.path.clone()).or_default();
        for import in &imports[file.module.as_slice()] {
            if import.is_public && import.is_declaration {
                continue;
            }
            let declaring = declaring_module(&import.target, &imports, &by_module, 0);
            if let Some(other) = declaring.filter(|module| *module != file.module) {
                targets.insert(by_module[other.as_slice()].path.clone());
            }
        }
    }
    edges
}

/// For each folder, the folders beside it (with the same parent) from whose files its files import.
pub fn folder_imports(imports: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (from, targets) in imports {
        for to in targets {
            // The length of the common parent's path.
            let same = from.split('/').zip(to.split('/')).take_while(|(a, b)| a == b).count();
            let folder = |path: &str| {
                let parts: Vec<&str> = path.split('/').collect();
                (parts.len() > same + 1).then(|| parts[..=same].join("/"))
            };
            if let (Some(from), Some(to)) = (folder(from), folder(to)) {
                edges.entry(to.clone()).or_default();
                edges.entry(from).or_default().insert(to);
            }
        }
    }
    edges
}

/// For each file, the rooms that its imports and paths name, such as `error` in `crate::error::ChatError`. A room of
/// another crate has that crate's name before it: `moestro_model::error`. A name that a room re-exports counts as a name
/// of that room.
pub fn room_imports(files: &[SourceFile]) -> BTreeMap<String, BTreeSet<String>> {
    let modules: BTreeSet<Vec<String>> = files.iter().map(|file| file.module.clone()).collect();
    let room = |import: Import| match import.target.as_slice() {
        [name, room, ..] if name.starts_with("moestro_") => Some(format!("{name}::{room}")),
        [room, ..] => Some(room.clone()),
        [] => None,
    };
    let rooms = |file: &SourceFile| file.imports(&modules).into_iter().filter_map(room).collect();
    files.iter().map(|file| (file.path.clone(), rooms(file))).collect()
}

/// The module that declares the last name of `path`.
fn declaring_module(
    path: &[String],
    imports: &HashMap<&[String], Vec<Import>>,
    files: &HashMap<&[String], &SourceFile>,
    depth: usize,
) -> Option<Vec<String>> {
    let path = path.strip_suffix(&["*".to_owned()]).unwrap_or(path);
    let path = path.strip_suffix(&["self".to_owned()]).unwrap_or(path);
    let module = (1..=path.len()).rev().map(|len| &path[..len]).find(|module| files.contains_key(module))?;
    let Some(name) = path.get(module.len()) else { return Some(module.to_vec()) };
    if declares(&files[module].code, name) || depth > 8 {
        return Some(module.to_vec());
    }
    let rest = &path[module.len() + 1..];
    for import in &imports[module] {
        if import.is_declaration && import.alias == *name {
            let target = [&import.target, rest].concat();
            return declaring_module(&target, imports, files, depth + 1);
        }
    }
    for import in imports[module].iter().filter(|import| import.is_declaration && import.alias == "*") {
        let target = [&import.target[..import.target.len() - 1], &path[module.len()..]].concat();
        let found = declaring_module(&target, imports, files, depth + 1);
        if let Some(found) = found.filter(|found| declares(&files[found.as_slice()].code, name)) {
            return Some(found);
        }
    }
    Some(module.to_vec())
}

/// True if `code` declares an item called `name`.
fn declares(code: &str, name: &str) -> bool {
    const KEYWORDS: &[&str] = &["struct", "enum", "trait", "type", "fn", "const", "static", "union", "macro_rules!"];
    code.match_indices(name).any(|(at, _)| {
        let after = code[at + name.len()..].chars().next();
        let keyword = code[..at].trim_end().rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or("");
        code[..at].ends_with(' ')
            && KEYWORDS.contains(&keyword)
            && !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

/// `code` without its declarations `pub use`.
pub fn without_re_exports(code: &str) -> String {
    let mut left = String::new();
    let mut rest = code;
    while let Some(at) = find_use(rest) {
        let end = rest[at..].find(';').map_or(rest.len(), |end| at + end);
        let is_public = rest[..at].rsplit('\n').next().unwrap().trim_start().starts_with("pub");
        left.push_str(&rest[..if is_public { at } else { end }]);
        rest = &rest[end..];
    }
    left + rest
}

/// Groups of files that import each other in a cycle, sorted.
pub fn cycles(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reachable = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            for next in edges.get(file).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = edges.keys().map(|file| (file, reachable(file))).collect();
    let mut found = BTreeSet::new();
    for (file, others) in &reached {
        if others.contains(*file) {
            let cycle = others.iter().filter(|other| reached.get(other).is_some_and(|back| back.contains(*file)));
            found.insert(cycle.cloned().collect::<Vec<_>>());
        }
    }
    found.into_iter().collect()
}

/// Position of the next `use ` that starts a declaration.
fn find_use(code: &str) -> Option<usize> {
    code.match_indices("use ").map(|(at, _)| at).find(|at| {
        let line = code[..*at].rsplit('\n').next().unwrap().trim();
        line.is_empty() || line == "pub" || (line.starts_with("pub(") && line.ends_with(')'))
    })
}

/// Expands `a::{b, c::*, d as e}` into paths. Each path comes with the name by which the file refers to it.
fn expand_use_tree(tree: &str, prefix: &[String], found: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let prefix = [prefix, &split_path(&tree[..open])].concat();
        let inside = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
        let (mut depth, mut start) = (0, 0);
        for (at, c) in inside.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand_use_tree(&inside[start..at], &prefix, found);
                    start = at + 1;
                }
                _ => {}
            }
        }
        expand_use_tree(&inside[start..], &prefix, found);
    } else if !tree.is_empty() {
        let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias.trim())));
        let path = [prefix, &split_path(path)].concat();
        let own_name = path.iter().rev().find(|part| *part != "self").cloned().unwrap_or_default();
        found.push((path, alias.map_or(own_name, str::to_owned)));
    }
}

fn split_path(path: &str) -> Vec<String> {
    path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Position of the parenthesis that closes one which was already read.
fn closing_parenthesis(text: &str) -> Option<usize> {
    let mut depth = 1;
    text.char_indices().find_map(|(at, c)| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        (depth == 0).then_some(at)
    })
}

/// The rest of `text` after the `>` that closes generics whose `<` was already read.
fn skip_generics(text: &str) -> &str {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if !text[..at].ends_with('-') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[at + 1..];
        }
    }
    ""
}

/// Items after `#[cfg(test)]` or `#[cfg(all(test, ...))]`. Each entry has the item and the attribute before it.
fn test_items(code: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = code[from..].find("#[cfg(").map(|at| from + at) {
        let attribute = code[at..].find(")]").map_or(code.len(), |end| at + end + 2);
        from = attribute;
        let condition = &code[at + "#[cfg(".len()..attribute];
        if !condition.starts_with("test") && !condition.starts_with("all(test") {
            continue;
        }
        let (mut depth, mut end) = (0, code.len());
        for (offset, c) in code[attribute..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 1 => end = attribute + offset + 1,
                '}' => depth -= 1,
                ';' | ',' if depth == 0 => end = attribute + offset + 1,
                _ => {}
            }
            if end < code.len() {
                break;
            }
        }
        found.push((code[attribute..end].to_owned(), code[at..attribute].to_owned()));
        from = end;
    }
    found
}

/// Removes comments, and the contents of strings and characters.
pub fn without_comments(text: &str) -> String {
    let bytes: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    let starts = |at: usize, what: &str| what.chars().enumerate().all(|(i, c)| bytes.get(at + i) == Some(&c));
    while at < bytes.len() {
        if starts(at, "//") {
            while at < bytes.len() && bytes[at] != '\n' {
                at += 1;
            }
        } else if starts(at, "/*") {
            while at < bytes.len() && !starts(at, "*/") {
                at += 1;
            }
            at += 2;
        } else if bytes[at] == 'r' && (starts(at, "r\"") || starts(at, "r#\"") || starts(at, "r##\"")) {
            let hashes = bytes[at + 1..].iter().take_while(|c| **c == '#').count();
            let close = format!("\"{}", "#".repeat(hashes));
            at += 2 + hashes;
            while at < bytes.len() && !starts(at, &close) {
                at += 1;
            }
            at += close.len();
            out.push_str("\"\"");
        } else if bytes[at] == '"' {
            at += 1;
            while at < bytes.len() && bytes[at] != '"' {
                at += if bytes[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
            out.push_str("\"\"");
        } else if bytes[at] == '\'' && (bytes.get(at + 1) == Some(&'\\') || bytes.get(at + 2) == Some(&'\'')) {
            at += if bytes[at + 1] == '\\' { 3 } else { 2 };
            while at < bytes.len() && bytes[at] != '\'' {
                at += 1;
            }
            at += 1;
            out.push_str("' '");
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    out
}
