//! Prepares a template's source before minijinja parses it: checks limits, and replaces transformers' `generation`
//! tags.
//!
//! minijinja parses recursively and has no limit, so a hostile template could overflow the stack and end the process.
//! The limits bound the depth of the recursion. Inside a tag, each level of nesting takes at least one word, and each
//! `elif` is one level below the previous `elif`.

/// Maximum size of a source in bytes. Templates in use have about ten thousand bytes.
const MAX_BYTES: usize = 1 << 20;
/// Maximum number of words and operators inside one `{{ }}` or `{% %}`. Templates in use have about forty words.
const MAX_WORDS: usize = 2000;
/// Maximum number of `elif` tags.
const MAX_ELIFS: usize = 500;

/// Returns the source that minijinja parses.
///
/// # Errors
/// The source is over a limit.
pub(super) fn prepare(source: &str) -> Result<String, String> {
    check_limits(source)?;
    Ok(replace_generation_tags(source))
}

fn check_limits(source: &str) -> Result<(), String> {
    if source.len() > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let mut rest = source;
    let mut elifs = 0;
    while let Some(at) = find_tag(rest) {
        let tag = &rest[at..];
        if tag.starts_with("{#") {
            rest = &tag[tag.find("#}").map_or(tag.len(), |end| end + 2)..];
            continue;
        }
        let is_block = tag.starts_with("{%");
        let close = if is_block { "%}" } else { "}}" };
        let mut inside = &tag[2..];
        let mut words = 0;
        let mut open_brackets = 0usize;
        while !(inside.is_empty() || open_brackets == 0 && inside.starts_with(close)) {
            let (word, after) = inside.split_at(word_len(inside));
            inside = after;
            match word {
                "(" | "[" | "{" => open_brackets += 1,
                ")" | "]" | "}" => open_brackets = open_brackets.saturating_sub(1),
                "elif" => elifs += 1,
                _ if word.trim().is_empty() => continue,
                _ => {}
            }
            words += 1;
            if words > MAX_WORDS {
                return Err(format!("a tag has more than {MAX_WORDS} words"));
            }
        }
        if elifs > MAX_ELIFS {
            return Err(format!("it has more than {MAX_ELIFS} elif"));
        }
        rest = inside;
        if is_block && tag_name(tag) == "raw" {
            rest = &rest[find_endraw(rest)..];
        }
    }
    Ok(())
}

/// Replaces `{% generation %}`, which transformers uses to mark the text to train on, by `{% with %}`. Both are blocks
/// that print their content.
fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%-+}".contains(c) || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Offset of the first tag of any kind. Separate searches for each kind could scan the whole text every time, for
/// example in a text with thousands of tags of one kind and without tags of another kind.
fn find_tag(text: &str) -> Option<usize> {
    let opens = |&at: &usize| matches!(text.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#'));
    text.match_indices('{').map(|(at, _)| at).find(opens)
}

/// Offset of the tag that ends a raw block.
fn find_endraw(text: &str) -> usize {
    let mut tags = text.match_indices("{%").map(|(at, _)| at);
    tags.find(|&at| tag_name(&text[at..]) == "endraw").unwrap_or(text.len())
}

/// First word of a tag.
fn tag_name(tag: &str) -> &str {
    let inside = tag[2..].trim_start_matches(['-', '+']).trim_start();
    &inside[..word_len(inside)]
}

/// Length of the first word of a tag: a string, a name or number, a run of white space, or one punctuation character.
fn word_len(text: &str) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let run = |same: fn(char) -> bool| text.find(|c| !same(c)).unwrap_or(text.len());
    match first {
        '\'' | '"' => {
            let mut escaped = false;
            let end = text.char_indices().skip(1).find(|&(_, c)| {
                let ends = c == first && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(text.len(), |(at, _)| at + 1)
        }
        c if c.is_alphanumeric() || c == '_' => run(|c| c.is_alphanumeric() || c == '_'),
        c if c.is_whitespace() => run(char::is_whitespace),
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::thread_cpu::cpu_time_of;

    #[test]
    fn limits_are_checked_in_linear_time() {
        // A megabyte of tags of one kind, without tags of other kinds. A search for each kind at every tag would take
        // minutes.
        for tag in ["{%a%}", "{{a}}", "{##}", "{{''}}", "{{a+b}}", "{%raw%}{%endraw%}", "{%-a-%}", "{ {", "{%'"] {
            let source = tag.repeat(MAX_BYTES / tag.len());
            let time = cpu_time_of(|| _ = prepare(&source));
            assert!(time.as_secs() < 5, "{tag} took {time:?}");
        }
    }

    #[test]
    fn source_over_a_limit_is_refused() {
        for (source, reason) in [
            (format!("{{{{ {} x }}}}", "not ".repeat(5000)), "words"),
            (format!("{{{{ x{} }}}}", "|trim".repeat(5000)), "words"),
            (format!("{{{{ {{'a': {{}}}} + {} x }}}}", "not ".repeat(5000)), "words"),
            (format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(1000)), "elif"),
            ("x".repeat(2 << 20), "bytes"),
        ] {
            assert!(prepare(&source).unwrap_err().contains(reason));
        }
    }

    #[test]
    fn strings_comments_and_raw_are_skipped() {
        let words = "a ".repeat(3000);
        for source in [
            format!("{{{{ '{words}' }}}}"),
            format!("{{# {words} #}}"),
            words.clone(),
            format!("{{% raw %}}{{{{ {words} {{% endraw %}}"),
        ] {
            assert_eq!(prepare(&source).unwrap(), source);
        }
    }

    #[test]
    fn generation_tags_become_with_blocks() {
        let source = "{%- generation -%}{{ generation }}{% endgeneration %}";
        assert_eq!(prepare(source).unwrap(), "{%- with -%}{{ generation }}{% endwith %}");
    }
}
