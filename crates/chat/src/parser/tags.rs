//! Reads the tags of tool calls, also as models misspell them, in text that may end anywhere.

pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";

/// The words of opening tags. Models also write those of other formats.
const WORDS: [(&str, Word); 8] = [
    ("tool_call", Word::ToolCall),
    ("tool_calls", Word::ToolCall),
    ("function_call", Word::ToolCall),
    ("function_calls", Word::ToolCall),
    ("function", Word::Function),
    ("invoke", Word::Invoke),
    ("parameter", Word::Parameter),
    ("param", Word::Parameter),
];
/// The words of [`WORDS`] that models misspell: with one letter too many, too few, wrong or swapped.
const MISSPELT: [&str; 3] = ["tool_call", "function", "parameter"];
/// Maximum length of a name in a tag.
pub(super) const MAX_NAME: usize = 1000;
/// Maximum length of a misspelt closing tag.
const MAX_CLOSING_TAG: usize = 80;
/// Number of letters of a closing tag that is cut at the end of a line.
const MIN_CUT_WORD: usize = "tool_c".len();
/// Maximum number of `<tool_call>` before a call.
const MAX_REPEATED: usize = 4;
/// Maximum number of bytes of white space before a tag. An answer of white space must not be read again and again.
pub(super) const MAX_GAP: usize = 1000;

/// Number of bytes of an answer that may be read again, because the text after them decided that they mean something
/// else. Adversarial text would be read again and again.
pub(super) const MAX_READ_AGAIN: usize = 1 << 20;

/// State of the input: more text can follow, or the answer has ended for a reason.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum InputEnd {
    MoreToCome,
    /// The model ended its answer.
    Complete,
    /// The token limit ended the answer.
    Truncated,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TagKind {
    ToolCall,
    Function(String),
    Parameter(String),
    EndToolCall,
    EndFunction,
    EndParameter,
}

impl TagKind {
    pub fn closes(&self) -> bool {
        matches!(self, Self::EndToolCall | Self::EndFunction | Self::EndParameter)
    }
}

#[derive(Debug)]
pub(super) struct Tag {
    pub kind: TagKind,
    pub length: usize,
    /// False if the tag is misspelt: a wrong closing tag, a missing `>`, `name=`, or attributes or a value after the
    /// name.
    pub is_exact: bool,
    /// True for `<NAME>` and `</NAME>`, the name of a parameter as a tag.
    pub is_name: bool,
}

/// Result of reading the start of a text.
#[derive(Debug)]
pub(super) enum Reading<T> {
    Found(T),
    /// More text decides.
    Unfinished,
    Other,
}

pub(super) type TagAt = Reading<Tag>;

impl<T> Reading<T> {
    pub fn and_then<U>(self, convert: impl FnOnce(T) -> Option<U>) -> Reading<U> {
        match self {
            Self::Found(found) => convert(found).map_or(Reading::Other, Reading::Found),
            Self::Unfinished => Reading::Unfinished,
            Self::Other => Reading::Other,
        }
    }
}

/// Reads the tag at the start of `text`. Models also write `<|tool_call|>`, `<Function=NAME>` and `<invoke name="NAME">`.
pub(super) fn tag_at(text: &str) -> TagAt {
    if ["</", "<|/"].iter().any(|start| text.starts_with(start)) {
        return closing_tag(text);
    }
    let Some(inner) = text.strip_prefix('<') else {
        return if text.is_empty() { TagAt::Unfinished } else { TagAt::Other };
    };
    let inner = inner.strip_prefix('|').unwrap_or(inner);
    let is_part = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_';
    let length = inner.bytes().take(MAX_CLOSING_TAG).take_while(is_part).count();
    let (word, after) = inner.split_at(length);
    let start = text.len() - after.len();
    let lower = word.to_ascii_lowercase();
    if after.is_empty() {
        return if may_become_word(&lower) { TagAt::Unfinished } else { TagAt::Other };
    }
    let is_plain = word == lower && start == 1 + length && WORDS.iter().any(|(known, _)| *known == word);
    match word_of(&lower) {
        // Models also write it around JSON.
        Some(Word::Function) if after.starts_with('>') && lower == "function" => {
            found(TagKind::ToolCall, start + 1, false)
        }
        Some(Word::Function) => header(after, start, TagKind::Function, is_plain),
        Some(Word::Invoke) => header(after, start, TagKind::Function, false),
        Some(Word::Parameter) => header(after, start, TagKind::Parameter, is_plain && word == "parameter"),
        Some(Word::ToolCall) => {
            let end = after.strip_prefix([' ', '|']).unwrap_or(after);
            match end.chars().next() {
                Some('>') => found(TagKind::ToolCall, text.len() - end.len() + 1, text.starts_with("<tool_call>")),
                Some('\r' | '\n' | '<') => found(TagKind::ToolCall, start, false),
                Some(_) => TagAt::Other,
                None => TagAt::Unfinished,
            }
        }
        None => TagAt::Other,
    }
}

/// True if the whole `word` comes after the `<` that `text` starts with.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let is_end = |text: &str| !text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    text.get(1..=word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word) && is_end(&text[1 + word.len()..]))
}

/// Meaning of a word in a tag.
#[derive(Clone, Copy)]
enum Word {
    ToolCall,
    Function,
    Invoke,
    Parameter,
}

/// The meaning of a word in lower case, also if one letter is wrong.
fn word_of(word: &str) -> Option<Word> {
    let meaning = |known: &str| WORDS.iter().find(|(other, _)| *other == known).map(|(_, meaning)| *meaning);
    meaning(word).or_else(|| {
        let is_meant = |known: &&str| one_letter_differs(word, known, |end, known_end| end == known_end);
        MISSPELT.into_iter().find(is_meant).and_then(meaning)
    })
}

/// True if a word of a tag may start with `start`.
fn may_become_word(start: &str) -> bool {
    WORDS.iter().any(|(known, _)| known.starts_with(start))
        || MISSPELT.iter().any(|known| one_letter_differs(start, known, |end, known_end| known_end.starts_with(end)))
}

/// True if `word` starts with the first letter of `known`, and the rest `fits` without one letter that is added, left
/// out, replaced or swapped with the next one.
fn one_letter_differs(word: &str, known: &str, fits: impl Fn(&[u8], &[u8]) -> bool) -> bool {
    let same = word.bytes().zip(known.bytes()).take_while(|(letter, meant)| letter == meant).count();
    let end = &word.as_bytes()[same..];
    let known_end = &known.as_bytes()[same..];
    let skipped = |count: usize, known_count: usize| {
        let ends = end.get(count..).zip(known_end.get(known_count..));
        ends.is_some_and(|(end, known_end)| fits(end, known_end))
    };
    let is_swapped = matches!((end, known_end), ([a, b, ..], [c, d, ..]) if a == d && b == c);
    same > 0 && (skipped(1, 0) || skipped(0, 1) || skipped(1, 1) || is_swapped && skipped(2, 2))
}

pub(super) fn found(kind: TagKind, length: usize, is_exact: bool) -> TagAt {
    TagAt::Found(Tag { kind, length, is_exact, is_name: false })
}

/// A tag that is the name of a parameter.
pub(super) fn found_name(kind: TagKind, length: usize) -> TagAt {
    TagAt::Found(Tag { kind, length, is_exact: true, is_name: true })
}

/// Reads the rest of `<function=NAME>` or `<parameter=NAME>` after the word, which ends at `word`.
fn header(after: &str, word: usize, kind: fn(String) -> TagKind, is_plain: bool) -> TagAt {
    let is_parameter = matches!(kind(String::new()), TagKind::Parameter(_));
    let end = match after.find(['>', '<', '\n']) {
        // A name that is longer is no name, wherever the text is cut.
        end if end.unwrap_or(after.len()) > MAX_NAME => return TagAt::Other,
        Some(end) => end,
        None => return TagAt::Unfinished,
    };
    let whole = after[..end].trim();
    let inner = if is_parameter { without_attributes(whole) } else { whole };
    let is_closed = after[end..].starts_with('>');
    let is_attribute = after.starts_with([' ', '\t']) && inner.starts_with("name");
    let value = if is_attribute { inner["name".len()..].trim_start() } else { inner };
    let Some(name) = value.strip_prefix('=') else { return TagAt::Other };
    let name = name.trim();
    let marks = [('"', '"'), ('\'', '\''), ('“', '”'), ('‘', '’')];
    let quoted = marks.into_iter().find_map(|(open, close)| name.strip_prefix(open)?.strip_suffix(close));
    let quoted = quoted.filter(|name| !is_attribute || !name.contains(['"', '\'']));
    let name = quoted.unwrap_or(name).trim();
    // Models also close the tag of a call without parameters at once.
    let name = if is_parameter { name } else { name.trim_end_matches(['/', ' ']) };
    // `<function name="a" type="b">` and `<parameter name="a"/>` are XML.
    let is_xml = is_attribute && quoted.is_none() && name.contains([' ', '"', '\'']);
    if name.is_empty() || is_xml || after[end..].starts_with('<') {
        return TagAt::Other;
    }
    // A carriage return belongs to the line end.
    let end = if is_closed { end + 1 } else { after[..end].trim_end_matches('\r').len() };
    found(kind(name.into()), word + end, is_plain && is_closed && !is_attribute && inner == whole)
}

/// The text before attributes such as `type="string"`, which models of other formats write after the name of a parameter.
fn without_attributes(text: &str) -> &str {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let before = ['"', '\''].into_iter().find_map(|mark| text.strip_suffix(mark)?.rsplit_once(mark));
    let Some(attribute) = before.and_then(|(before, _)| before.trim_end().strip_suffix('=')) else { return text };
    let attribute = attribute.trim_end();
    let name = attribute.trim_end_matches(is_part);
    // The first word is no such attribute. An attribute `value` is no markup.
    let is_attribute = name.ends_with([' ', '\t']) && !["", "value"].contains(&&attribute[name.len()..]);
    if is_attribute { without_attributes(name.trim_end()) } else { text }
}

/// Reads a closing tag. Models also write `</ function>`, `</param>`, `</parameter/>`, `</parameter=NAME>`,
/// `</parameter_function>`, and leave out the `>` at the end of a line.
fn closing_tag(text: &str) -> TagAt {
    let start = if text.starts_with("</") { 2 } else { 3 };
    let inner = &text[start..];
    let is_part = |c: char| c.is_ascii_alphanumeric() || " _-/|=.:".contains(c);
    let Some(end) = inner.find(|c| !is_part(c)) else {
        return if inner.len() > MAX_CLOSING_TAG { TagAt::Other } else { TagAt::Unfinished };
    };
    let is_closed = inner[end..].starts_with('>');
    if end > MAX_CLOSING_TAG || !(is_closed || inner[end..].starts_with(['\r', '\n', '<'])) {
        return TagAt::Other;
    }
    let word = inner[..end].split('=').next().unwrap_or_default();
    let word = word.trim_matches([' ', '|']).to_ascii_lowercase().replace("tool call", "tool_call");
    // The end of the answer or of a line may cut a word.
    let is_cut = |known: &str| !is_closed && word.len() >= MIN_CUT_WORD && known.starts_with(&*word);
    let kind = match word.as_str() {
        word if word.contains([' ', '.', ':']) => return TagAt::Other,
        word if word.starts_with("param") => TagKind::EndParameter,
        word if word.starts_with("function_call") => TagKind::EndToolCall,
        word if word.starts_with("func") => TagKind::EndFunction,
        word if word.starts_with("tool") && word.contains("call") || is_cut("tool_call") => TagKind::EndToolCall,
        word => match word_of(word) {
            Some(Word::ToolCall) => TagKind::EndToolCall,
            Some(Word::Function | Word::Invoke) => TagKind::EndFunction,
            Some(Word::Parameter) => TagKind::EndParameter,
            None => return TagAt::Other,
        },
    };
    let is_exact = ["</tool_call>", "</function>", "</parameter>"].iter().any(|tag| text.starts_with(tag));
    found(kind, start + end + usize::from(is_closed), is_exact)
}

/// Reads `<NAME>`, `</NAME>`, or the start of `<NAME ATTRIBUTES>`. No tag if the name has a `=` or `</NAME>` ends a call.
pub(super) fn own_tag(text: &str, name: &str) -> TagAt {
    let Some(tag) = text.strip_prefix('<') else { return TagAt::Other };
    let inner = tag.strip_prefix('/').unwrap_or(tag);
    let closes = inner.len() < tag.len();
    let Some(after) = inner.strip_prefix(name) else {
        return if name.starts_with(inner) { TagAt::Unfinished } else { TagAt::Other };
    };
    if !may_be_tag(name) {
        return TagAt::Other;
    }
    let kind = if closes { TagKind::EndParameter } else { TagKind::Parameter(name.into()) };
    let length = text.len() - after.len();
    match after.chars().next() {
        None => TagAt::Unfinished,
        Some('>') => found_name(kind, length + 1),
        Some(c) if !closes && c.is_whitespace() => found_name(kind, length),
        Some(_) => TagAt::Other,
    }
}

fn may_be_tag(name: &str) -> bool {
    let end = tag_at(&format!("</{name}>"));
    let is_other = matches!(end, TagAt::Found(Tag { kind, .. }) if kind != TagKind::EndParameter);
    !name.is_empty() && !name.contains('=') && !is_other
}

/// The text after one or more `<tool_call>`. `None` if too much white space follows one.
pub(super) fn after_tool_calls(mut text: &str) -> Option<&str> {
    for _ in 0..MAX_REPEATED {
        let TagAt::Found(Tag { kind: TagKind::ToolCall, length, .. }) = tag_at(text) else { break };
        let after = &text[length..];
        // Only JSON may be in a Markdown fence. A call in a fence is text.
        text = after_opening(after).filter(|json| !json.starts_with('<')).or_else(|| after_gap(after))?;
    }
    Some(text)
}

/// True for white space, and for characters without width, which models write between tags.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}')
}

/// The text after white space. `None` if there is too much white space to wait for a tag after it.
pub(super) fn after_gap(text: &str) -> Option<&str> {
    let after = text.trim_start_matches(is_space);
    (text.len() - after.len() <= MAX_GAP).then_some(after)
}

/// The text after white space and the start of a Markdown fence, which models write around JSON. Empty if more text
/// decides.
pub(super) fn after_opening(text: &str) -> Option<&str> {
    let after = after_gap(text)?;
    let info = after.trim_start_matches('`');
    let marks = after.len() - info.len();
    let rest = info.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
    if marks == 0 || marks > 3 || info.len() - rest.len() > MAX_CLOSING_TAG {
        return Some(after);
    }
    match rest.chars().next() {
        None => Some(""),
        Some('\r' | '\n') if marks == 3 => after_gap(rest),
        Some(_) => Some(after),
    }
}
