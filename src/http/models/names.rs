//! Names of models, and the model that a name in a request stands for.

use std::time::SystemTime;

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelEntry {
    /// Id of the model: `org/name` for a model from the hub, else a name.
    pub id: String,
    pub created: SystemTime,
    /// Bytes of the weight files.
    pub size: u64,
}

/// Prefix of the additional ids in the list of models for Anthropic's clients. Claude Code shows only ids that begin
/// with `claude`.
pub const CLAUDE_PREFIX: &str = "claude-local/";

/// Maximum number of characters of a requested name. A longer name stands for no model, because answers repeat it.
const MAX_CHARS: usize = 256;

/// True if no model can have this name.
pub fn is_too_long(requested: &str) -> bool {
    requested.chars().nth(MAX_CHARS).is_some()
}

/// A requested name without the prefix for Anthropic's clients and without the tag that Ollama's clients add.
pub fn plain(requested: &str) -> &str {
    let requested = requested.strip_prefix(CLAUDE_PREFIX).unwrap_or(requested);
    requested.strip_suffix(":latest").unwrap_or(requested)
}

/// True if the requested name stands for the model `id`. Either the names are equal, or one name has no organisation
/// and the last parts of both names are equal. Case is ignored.
pub fn matches(requested: &str, id: &str) -> bool {
    let requested = plain(requested);
    is_exact(requested, id)
        || base_name(requested).eq_ignore_ascii_case(base_name(id)) && requested.contains('/') != id.contains('/')
}

/// True if the requested name is exactly the id. Case is ignored.
pub fn is_exact(requested: &str, id: &str) -> bool {
    plain(requested).eq_ignore_ascii_case(id)
}

/// The id that the requested name stands for. An exact match wins over a match without organisation, and then the first
/// id wins.
pub fn find<'a>(requested: &str, ids: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let exact = ids.clone().find(|id| is_exact(requested, id));
    exact.or_else(|| ids.clone().find(|id| matches(requested, id)))
}

/// True if an unlisted name cannot mean the model `id`. A name without a slash may be any word, as in llama-server,
/// because clients are often configured with a name such as `default`. A name with a slash is a hub id, whose last part
/// must be that of `id`.
pub fn is_other_model(requested: &str, id: &str) -> bool {
    let requested = plain(requested);
    requested.contains('/') && !base_name(requested).eq_ignore_ascii_case(base_name(id))
}

fn base_name(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn organisation_is_optional_on_one_side() {
        for requested in ["org/Name", "ORG/name", "name", "Name", "claude-local/org/Name", "name:latest"] {
            assert!(matches(requested, "org/Name"), "{requested}");
        }
        assert!(matches("org/name", "name"));
        for requested in ["other/name", "org", "org/name-2", "", "a/org/name"] {
            assert!(!matches(requested, "org/name"), "{requested}");
        }
    }

    #[test]
    fn exact_name_wins_over_base_name() {
        let find = |requested| find(requested, ["a/x", "x", "b/y"].into_iter());
        assert_eq!(find("X"), Some("x"));
        assert_eq!(find("y"), Some("b/y"));
        assert_eq!(find("claude-local/a/x"), Some("a/x"));
        assert_eq!(find("c/y"), None);
    }

    #[test]
    fn unlisted_hub_id_ends_like_the_model() {
        for (requested, id) in [("gpt-4o", "org/name"), ("other/NAME", "org/name"), ("claude-local/a/name", "name")] {
            assert!(!is_other_model(requested, id), "{requested}");
        }
        assert!(is_other_model("org/name-2", "org/name"));
        assert!(is_other_model("openai/gpt-4", "name"));
    }
}
