//! Names of models, and the model that a name in a request stands for.

use std::time::SystemTime;

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelEntry {
    /// Id of the model: `org/name` for a model from the hub, else a name.
    pub id: String,
    pub created: SystemTime,
}

/// Prefix of the additional ids in the list of models for Anthropic's clients. Claude Code shows only ids that begin
/// with `claude`.
pub const CLAUDE_PREFIX: &str = "claude-local/";

/// A requested name without the prefix for Anthropic's clients and without the tag that Ollama's clients add.
pub fn plain(requested: &str) -> &str {
    let requested = requested.strip_prefix(CLAUDE_PREFIX).unwrap_or(requested);
    requested.strip_suffix(":latest").unwrap_or(requested)
}

/// True if the requested name stands for the model `id`. Either the names are equal, or one name has no organisation
/// and the last parts of both names are equal. Case is ignored.
pub fn matches(requested: &str, id: &str) -> bool {
    let requested = plain(requested);
    requested.eq_ignore_ascii_case(id)
        || base_name(requested).eq_ignore_ascii_case(base_name(id)) && requested.contains('/') != id.contains('/')
}

/// Id of the model that the requested name stands for. An exact match wins over a match without organisation.
pub fn find(requested: &str, entries: &[ModelEntry]) -> Option<String> {
    let requested = plain(requested);
    let exact = entries.iter().find(|entry| entry.id.eq_ignore_ascii_case(requested));
    exact.or_else(|| entries.iter().find(|entry| matches(requested, &entry.id))).map(|entry| entry.id.clone())
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
        let entries = ["a/x", "x", "b/y"].map(|id| ModelEntry { id: id.into(), created: SystemTime::UNIX_EPOCH });
        assert_eq!(find("X", &entries).as_deref(), Some("x"));
        assert_eq!(find("y", &entries).as_deref(), Some("b/y"));
        assert_eq!(find("claude-local/a/x", &entries).as_deref(), Some("a/x"));
        assert_eq!(find("c/y", &entries), None);
    }
}
