//! Sets `MOESTRO_FEATURES`, and `MOESTRO_HISTORY`: the path of a file whose last line names the commit.
//!
//! The commit comes from the variable `MOESTRO_COMMIT` (for container builds without git history), or from git's reflog of
//! HEAD. `main.rs` includes the file, so a new commit rebuilds only that small crate. A value set by this script would
//! rebuild the library as well.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const GIVEN: &str = "MOESTRO_COMMIT";

fn main() {
    println!("cargo:rerun-if-env-changed={GIVEN}");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=MOESTRO_FEATURES={}", features());
    let given = env::var(GIVEN).ok().filter(|commit| !commit.is_empty());
    let history = given.is_none().then(log_of_head).flatten().unwrap_or_else(|| {
        let path = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("history");
        fs::write(&path, given.unwrap_or_default()).expect("OUT_DIR can be written");
        path
    });
    println!("cargo:rustc-env=MOESTRO_HISTORY={}", history.display());
}

/// Enabled features, except `default`.
fn features() -> String {
    let names = env::vars().filter_map(|(name, _)| Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase()));
    let mut names: Vec<_> = names.filter(|name| name != "default").collect();
    names.sort();
    if names.is_empty() { "none".into() } else { names.join(" ") }
}

/// Git's reflog of HEAD, if this directory is the root of a working tree. A crate that was unpacked inside another
/// repository must not report that repository's commit.
fn log_of_head() -> Option<PathBuf> {
    let here = env::current_dir().ok()?.canonicalize().ok()?;
    let root = Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    let log = Path::new(&git(&["rev-parse", "--git-path", "logs/HEAD"])?).canonicalize().ok()?;
    (root == here).then_some(log)
}

/// Output of a git command. `None` without git or a repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim_end().to_owned())
}
