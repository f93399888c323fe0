//! The user's directories for files of this program.

use std::path::PathBuf;

/// Default directories for cache, data and state, relative to the home directory.
#[cfg(target_os = "macos")]
const BASES: [&str; 3] = ["Library/Caches", "Library/Application Support", "Library/Application Support"];
#[cfg(not(target_os = "macos"))]
const BASES: [&str; 3] = [".cache", ".local/share", ".local/state"];

/// The directory for files that can be recreated: `$XDG_CACHE_HOME/moestro` if that variable is set, otherwise
/// `~/Library/Caches/moestro` on macOS and `~/.cache/moestro` elsewhere. `None` if there is no home directory.
pub fn cache_dir() -> Option<PathBuf> {
    user_dir("XDG_CACHE_HOME", BASES[0])
}

/// The directory for user data: `$XDG_DATA_HOME/moestro` if that variable is set, otherwise
/// `~/Library/Application Support/moestro` on macOS and `~/.local/share/moestro` elsewhere. `None` if there is no home
/// directory.
pub fn data_dir() -> Option<PathBuf> {
    user_dir("XDG_DATA_HOME", BASES[1])
}

/// The directory for state such as histories: `$XDG_STATE_HOME/moestro` if that variable is set, otherwise
/// `~/Library/Application Support/moestro` on macOS and `~/.local/state/moestro` elsewhere. `None` if there is no home
/// directory.
pub fn state_dir() -> Option<PathBuf> {
    user_dir("XDG_STATE_HOME", BASES[2])
}

/// The directory `$variable/moestro` if the variable contains an absolute path, otherwise `~/inside/moestro`.
fn user_dir(variable: &str, inside: &str) -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(inside)))?;
    Some(base.join("moestro"))
}
