//! The user's directories for files of this program.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

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
    let home = env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    let set = env::var_os(variable).map(|path| expand_path(&path, |name| env::var_os(name), home.as_deref()));
    let base = set.filter(|path| path.is_absolute()).or_else(|| Some(home?.join(inside)))?;
    Some(base.join("moestro"))
}

/// Expands `~`, `$NAME` and `${NAME}` at the start or inside of a path. A shell does not do that in quoted words, in
/// configuration files and in the environment of a service. A variable that is not set is kept.
pub fn expand_path(path: &OsStr, variable: impl Fn(&str) -> Option<OsString>, home: Option<&Path>) -> PathBuf {
    let Some(text) = path.to_str() else { return path.into() };
    let mut parts = text.split('$');
    let mut expanded = OsString::from(parts.next().unwrap_or_default());
    for part in parts {
        let is_in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let bare = part.split_at(part.find(|c| !is_in_name(c)).unwrap_or(part.len()));
        let (name, after) = part.strip_prefix('{').and_then(|rest| rest.split_once('}')).unwrap_or(bare);
        match variable(name).filter(|_| !name.is_empty() && name.chars().all(is_in_name)) {
            Some(value) => expanded.extend([&*value, OsStr::new(after)]),
            None => expanded.extend(["$", part].map(OsStr::new)),
        }
    }
    let expanded = PathBuf::from(expanded);
    let in_home = expanded.strip_prefix("~").ok().and_then(|rest| Some(home?.join(rest)));
    in_home.unwrap_or(expanded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_and_variables_are_expanded() {
        let variable = |name: &str| match name {
            "HOME" | "A_1" => Some("/user".into()),
            "TILDE" => Some("~".into()),
            "" | "a b" => Some("wrong".into()),
            _ => None,
        };
        for (path, expected) in [
            ("~", "/user"),
            ("~/a", "/user/a"),
            ("~other/a", "~other/a"),
            ("/a/~", "/a/~"),
            ("$HOME/a", "/user/a"),
            ("${HOME}a/$A_1", "/usera//user"),
            ("$TILDE/a", "/user/a"),
            ("/a$", "/a$"),
            ("/$UNSET/${UNSET}/${HOME/${}/${a b}", "/$UNSET/${UNSET}/${HOME/${}/${a b}"),
            ("", ""),
        ] {
            assert_eq!(expand_path(path.as_ref(), variable, Some(Path::new("/user"))), Path::new(expected), "{path}");
        }
        assert_eq!(expand_path("~/a".as_ref(), variable, None), Path::new("~/a"));
    }
}
