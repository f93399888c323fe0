//! Names of models, and the model that a request means.

use std::time::SystemTime;

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// `org/name` from the hub, else a name.
    pub id: String,
    pub created: SystemTime,
}

/// True if `asked` means the model `id`: by its whole name, or by the last part of it if one of the two has no more.
pub fn means(asked: &str, id: &str) -> bool {
    asked.eq_ignore_ascii_case(id)
        || last(asked).eq_ignore_ascii_case(last(id)) && asked.contains('/') != id.contains('/')
}

/// The model that is meant, if it is listed.
pub fn find(asked: &str, listed: &[Listed]) -> Option<String> {
    let exact = listed.iter().find(|model| model.id.eq_ignore_ascii_case(asked));
    exact.or_else(|| listed.iter().find(|model| means(asked, &model.id))).map(|model| model.id.clone())
}

fn last(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_organisation_may_be_left_out_or_added() {
        for asked in ["org/Name", "ORG/name", "name", "Name"] {
            assert!(means(asked, "org/Name"), "{asked}");
        }
        assert!(means("org/name", "name"));
        for asked in ["other/name", "org", "org/name-2", "", "a/org/name"] {
            assert!(!means(asked, "org/name"), "{asked}");
        }
    }

    #[test]
    fn a_whole_name_comes_before_a_part_of_one() {
        let listed = ["a/x", "x", "b/y"].map(|id| Listed { id: id.into(), created: SystemTime::UNIX_EPOCH });
        assert_eq!(find("X", &listed).as_deref(), Some("x"));
        assert_eq!(find("y", &listed).as_deref(), Some("b/y"));
        assert_eq!(find("c/y", &listed), None);
    }
}
