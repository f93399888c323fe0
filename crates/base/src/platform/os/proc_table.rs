//! Parses the tables of `/proc` (Linux).

/// The number after `key` in a table of `/proc` with lines `key: value [kB]`.
pub fn field(table: &str, key: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let mut words = line.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    if words.next() == Some("kB") { value.checked_mul(1024) } else { Some(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_table_values_parse() {
        assert_eq!(field("A:\t12 kB\nAB: 3\n", "A"), Some(12 * 1024));
        assert_eq!(field("A:\t12 kB\nAB: 3\n", "AB"), Some(3));
        assert_eq!(field("A: x\n", "A"), None);
    }
}
