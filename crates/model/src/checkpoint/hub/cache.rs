//! The Hugging Face cache on disk. A model has a directory `models--ORG--NAME`. In it, `blobs` contains the files,
//! `snapshots/COMMIT` contains links to the files, and `refs/BRANCH` contains the commit of a branch.
//! `.no_exist/COMMIT` has an empty file for each file that the repository does not have.
//!
//! Names from a hub are validated before they become parts of paths.

use moestro_base::platform::{atomic_file::replace_file, os, read_small_file};
use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
};

/// The branch that is downloaded by default.
const BRANCH: &str = "main";

/// The directories of huggingface_hub.
pub struct HubPaths {
    /// `$HF_HUB_CACHE`, else `$HUGGINGFACE_HUB_CACHE`, else `hub` in the home directory of huggingface_hub, which is
    /// `$HF_HOME`, else `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`.
    pub cache: PathBuf,
    /// File with the token that `hf auth login` has saved: `$HF_TOKEN_PATH`, else `token` in the same home directory.
    token: Option<PathBuf>,
}

impl HubPaths {
    /// `None` if no variable is set and the user has no home directory.
    pub fn from_env() -> Option<Self> {
        Self::new(|name| env::var_os(name), env::home_dir().filter(|home| home.is_absolute()).as_deref())
    }

    fn new(variable: impl Fn(&str) -> Option<OsString>, user: Option<&Path>) -> Option<Self> {
        let set = |name| {
            let path = variable(name).filter(|value| !value.is_empty())?;
            Some(os::expand_path(&path, &variable, user))
        };
        let caches = || set("XDG_CACHE_HOME").or_else(|| Some(user?.join(".cache")));
        let home = set("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let cache = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE"));
        Some(Self {
            cache: cache.or_else(|| Some(home.as_ref()?.join("hub")))?,
            token: set("HF_TOKEN_PATH").or_else(|| Some(home?.join("token"))),
        })
    }

    /// The saved token.
    pub fn token(&self) -> Option<String> {
        let text = read_small_file(self.token.as_ref()?, 1 << 16).ok()?;
        let token = String::from_utf8(text).ok()?.trim().to_owned();
        (!token.is_empty()).then_some(token)
    }
}

/// The ids of all models in the cache, complete or not.
pub fn ids(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let id = |name: &str| Some(name.strip_prefix("models--")?.replacen("--", "/", 1));
    let mut ids: Vec<String> = entries.filter_map(|entry| id(&entry.file_name().to_string_lossy())).collect();
    ids.sort();
    ids
}

/// Paths of the entries of a directory, which may be missing.
pub fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Paths of all files and links below a directory.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| if path.is_dir() && !path.is_symlink() { files_below(&path) } else { vec![path] };
    entries(dir).flat_map(below).collect()
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

    /// True if the repository is known not to have a file.
    pub fn is_absent(&self, commit: &str, name: &str) -> bool {
        self.absent(commit).join(name).exists()
    }

    /// Records that the repository does not have these files.
    pub fn mark_absent(&self, commit: &str, names: &BTreeSet<String>) -> io::Result<()> {
        names.iter().try_for_each(|name| replace_file(&self.absent(commit).join(name), &[]))
    }

    /// Downloaded and partial files of commits that are not recorded as complete ([`HubCache::set_commit`]).
    ///
    /// Other programs share this directory. A file counts only if it was downloaded under a lock in this directory, as
    /// Moestro does it. A partial file counts if it has a map, which other programs do not write.
    pub fn unused_blobs(&self) -> Vec<PathBuf> {
        let refs = files_below(&self.dir.join("refs")).into_iter();
        let used: BTreeSet<OsString> = refs
            .filter_map(|path| String::from_utf8(read_small_file(&path, 1 << 10).ok()?).ok())
            .filter(|commit| is_hash(commit.trim()))
            .flat_map(|commit| files_below(&self.snapshot(commit.trim())))
            .filter_map(|link| Some(fs::read_link(link).ok()?.file_name()?.to_owned()))
            .collect();
        let is_unused = |path: &PathBuf| {
            let has = |ending: &str| path.with_extension(ending).exists();
            path.file_stem().and_then(OsStr::to_str).is_some_and(is_hash)
                && match path.extension().and_then(OsStr::to_str) {
                    None => has("lock") && path.file_name().is_some_and(|name| !used.contains(name)),
                    Some(ending) => ending == "part" && has("map"),
                }
        };
        let mut unused: Vec<PathBuf> = entries(&self.blobs()).filter(is_unused).collect();
        unused.sort();
        unused
    }

    /// Deletes downloaded and partial files, and the links to them.
    pub fn remove_blobs(&self, blobs: &[PathBuf]) -> io::Result<()> {
        for blob in blobs {
            fs::remove_file(blob)?;
            let _ = fs::remove_file(blob.with_extension("map"));
        }
        let names: BTreeSet<_> = blobs.iter().filter_map(|blob| blob.file_name()).collect();
        let is_dangling =
            |link: &PathBuf| fs::read_link(link).is_ok_and(|to| to.file_name().is_some_and(|to| names.contains(to)));
        files_below(&self.dir.join("snapshots")).iter().filter(|link| is_dangling(link)).try_for_each(fs::remove_file)
    }

    fn absent(&self, commit: &str) -> PathBuf {
        self.dir.join(".no_exist").join(commit)
    }

    /// Records the commit of a complete download of `revision`, which must be valid ([`is_revision`]).
    pub fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        replace_file(&self.dir.join("refs").join(revision), commit.as_bytes())
    }
}

/// True if a branch, tag or commit can be a part of a path and of a URL. It may have slashes, as `refs/pr/1` has.
pub fn is_revision(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    text.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && part.bytes().all(is_plain))
}

/// True for a git or SHA-256 hash. Only hashes are used as names of files and directories in the cache.
pub fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_huggingface_hubs_order() {
        let all = [
            ("HF_HUB_CACHE", "/cache", "/cache"),
            ("HUGGINGFACE_HUB_CACHE", "$ROOT/old", "/root/old"),
            ("HF_HOME", "~/hf", "/user/hf/hub"),
            ("XDG_CACHE_HOME", "${ROOT}/xdg", "/root/xdg/huggingface/hub"),
            ("ROOT", "/root", "/user/.cache/huggingface/hub"),
            ("", "", "/user/.cache/huggingface/hub"),
        ];
        for (first, (_, _, cache)) in all.iter().enumerate() {
            let variable = |name: &str| {
                let found = all[first..].iter().find(|(other, ..)| *other == name);
                found.map(|(_, value, _)| OsString::from(value))
            };
            assert_eq!(HubPaths::new(variable, Some(Path::new("/user"))).unwrap().cache, Path::new(cache));
        }
        let empty = |name: &str| (name == "HF_HUB_CACHE").then(OsString::new);
        assert!(HubPaths::new(empty, None).is_none());
    }

    #[test]
    fn token_is_not_searched_beside_cache() {
        let token = |variables: &[(&str, &str)]| {
            let variable =
                |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value));
            HubPaths::new(variable, Some(Path::new("/user"))).unwrap().token.unwrap()
        };
        assert_eq!(token(&[("HF_HUB_CACHE", "/data/hub")]), Path::new("/user/.cache/huggingface/token"));
        assert_eq!(token(&[("HF_HUB_CACHE", "/data/hub"), ("HF_HOME", "/hf")]), Path::new("/hf/token"));
        assert_eq!(token(&[("HF_TOKEN_PATH", "/secret"), ("HF_HOME", "/hf")]), Path::new("/secret"));
    }
}
