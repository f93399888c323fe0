//! The directories for this program's own files.

use std::path::PathBuf;

/// Directories for the cache, data and state inside the home directory.
#[cfg(target_os = "macos")]
const BASES: [&str; 3] = ["Library/Caches", "Library/Application Support", "Library/Application Support"];
#[cfg(not(target_os = "macos"))]
const BASES: [&str; 3] = [".cache", ".local/share", ".local/state"];

/// The directory for files that can be recreated: `$XDG_CACHE_HOME/moestro`, else `~/.cache/moestro`; on macOS
/// `~/Library/Caches/moestro` unless `XDG_CACHE_HOME` is set. `None` without a home directory.
pub fn cache_dir() -> Option<PathBuf> {
    user_dir("XDG_CACHE_HOME", BASES[0])
}

/// The directory for user data: `$XDG_DATA_HOME/moestro`, else `~/.local/share/moestro`; on macOS
/// `~/Library/Application Support/moestro` unless `XDG_DATA_HOME` is set. `None` without a home directory.
pub fn data_dir() -> Option<PathBuf> {
    user_dir("XDG_DATA_HOME", BASES[1])
}

/// The directory for state such as histories: `$XDG_STATE_HOME/moestro`, else `~/.local/state/moestro`; on
/// macOS the same as [`data_dir`] unless `XDG_STATE_HOME` is set. `None` without a home directory.
pub fn state_dir() -> Option<PathBuf> {
    user_dir("XDG_STATE_HOME", BASES[2])
}

/// `moestro` in the directory that `variable` names, else in the directory `inside` of the home directory.
fn user_dir(variable: &str, inside: &str) -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(inside)))?;
    Some(base.join("moestro"))
}
