//! Version of the program: number, commit and features.

/// Git's reflog of HEAD, whose last line names the commit as `OLD NEW ...`. Otherwise the commit alone, or empty.
const HISTORY: &[u8] = include_bytes!(env!("MOESTRO_HISTORY"));
/// Extracted at compile time, so that the rest of the log is not in the binary.
const COMMIT: [u8; 12] = newest(HISTORY);

/// `0.1.0 (commit 2e64aab1c0ff, features: hub)`
pub fn whole() -> String {
    let commit = str::from_utf8(&COMMIT).unwrap_or_default().trim();
    let commit = if commit.is_empty() { String::new() } else { format!("commit {commit}, ") };
    format!("{} ({commit}features: {})", env!("CARGO_PKG_VERSION"), env!("MOESTRO_FEATURES"))
}

/// First twelve digits of the commit in the last line. Spaces if there is none.
const fn newest(log: &[u8]) -> [u8; 12] {
    let mut end = log.len();
    while end > 0 && log[end - 1] == b'\n' {
        end -= 1;
    }
    let mut start = end;
    while start > 0 && log[start - 1] != b'\n' {
        start -= 1;
    }
    // The second word, or the first if there is only one.
    let mut space = start;
    while space < end && log[space] != b' ' {
        space += 1;
    }
    if space < end {
        start = space + 1;
    }
    let mut commit = [b' '; 12];
    let mut i = 0;
    while i < commit.len() && start + i < end && log[start + i].is_ascii_hexdigit() {
        commit[i] = log[start + i];
        i += 1;
    }
    commit
}

#[cfg(test)]
mod tests {
    use super::newest;

    #[test]
    fn last_line_names_the_commit() {
        let old = "0123456789abcdef".repeat(2) + "01234567";
        let new = "fedcba9876543210".repeat(2) + "fedcba98";
        let line =
            |from: &str, to: &str| format!("{from} {to} A. Body <a@b.example> 1700000000 +0100\tcommit: words\n");
        let log = line(&new, &old) + &line(&old, &new);
        assert_eq!(&newest(log.as_bytes()), b"fedcba987654");
        assert_eq!(&newest(new.as_bytes()), b"fedcba987654");
        assert_eq!(&newest(b"abc1234\n"), b"abc1234     ");
        assert_eq!(&newest(b""), b"            ");
    }
}
