//! A template's source with filters put where minijinja makes new text unseen: behind the operands of `+`, `~` and `*`,
//! around slices, and inside long plain text. `bounds` says what they do.

use super::bounds::{ADDED, FACTOR, MULTIPLIED, PLAIN, SLICED, WRITTEN};

/// Bytes of a template's source. Those in use have some ten thousand.
const SOURCE: usize = 1 << 20;
/// Words and signs inside one pair of `{{ }}` or `{% %}`: no expression nests deeper. Those in use have some forty.
const WORDS: usize = 2000;
/// `elif`s, each of which is nested in the one before.
const ELIFS: usize = 500;
/// Bytes of plain text that may go uncounted each time they are written, and the most without a place to count at.
const STRETCH: usize = 256;
const BLANK: usize = 4096;

/// Words that are no operands. Beside them the first word of a `{% %}` is none.
const KEYWORDS: [&str; 7] = ["and", "or", "not", "in", "is", "if", "else"];

/// The source with its filters; an error in words if it nests too deep or is too long.
pub(super) fn counted(source: &str) -> Result<String, String> {
    if source.len() > SOURCE {
        return Err(format!("it has more than {SOURCE} bytes"));
    }
    let mut out = String::with_capacity(source.len() * 2);
    let (mut rest, mut elifs) = (source, 0);
    while let Some(at) = tag(rest) {
        let (before, tag) = rest.split_at(at);
        plain(&mut out, before)?;
        if tag.starts_with("{#") {
            let end = tag.find("#}").map_or(tag.len(), |end| end + 2);
            out.push_str(&tag[..end]);
            rest = &tag[end..];
            continue;
        }
        let close = if tag.starts_with("{%") { "%}" } else { "}}" };
        out.push_str(&tag[..2]);
        let mut expression = Expression { out, frames: vec![Frame::default()] };
        let (mut inside, mut words, mut first) = (&tag[2..], 0, true);
        while !(inside.is_empty() || expression.frames.len() == 1 && inside.starts_with(close)) {
            let (word, opens) = (&inside[..word(inside)], inside.len() + 2 == tag.len());
            inside = &inside[word.len()..];
            if word.trim().is_empty() {
                expression.out.push_str(word);
                continue;
            }
            // `+%}` and `{%+` speak of white space.
            let control = inside.starts_with(close) || opens && "-+".contains(word);
            let keyword = KEYWORDS.contains(&word) || first && close == "%}" && !control;
            expression.take(word, inside, control, keyword);
            first &= control;
            elifs += usize::from(word == "elif");
            words += 1;
            if words > WORDS {
                return Err(format!("a tag has more than {WORDS} words"));
            }
        }
        expression.ended();
        out = expression.out;
        if elifs > ELIFS {
            return Err(format!("it has more than {ELIFS} elif"));
        }
        rest = inside;
        if tag.starts_with("{%") && name(tag) == "raw" {
            let end = raw(rest);
            if end > BLANK {
                return Err(format!("a raw block has more than {BLANK} bytes"));
            }
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    plain(&mut out, rest)?;
    Ok(out)
}

/// An expression between brackets, or a whole tag. Places are bytes of the output.
#[derive(Default)]
struct Frame {
    /// The bracket indexes what stands before it.
    subscript: bool,
    /// A colon has been seen: the index is a slice.
    slice: bool,
    /// The last operand begins here, its sign included.
    start: usize,
    /// The product that the last operand is part of begins here.
    product: usize,
    /// An operand stands before the next word.
    operand: bool,
    /// The next word goes on with the operand before it, as after a dot or a sign.
    continues: bool,
    /// The next operand goes on with the product before it.
    multiplies: bool,
    /// A right operand began here; the filter is its, when it ends.
    right: Option<(usize, &'static str)>,
}

impl Frame {
    fn begin(&mut self, at: usize) {
        if !self.continues {
            self.start = at;
            if !self.multiplies {
                self.product = at;
            }
            if let Some((begins @ usize::MAX, _)) = &mut self.right {
                *begins = at;
            }
        }
    }
}

struct Expression {
    out: String,
    /// The innermost last.
    frames: Vec<Frame>,
}

impl Expression {
    /// Puts `filter` behind what begins at `start` and has just ended.
    fn filter(&mut self, start: usize, filter: &str) {
        let space = self.out.split_off(self.out.trim_end().len());
        self.out.insert(start.min(self.out.len()), '(');
        self.out.push_str(")|");
        self.out.push_str(filter);
        // White space stands between a filter and a `-%}`.
        self.out.push_str(&space);
    }

    /// The operand before the next word has ended; it takes the filter that waits for it.
    fn ended(&mut self) {
        if let Some(Frame { operand: true, right, .. }) = self.frames.last_mut()
            && let Some((start, filter)) = right.take()
        {
            self.filter(start, filter);
        }
    }

    /// Takes a `word`, which `after` follows. A sign in `control` speaks of white space; a `keyword` is no operand.
    fn take(&mut self, word: &str, after: &str, control: bool, keyword: bool) {
        let power = word == "*" && (after.starts_with('*') || self.out.ends_with('*'));
        if !matches!(word, "." | "(" | "[" | "|") && !power {
            self.ended();
        }
        let at = self.out.len();
        let Some(frame) = self.frames.last_mut() else { return };
        match word {
            "(" | "[" | "{" => {
                let follows = frame.operand && word != "{";
                if !follows {
                    frame.begin(at);
                }
                self.out.push_str(word);
                self.frames.push(Frame { subscript: follows && word == "[", ..Frame::default() });
            }
            ")" | "]" | "}" => {
                self.out.push_str(word);
                let closed = if self.frames.len() > 1 { self.frames.pop() } else { None };
                let Some(frame) = self.frames.last_mut() else { return };
                (frame.operand, frame.continues) = (true, false);
                let start = frame.start;
                if closed.is_some_and(|closed| closed.subscript && closed.slice) {
                    self.out.insert(start.min(self.out.len()), '(');
                    self.out.push('|');
                    self.out.push_str(SLICED);
                    self.out.push(')');
                }
            }
            "." | "|" => {
                frame.continues = frame.operand;
                frame.operand = false;
                self.out.push_str(word);
            }
            _ if word.starts_with(|c: char| c.is_alphanumeric() || "_'\"".contains(c)) => {
                let keyword = keyword && !frame.continues;
                if !keyword {
                    frame.begin(at);
                }
                (frame.operand, frame.continues, frame.multiplies) = (!keyword, false, false);
                self.out.push_str(word);
            }
            _ => {
                let filters = match word {
                    _ if !frame.operand || control || power => None,
                    "+" => Some((frame.start, ADDED, ADDED)),
                    "~" => Some((frame.start, WRITTEN, WRITTEN)),
                    "*" => Some((frame.product, MULTIPLIED, FACTOR)),
                    _ => None,
                };
                frame.slice |= word == ":";
                frame.multiplies = matches!(word, "*" | "/" | "%") && !control;
                if word == "-" && !frame.operand && !control {
                    frame.begin(at);
                    frame.continues = true;
                } else {
                    frame.continues = false;
                }
                frame.operand = false;
                if let Some((start, left, right)) = filters {
                    frame.right = Some((usize::MAX, right));
                    self.filter(start, left);
                }
                self.out.push_str(word);
            }
        }
    }
}

/// Writes plain text. A long one is parted by expressions that print nothing and count; they stand behind characters that
/// are no white space, so that no rule about white space beside tags sees them.
fn plain(out: &mut String, text: &str) -> Result<(), String> {
    let mut from = 0;
    for (at, c) in text.char_indices() {
        let (next, stretch) = (at + c.len_utf8(), at - from);
        if stretch > BLANK {
            return Err(format!("it has more than {BLANK} blank characters in a row"));
        }
        if stretch >= STRETCH && !c.is_whitespace() && !"{}%#".contains(c) && next < text.len() {
            out.push_str(&text[from..next]);
            out.push_str(&format!("{{{{ ''|{PLAIN}({}) }}}}", next - from));
            from = next;
        }
    }
    out.push_str(&text[from..]);
    Ok(())
}

/// The bytes before the first tag of any kind. One search for all kinds: a text may have thousands of one and none of the others.
fn tag(text: &str) -> Option<usize> {
    let opens = |&at: &usize| matches!(text.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#'));
    text.match_indices('{').map(|(at, _)| at).find(opens)
}

/// The bytes before the tag that ends a raw block.
fn raw(text: &str) -> usize {
    let tags = text.match_indices("{%").map(|(at, _)| at);
    tags.into_iter().find(|&at| name(&text[at..]) == "endraw").unwrap_or(text.len())
}

/// The first word of a tag.
fn name(tag: &str) -> &str {
    let inside = tag[2..].trim_start_matches(['-', '+']).trim_start();
    &inside[..word(inside)]
}

/// The length of the first word of a tag: a string, a name or number, a run of white space, or one sign.
fn word(text: &str) -> usize {
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

    #[test]
    fn operands_have_their_filters() {
        // S, T, P, F and C stand for the filters of sums, text, products, factors and slices.
        for (source, wanted) in [
            ("{{ a ~ b.c(1)[0] -}}", "{{ (a)|T ~ (b.c(1)[0])|T -}}"),
            ("{{ a ~ b + 'x~y' ~ f(1) }}", "{{ (a)|T ~ ((b)|T)|S + (('x~y')|S)|T ~ (f(1))|T }}"),
            ("{%+ if a +%} + {%- set x = a[0]+-1 -%}", "{%+ if a +%} + {%- set x = (a[0])|S+(-1)|S -%}"),
            ("{{ +1 }}{{ f(+1) }}{% if +1 %}{{ {'a': 1+2}}}", "{{ +1 }}{{ f(+1) }}{% if +1 %}{{ {'a': (1)|S+(2)|S}}}"),
            ("{# a + b #}a + b{{ 'it\\'s' + '}}' }}", "{# a + b #}a + b{{ ('it\\'s')|S + ('}}')|S }}"),
            ("{{ -a * b|f(c) if d }}", "{{ (-a)|P * (b|f(c))|F if d }}"),
            ("{{ a * b * c }}", "{{ ((a)|P * (b)|F)|P * (c)|F }}"),
            ("{{ 1 + a // 2 * -b ** 2 }}", "{{ (1)|S + ((a)|S // 2)|P * (-b ** 2)|F }}"),
            ("{{ a ** 2 * 'x' }}", "{{ (a ** 2)|P * ('x')|F }}"),
            ("{% for m in messages[::-1] %}", "{% for m in (messages[::-1]|C) %}"),
            ("{{ not a.b[1:c[2:]].d[0] }}", "{{ not (a.b[1:(c[2:]|C)]|C).d[0] }}"),
            ("{% do (a)[1:] %}{{ {'a': b}['a'] }}", "{% do ((a)[1:]|C) %}{{ {'a': b}['a'] }}"),
            ("{{ call.do + a.in.b[1:] }}", "{{ (call.do)|S + ((a.in.b[1:]|C))|S }}"),
            ("{% raw %}{{ a + b }}{%- endraw %}", "{% raw %}{{ a + b }}{%- endraw %}"),
        ] {
            let names = [("|S", ADDED), ("|T", WRITTEN), ("|P", MULTIPLIED), ("|F", FACTOR), ("|C", SLICED)];
            let wanted =
                names.iter().fold(wanted.to_string(), |text, (short, name)| text.replace(short, &format!("|{name}")));
            assert_eq!(counted(source).unwrap(), wanted, "{source}");
        }
    }

    #[test]
    fn long_plain_text_is_parted_where_nothing_is_stripped() {
        let source = format!("{}{}    {{% if a %}}", "word ".repeat(100), " ".repeat(300));
        let parted = counted(&source).unwrap();
        assert_eq!(parted.matches("{{ ''|counted_plain(").count(), 1, "{parted}");
        assert!(parted.ends_with(&format!("word{}{{% if a %}}", " ".repeat(305))), "{parted}");
    }

    #[test]
    fn a_long_template_is_read_once() {
        // A megabyte of each kind of tag without the others. Read anew at every tag, each takes minutes.
        for tag in ["{%a%}", "{{a}}", "{##}", "{{''}}", "{{a+b}}", "{%raw%}{%endraw%}", "{%-a-%}", "{ {", "{%'"] {
            let source = tag.repeat(SOURCE / tag.len());
            let begun = std::time::Instant::now();
            let _ = counted(&source);
            assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{tag} took {:?}", begun.elapsed());
        }
    }

    #[test]
    fn what_nests_too_deep_or_is_too_long_is_refused() {
        for (source, why) in [
            (format!("{{{{ {} x }}}}", "not ".repeat(5000)), "words"),
            (format!("{{{{ x{} }}}}", "|trim".repeat(5000)), "words"),
            (format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(1000)), "elif"),
            ("x".repeat(2 << 20), "bytes"),
            (" ".repeat(5000), "blank"),
            (format!("{{% raw %}}{}{{% endraw %}}", "x".repeat(5000)), "raw"),
        ] {
            assert!(counted(&source).unwrap_err().contains(why));
        }
    }
}
