//! The Hugging Face cache on disk. A model has a directory `models--ORG--NAME`. In it, `blobs` contains the files,
//! `snapshots/COMMIT` contains links to the files, and `refs/BRANCH` contains the commit of a branch.
//!
//! Names from a hub are validated before they become parts of paths.

use moestro_base::platform::{atomic_file::replace_file, read_small_file};
use std::{
    env, io,
    path::{Path, PathBuf},
};

/// The branch that is downloaded by default.
const BRANCH: &str = "main";

/// The cache directory: the first of `$HF_HUB_CACHE`, `$HF_HOME/hub` and `~/.cache/huggingface/hub` whose variable is
/// set.
pub fn root() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || {
        Some(
            set("HF_HOME")
                .or_else(|| Some(env::home_dir().filter(|home| home.is_absolute())?.join(".cache/huggingface")))?
                .join("hub"),
        )
    };
    set("HF_HUB_CACHE").or_else(home)
}

/// The token that `hf auth login` has saved next to the cache.
pub fn token(root: &Path) -> Option<String> {
    let text = read_small_file(&root.parent()?.join("token"), 1 << 16).ok()?;
    let token = String::from_utf8(text).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// The ids of all models in the cache, complete or not.
pub fn ids(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let id = |name: &str| Some(name.strip_prefix("models--")?.replacen("--", "/", 1));
    let mut ids: Vec<String> = entries.filter_map(|entry| id(&entry.file_name().to_string_lossy())).collect();
    ids.sort();
    ids
}

/// The directory of one model in the cache.
#[derive(Debug, Clone)]
pub struct HubCache {
    dir: PathBuf,
}

impl HubCache {
    /// `id` has the form `org/name`. The caller has checked that both parts contain only letters, digits, `-`, `_` and
    /// `.`.
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

    /// The commit of the main branch when that branch was last downloaded completely.
    pub fn commit(&self) -> Option<String> {
        let text = read_small_file(&self.dir.join("refs").join(BRANCH), 1 << 10).ok()?;
        let commit = String::from_utf8(text).ok()?.trim().to_owned();
        is_hash(&commit).then_some(commit)
    }

    /// Records the commit of a complete download of `revision`, which must be valid ([`is_revision`]).
    pub fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        replace_file(&self.dir.join("refs").join(revision), commit.as_bytes())
    }
}

/// True if a branch, tag or commit can be a part of a path and of a URL.
pub fn is_revision(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && !text.starts_with('.') && text.bytes().all(is_plain)
}

/// True for a git or SHA-256 hash. Only hashes are used as names of files and directories in the cache.
pub fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
