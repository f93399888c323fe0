//! A model's tokenizer: text to token ids and back.

mod added;
mod cuts;

use crate::error::ChatError;
use cuts::{Cuts, MIN_PIECE};
use moestro_base::platform::read_json_file;
use serde_json::Value;
use std::path::Path;

/// A byte-level BPE tokenizer, read from `tokenizer.json`.
///
/// The `tokenizers` crate encodes. Decoding is a table lookup: each id has fixed bytes, so each token of a stream is
/// decoded without looking at earlier tokens.
pub struct Tokenizer {
    encoder: tokenizers::Tokenizer,
    /// Bytes of all tokens, concatenated. Token `id` is `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    /// End of each token in `bytes`, by token id.
    ends: Vec<usize>,
    /// Ids of control tokens, sorted. Control tokens have bytes but add no text.
    special: Vec<u32>,
    /// Ids of all tokens outside the BPE vocabulary, sorted: control tokens and markup.
    added: Vec<u32>,
    /// Positions where a text may be cut. `None` if the texts of this tokenizer must not be cut.
    cuts: Option<Cuts>,
    /// Number of bytes of the longest token. `None` if the length of a text gives no lower bound for its number of
    /// tokens.
    longest_token: Option<usize>,
}

/// Maximum size of `tokenizer.json` in bytes. That of Qwen3.5 has 13 million bytes.
const MAX_BYTES: u64 = 1 << 30;

/// Highest plausible token id. A file with a higher id is damaged.
const MAX_ID: u32 = 1 << 24;

/// A text that every tokenizer must keep.
const SAMPLE: &str = "a b\nc";

impl Tokenizer {
    /// Reads `tokenizer.json` in a model's directory.
    pub fn load(dir: &Path) -> Result<Self, ChatError> {
        let path = dir.join("tokenizer.json");
        let failed = |why: String| ChatError::File { path: path.clone(), why };
        let file = read_json_file(&path, MAX_BYTES).map_err(|e| failed(e.to_string()))?;
        let mut encoder = added::encoder(&file).map_err(|why| failed(format!("it is not a tokenizer: {why}")))?;
        if !matches!(encoder.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_))) {
            return Err(failed("only byte-level BPE tokenizers are supported".into()));
        }
        if let Some(normalizer) = encoder.get_normalizer() {
            let normalizer = serde_json::to_value(normalizer).map_err(|e| failed(e.to_string()))?;
            check_normalizer(&normalizer).map_err(failed)?;
        }
        // Some files enable truncation or padding, which are for training batches.
        encoder.with_truncation(None).map_err(|e| failed(e.to_string()))?;
        encoder.with_padding(None);
        // The crate's cache keeps up to 80 MB of words per thread and never frees them. Without the cache, encoding
        // takes twice as long, which is little compared with the model's time.
        if let tokenizers::ModelWrapper::BPE(bpe) = encoder.get_model() {
            let mut bpe = bpe.clone();
            bpe.resize_cache(0);
            // Dropping merges at random is for training.
            bpe.dropout = None;
            encoder.with_model(bpe);
        }

        added::add_missing(dir, &mut encoder)?;

        let mut tokens: Vec<(u32, String)> = encoder.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        tokens.sort_unstable();
        if let Some((id, _)) = tokens.last().filter(|(id, _)| *id > MAX_ID) {
            return Err(failed(format!("token id {id} is out of range")));
        }
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(tokens.len());
        for (id, text) in &tokens {
            // An unused id has no bytes. If two tokens have the same id, the first is used.
            ends.resize((*id as usize).max(ends.len()), bytes.len());
            if ends.len() == *id as usize {
                write_bytes(text, &mut bytes);
                ends.push(bytes.len());
            }
        }
        let mut added: Vec<(u32, bool)> =
            encoder.get_added_tokens_decoder().iter().map(|(id, token)| (*id, token.special)).collect();
        added.sort_unstable();
        let special = added.iter().filter(|(_, special)| *special).map(|(id, _)| *id).collect();
        let added = added.into_iter().map(|(id, _)| id).collect();
        let cuts = Cuts::of(&encoder);
        let longest_token = longest_token(&encoder, &ends);
        let tokenizer = Self { encoder, bytes, ends, special, added, cuts, longest_token };
        // Without its byte-level step, a tokenizer drops the bytes that it cannot spell.
        let ids = tokenizer.encode(SAMPLE)?;
        // A tokenizer may add a space before a text.
        if tokenizer.decode(&ids).trim_start() != SAMPLE {
            return Err(failed("it does not keep spaces and line feeds; its pre_tokenizer is not byte-level".into()));
        }
        Ok(tokenizer)
    }

    /// Encodes a text. Special tokens in the text are recognized. No special tokens are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let piece;
            (piece, rest) = rest.split_at(self.piece_len(rest));
            ids.extend(self.encode_piece(piece)?);
        }
        Ok(ids)
    }

    /// Length in bytes of the first piece of a text. Encoding all pieces one by one gives the ids of the whole text. A
    /// piece usually has about 16 KiB, and no word is cut.
    pub fn piece_len(&self, text: &str) -> usize {
        self.cuts.map_or(text.len(), |cuts| cuts.first(text, MIN_PIECE))
    }

    /// Lower bound of the number of tokens of `text`, computed without encoding it.
    pub fn min_tokens(&self, text: &str) -> usize {
        // NFC shortens text by a factor of at most 3.5 (U+1FBE U+0308 U+0301 to U+0390), and does not change ASCII.
        let ascii = text.bytes().filter(u8::is_ascii).count();
        self.longest_token.map_or(0, |longest| (ascii + (text.len() - ascii) / 4) / longest)
    }

    /// Encodes a text in one call of the crate.
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let encoding = self.encoder.encode_fast(text, false).map_err(|e| ChatError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes ids. Special tokens and ids outside the vocabulary are dropped, and other added tokens are kept. Invalid
    /// UTF-8 becomes U+FFFD, as in Python's `bytes.decode(errors="replace")`.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.text_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A token in the vocabulary's spelling (`Ġhello` for " hello").
    pub fn token(&self, id: u32) -> Option<String> {
        self.encoder.id_to_token(id)
    }

    /// Bytes of a token, special or not. Empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.slice(id).to_vec()
    }

    /// Id of a token in the vocabulary's spelling.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.encoder.token_to_id(token)
    }

    /// True if a token is outside the BPE vocabulary, such as the control token `<|im_end|>`, or the markup `<think>`.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.binary_search(&id).is_ok()
    }

    /// The largest id plus one. A model may have more logits, because logits may be padded.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// First id whose token differs in `other`. `None` if all ids that both tokenizers have mean the same token.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let both = self.vocab_size().min(other.vocab_size()) as u32;
        (0..both).find(|&id| self.slice(id) != other.slice(id) || self.is_added(id) != other.is_added(id))
    }

    /// Bytes that a token adds to the text of an answer. Special tokens add none.
    pub fn text_bytes(&self, id: u32) -> &[u8] {
        if self.special.binary_search(&id).is_ok() { &[] } else { self.slice(id) }
    }

    fn slice(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = if id == 0 { Some(0) } else { self.ends.get(id - 1).copied() };
        let range = start.zip(self.ends.get(id).copied()).map(|(start, end)| start..end);
        range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
    }
}

/// Accepts Unicode normalizers only. Other normalizers can multiply the text without bound, or panic.
fn check_normalizer(normalizer: &Value) -> Result<(), String> {
    match normalizer["type"].as_str() {
        Some("NFC" | "NFKC") => Ok(()),
        Some("Sequence") => normalizer["normalizers"].as_array().into_iter().flatten().try_for_each(check_normalizer),
        kind => Err(format!("the normalizer {} is not supported; use NFC or NFKC", kind.unwrap_or("without a type"))),
    }
}

/// Maximum number of bytes of text that one token can represent. `None` if encoding can drop text, because a byte has
/// no token, or because a normalizer other than NFC changes the text.
fn longest_token(encoder: &tokenizers::Tokenizer, ends: &[usize]) -> Option<usize> {
    let plain = matches!(encoder.get_normalizer(), None | Some(tokenizers::NormalizerWrapper::NFC(_)));
    let added = encoder.get_added_tokens_decoder();
    let whole = added.values().all(|token| !token.lstrip && !token.rstrip);
    let bytes = (0..0x200).filter_map(char::from_u32).filter(|&c| spelt_byte(c).is_some());
    let every = bytes.clone().all(|c| encoder.token_to_id(c.encode_utf8(&mut [0; 4])).is_some());
    let starts = std::iter::once(&0).chain(ends);
    let longest = starts.zip(ends).map(|(start, end)| end - start).max();
    longest.filter(|&longest| plain && whole && every && longest > 0)
}

/// Appends the bytes of a token. Byte-level BPE spells each byte as one printable character. A token with any other
/// character, such as an added token with a space, is its own text.
fn write_bytes(token: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for c in token.chars() {
        let Some(byte) = spelt_byte(c) else {
            bytes.truncate(start);
            bytes.extend_from_slice(token.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// Inverse of GPT-2's `bytes_to_unicode`: printable Latin-1 characters are spelt as themselves, and the other 68 bytes
/// as U+0100 and up, in order.
fn spelt_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn every_byte_has_one_spelling() {
        let spelt: BTreeSet<u8> = (0..0x200).filter_map(char::from_u32).filter_map(spelt_byte).collect();
        assert_eq!(spelt.len(), 256);
        for (c, byte) in [('Ġ', b' '), ('Ċ', b'\n'), ('ġ', 0x7f), ('ł', 0xa0), ('Ń', 0xad), ('!', b'!')] {
            assert_eq!(spelt_byte(c), Some(byte), "{c}");
        }
    }

    #[test]
    fn unknown_normalizer_is_refused() {
        let text = std::fs::read(test_support::demo().join("tokenizer.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&text).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut load = |normalizer: Value| {
            file["normalizer"] = normalizer;
            std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
            Tokenizer::load(dir.path()).err().map(|error| error.to_string())
        };
        assert_eq!(load(Value::Null), None);
        assert_eq!(load(json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]})), None);
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"});
        for normalizer in [replace.clone(), json!({"type": "Sequence", "normalizers": [replace]})] {
            assert!(load(normalizer).unwrap().contains("the normalizer Replace is not supported"));
        }
    }

    #[test]
    fn tokenizer_that_drops_spaces_is_refused() {
        let text = std::fs::read(test_support::demo().join("tokenizer.json")).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        let splits = &file["pre_tokenizer"]["pretokenizers"];
        let dir = tempfile::tempdir().unwrap();
        let load = |pre_tokenizer: Value| {
            let file = test_support::with(file.clone(), json!({"pre_tokenizer": pre_tokenizer}));
            std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
            Tokenizer::load(dir.path()).err().map(|error| error.to_string())
        };
        let sequence = |parts: &[&Value]| json!({"type": "Sequence", "pretokenizers": parts});
        assert_eq!(load(sequence(&[&splits[0], &splits[1]])), None);
        assert_eq!(load(sequence(&[&splits[1]])), None);
        let adds_a_space = test_support::with(splits[1].clone(), json!({"add_prefix_space": true}));
        assert_eq!(load(sequence(&[&adds_a_space])), None);
        for lossy in [Value::Null, sequence(&[]), sequence(&[&splits[0]])] {
            assert!(load(lossy.clone()).unwrap().contains("pre_tokenizer is not byte-level"), "{lossy}");
        }
    }

    #[test]
    fn token_with_a_space_is_literal() {
        let mut bytes = Vec::new();
        write_bytes("<a b>", &mut bytes);
        write_bytes("Ġb", &mut bytes);
        assert_eq!(bytes, b"<a b> b");
    }
}
