//! The Hugging Face cache: `models--ORG--NAME` with `blobs`, `snapshots/COMMIT` of links to them, and `refs/BRANCH`.
//!
//! Every part of a path here has been checked: hubs say how their files are called.

use super::REVISION;
use crate::platform::{atomic_file, read_small_file};
use std::{
    env, io,
    path::{Path, PathBuf},
};

/// `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else `~/.cache/huggingface/hub`.
pub fn root() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || Some(set("HF_HOME").or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))?.join("hub"));
    set("HF_HUB_CACHE").or_else(home)
}

/// The token that `huggingface-cli login` has left.
pub fn token(root: &Path) -> Option<String> {
    let text = read_small_file(&root.parent()?.join("token"), 1 << 16).ok()?;
    let token = String::from_utf8(text).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// The ids of all models that something was downloaded of, complete or not.
pub fn ids(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let id = |name: &str| Some(name.strip_prefix("models--")?.replacen("--", "/", 1));
    let mut ids: Vec<String> = entries.filter_map(|entry| id(&entry.file_name().to_string_lossy())).collect();
    ids.sort();
    ids
}

/// One model's part of the cache.
#[derive(Debug, Clone)]
pub struct Shelf {
    dir: PathBuf,
}

impl Shelf {
    /// `id`: `org/name`, of letters, digits, `-`, `_` and `.` alone.
    pub fn new(root: &Path, id: &str) -> Self {
        Self { dir: root.join(format!("models--{}", id.replace('/', "--"))) }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn blobs(&self) -> PathBuf {
        self.dir.join("blobs")
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    /// The commit that the branch was at when it was last downloaded completely.
    pub fn commit(&self) -> Option<String> {
        let text = read_small_file(&self.dir.join("refs").join(REVISION), 1 << 10).ok()?;
        let commit = String::from_utf8(text).ok()?.trim().to_owned();
        is_hash(&commit).then_some(commit)
    }

    pub fn set_commit(&self, commit: &str) -> io::Result<()> {
        atomic_file::replace_file(&self.dir.join("refs").join(REVISION), commit.as_bytes())
    }
}

/// A hash as git and SHA-256 have them: nothing else may name a file or a directory of the cache.
pub fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
