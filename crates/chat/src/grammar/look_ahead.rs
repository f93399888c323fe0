//! Patterns that start with look-ahead, as libraries write them, as several patterns without it.

use crate::schema::format_pattern;

/// zod's pattern of a duration. That of the format matches a part of its texts.
const DURATION: &str = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$";
/// Maximum number of look-aheads of one pattern.
const MAX_PARTS: usize = 7;

/// Patterns that together match the same texts as `pattern`. `None` if `pattern` does not start with look-ahead, or with
/// one that has no equivalent here.
pub fn split(pattern: &str) -> Option<Vec<String>> {
    if pattern == DURATION {
        return format_pattern("duration").map(|pattern| vec![pattern]);
    }
    let mut rest = pattern.strip_prefix('^')?;
    let mut patterns = Vec::new();
    while let Some(ahead) = ["(?=", "(?!"].into_iter().find(|start| rest.starts_with(start)) {
        if patterns.len() == MAX_PARTS {
            return None;
        }
        let end = groups(rest).into_iter().find(|(_, _, depth)| *depth == 0)?.0;
        let inner = rest[ahead.len()..end].trim_start_matches('^');
        patterns.push(if ahead == "(?=" { format!("^{inner}") } else { negated(inner)? });
        rest = &rest[end + 1..];
    }
    if patterns.is_empty() || rest.starts_with(['*', '+', '?', '{']) {
        return None;
    }
    patterns.push(format!("^{rest}"));
    patterns.iter().all(|pattern| top_level_alternatives(pattern).len() == 1).then_some(patterns)
}

/// A pattern of the texts that do not start with `inner`.
fn negated(inner: &str) -> Option<String> {
    let Some(inner) = inner.strip_prefix(".*") else {
        let all_but_end = inner.strip_suffix("*$").filter(|atom| atom_length(atom) == Some(atom.len()));
        return all_but_end.map_or_else(|| Some(format!("^{}$", other_start(inner)?)), |atom| other(atom, ""));
    };
    let (atom, rest) = inner.split_at(atom_length(inner)?);
    // Look-ahead with `.*` stops at the end of the line.
    let same_line = other(atom, "\\n")?;
    let lines = r"(?:\n(?s:.*))?$";
    match rest {
        "" => Some(format!("^{same_line}*{lines}")),
        _ if rest == atom => Some(format!("^(?:{atom}?{same_line})*{atom}?{lines}")),
        _ => None,
    }
}

/// Expression of the texts that do not start with `pattern`: characters, and maybe the end of the text.
fn other_start(pattern: &str) -> Option<String> {
    if pattern == "$" {
        return Some("(?s:.+)".into());
    }
    let (atom, rest) = pattern.split_at(atom_length(pattern)?);
    let longer = if rest.is_empty() { String::new() } else { format!("|{atom}{}", other_start(rest)?) };
    Some(format!("(?:{}(?s:.*){longer})?", other(atom, "")?))
}

/// Expression of the characters other than those of `atom` and `more`.
fn other(atom: &str, more: &str) -> Option<String> {
    let set = atom.strip_prefix('[').and_then(|set| set.strip_suffix(']')).unwrap_or(atom);
    match set.strip_prefix('^') {
        Some(set) => more.is_empty().then(|| format!("[{set}]")),
        None => Some(format!("[^{more}{}{set}]", if set.starts_with('-') { "\\" } else { "" })),
    }
}

/// The length of the first character, escape sequence or class.
fn atom_length(pattern: &str) -> Option<usize> {
    let mut chars = pattern.char_indices();
    let (_, first) = chars.next()?;
    let length = match first {
        '[' if !pattern.contains("\\]") && !pattern.contains("&&") => pattern.find(']')? + 1,
        // An escaped letter may be longer, such as `\u0041`, or no character, such as `\b`.
        '\\' => chars.next().filter(|(_, c)| "dDwWsS".contains(*c) || c.is_ascii_punctuation())?.0 + 1,
        _ if first.is_alphanumeric() || " -_@/:,;#".contains(first) => first.len_utf8(),
        _ => return None,
    };
    Some(length)
}

/// Splits an expression at each `|` outside brackets.
pub fn top_level_alternatives(pattern: &str) -> Vec<&str> {
    let mut start = 0;
    let mut parts = Vec::new();
    for (at, _, _) in groups(pattern).into_iter().filter(|(_, mark, depth)| (*mark, *depth) == ('|', 0)) {
        parts.push(&pattern[start..at]);
        start = at + 1;
    }
    parts.push(&pattern[start..]);
    parts
}

/// The brackets of groups and the `|` of an expression: their offsets, and how many groups are open after each.
fn groups(pattern: &str) -> Vec<(usize, char, i32)> {
    let mut depth = 0;
    let mut in_class = false;
    let mut escaped = false;
    let mut marks = Vec::new();
    for (at, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            '[' => in_class = true,
            '(' | ')' | '|' if !in_class => {
                depth += i32::from(c == '(') - i32::from(c == ')');
                marks.push((at, c, depth));
            }
            _ => {}
        }
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::{super::json_schema::prepare, *};
    use fancy_regex::Regex;
    use serde_json::json;
    use test_support::mutate::Dice;

    /// Patterns of Pydantic and zod.
    const PATTERNS: [&str; 15] = [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^(?=.{1,5}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9]+)*\.?$",
        r"^(?=.*[A-Z])(?=.*\d)[\s\S]{2,}",
        r"^(?!$)a*",
        r"^(?!-)(?!.*--)[a-z.\n-]+$",
        r"^(?!.*@)[\s\S]*",
        r"^(?!.*aa)(?s:.*)$",
        r"^(?![^a-z])",
        r"^(?!\d)\w+$",
        r"^(?![)(|]*$)(?=[(])[\s\S]",
        "^(?!ab)[a-c]",
        r"^(?!-0$)-?\d+$",
        r"^(?!a\.)(?!-[0a-]$).*$",
    ];

    #[test]
    fn split_patterns_match_the_same_texts() {
        let mut dice = Dice(1);
        for pattern in PATTERNS {
            let parts = split(pattern).unwrap();
            let whole = Regex::new(pattern).unwrap();
            let parts: Vec<Regex> = parts.iter().map(|part| Regex::new(part).unwrap()).collect();
            for _ in 0..3000 {
                let text: String = (0..dice.below(9)).map(|_| *dice.pick(b"aaA0.-+@\n(|") as char).collect();
                let is_match = parts.iter().all(|part| part.is_match(&text).unwrap());
                assert_eq!(is_match, whole.is_match(&text).unwrap(), "{pattern} {text:?}");
            }
        }
    }

    #[test]
    fn duration_of_zod_allows_the_format() {
        let part = split(DURATION).unwrap().remove(0);
        let [whole, part] = [DURATION, &part].map(|pattern| Regex::new(pattern).unwrap());
        let mut count = 0;
        for set in 0..256 {
            let units = ["1Y", "2M", "30D", "T", "4H", "5M", "60S", "7W"].into_iter().enumerate();
            let text: String = units.filter(|(bit, _)| set >> bit & 1 == 1).map(|(_, unit)| unit).collect();
            if part.is_match(&format!("P{text}")).unwrap() {
                assert!(whole.is_match(&format!("P{text}")).unwrap(), "{text}");
                count += 1;
            }
        }
        assert_eq!(count, 51);
    }

    #[test]
    fn other_look_ahead_is_refused() {
        for pattern in [
            "a(?!b)",
            "^a(?=b)",
            "^(?!ab+)c",
            "^(?!a)b|c",
            "^(?!a|b)c",
            "^(?=a|b)c",
            "^(?!a)*b",
            "^(?<!a)b",
            "^(?!a",
            "^a",
        ] {
            assert_eq!(split(pattern), None, "{pattern}");
        }
        let schema = |pattern: &str| json!({"type": "string", "pattern": pattern});
        for pattern in PATTERNS {
            let prepared = prepare(&schema(pattern), true).unwrap();
            assert!(prepared["allOf"].as_array().unwrap().len() > 1, "{prepared}");
        }
        let error = prepare(&schema("^(?!ab+)c"), true).unwrap_err();
        assert!(error.path == ".pattern" && error.reason.contains("look-around"), "{error:?}");
    }
}
