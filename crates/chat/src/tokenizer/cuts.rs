//! Positions where a text can be cut so that encoding the pieces one by one gives the ids of the whole text.
//!
//! The `tokenizers` crate takes up to 400 bytes of memory per byte of text and cannot be interrupted, so a long text is
//! encoded in pieces. A cut is exact where the tokenizer's regular expression always ends a word. Both expressions
//! below, the one of Qwen2 and 3 and the one of Qwen3.5, always end a word:
//!
//! * between a character that is not white space and a space: a space starts a word or is part of white space;
//! * between a line feed and a character that is not white space: white space with line feeds is a word up to its last
//!   line feed;
//! * between a digit and an ASCII character: a digit is a word by itself.
//!
//! An added token must not span a cut. Texts are never cut for a tokenizer with an added token that could span a cut,
//! and for a tokenizer with another regular expression. NFC joins no characters across a cut, because a cut is next to
//! white space, or between a digit and an ASCII character.

use tokenizers::Tokenizer;

/// Regular expressions that split text into words. The first is used by Qwen2 and Qwen3, and the second by Qwen3.5,
/// whose words may contain combining marks.
const WORD_REGEXES: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Size in bytes from which a piece ends at the next possible cut.
pub(super) const MIN_PIECE: usize = 16 << 10;

/// Rules for the cuts that a tokenizer allows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cuts {
    after_digits: bool,
}

impl Cuts {
    /// The rules for a tokenizer. `None` if texts of this tokenizer must not be cut.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let words = tokenizer.get_pre_tokenizer()?;
        let normalizer = tokenizer.get_normalizer();
        let words = serde_json::to_value(words).ok()?;
        let [split, bytes] = words["pretokenizers"].as_array()?.as_slice() else { return None };
        let known = words["type"] == "Sequence"
            && split["type"] == "Split"
            && split["behavior"] == "Isolated"
            && split["invert"] == false
            && split["pattern"]["Regex"].as_str().is_some_and(|regex| WORD_REGEXES.contains(&regex))
            && bytes["type"] == "ByteLevel"
            && bytes["add_prefix_space"] == false
            && bytes["use_regex"] == false;
        let plain = matches!(normalizer, None | Some(tokenizers::NormalizerWrapper::NFC(_)));
        let added = tokenizer.get_added_tokens_decoder();
        let whole = added.values().all(|token| {
            !token.content.contains(char::is_whitespace) && !token.lstrip && !token.rstrip && !token.single_word
        });
        let digits = added.values().any(|token| token.content.contains(|c: char| c.is_ascii_digit()));
        (known && plain && whole).then_some(Self { after_digits: !digits })
    }

    /// End of the first piece of `text`, in bytes: the first cut after at least `min` bytes, or the end of the text.
    pub fn first(self, text: &str, min: usize) -> usize {
        let boundary = |&at: &usize| text.is_char_boundary(at);
        let from = (0..=min.min(text.len())).rev().find(boundary).unwrap_or(0);
        let Some(mut before) = text[..from].chars().next_back() else { return text.len() };
        for (at, c) in text[from..].char_indices() {
            let digit = self.after_digits && before.is_ascii_digit() && c.is_ascii();
            if digit || (c == ' ' && !before.is_whitespace()) || (before == '\n' && !c.is_whitespace()) {
                return from + at;
            }
            before = c;
        }
        text.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer as ChatTokenizer;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// Texts that the regular expressions distinguish, or that NFC joins.
    const PARTS: [&str; 30] = [
        "a", "The", "'s", "'LL", "'", "é", "e\u{301}", "\u{301}", "\u{338}", "=", "\u{212a}", "Ж", "你好", "。", "，",
        "가", "1", "23", "\u{b2}", "\u{2167}", ".", "!!", "<", "<think>", " ", "  ", "\n", "\r\n", "\t", "\u{2003}",
    ];
    const LONG_PARTS: [&str; 4] = ["\u{1fbe}\u{308}\u{301}", "\u{1112}\u{1161}", "|im_end|>", "<|im_end|>"];

    static DEMO: LazyLock<(ChatTokenizer, Cuts)> = LazyLock::new(|| {
        let dir = test_support::demo();
        let cuts = Cuts::of(&Tokenizer::from_file(dir.join("tokenizer.json")).unwrap());
        (ChatTokenizer::load(&dir).unwrap(), cuts.unwrap())
    });

    #[test]
    fn unknown_tokenizer_is_not_cut() {
        let text = std::fs::read_to_string(test_support::demo().join("tokenizer.json")).unwrap();
        let cuts = |text: &str| Cuts::of(&text.parse().unwrap());
        assert!(cuts(&text).is_some_and(|cuts| cuts.after_digits));
        let changed = |from: &str, to: &str| {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            cuts(&changed)
        };
        assert!(changed(r"|\\p{N}|", r"|\\p{N}{1,3}|").is_none(), "digits in threes");
        assert!(changed("\"type\": \"NFC\"", "\"type\": \"NFKC\"").is_none());
        assert!(changed("<|mask|>", "<mask me>").is_none());
        assert!(changed("<|mask|>", "<mask1>").is_some_and(|cuts| !cuts.after_digits));
    }

    #[test]
    fn piece_ends_at_the_first_cut() {
        let cuts = Cuts { after_digits: true };
        assert_eq!(cuts.first("a b", 4), 3);
        assert_eq!(cuts.first("aaaa", 4), 4);
        assert_eq!(cuts.first("aaaaaa b", 4), 6);
        assert_eq!(cuts.first("aaaa. \nx", 4), 5);
        assert_eq!(cuts.first("aaaa\u{2003}\nxx", 4), 8);
        assert_eq!(cuts.first("aaaa1é2b", 4), 8);
        assert_eq!(cuts.first("aaaa\n\n\n", 4), 7, "the rest is one word");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]
        #[test]
        fn pieces_encode_as_the_whole(
            parts in prop::collection::vec(prop::sample::select([&PARTS[..], &LONG_PARTS].concat()), 0..24),
        ) {
            let text = parts.concat();
            let tokenizer = &DEMO.0;
            let mut ids = Vec::new();
            let mut rest = &*text;
            while !rest.is_empty() {
                let piece;
                (piece, rest) = rest.split_at(DEMO.1.first(rest, 1));
                ids.extend(tokenizer.encode_piece(piece).unwrap());
            }
            prop_assert_eq!(&ids, &tokenizer.encode_piece(&text).unwrap());
            prop_assert!(tokenizer.min_tokens(&text) <= ids.len());
        }
    }
}
