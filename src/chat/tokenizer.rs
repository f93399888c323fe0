//! A model's tokenizer: text to ids and back.

use super::{
    Decoder,
    pieces::{Cuts, PIECE},
};
use crate::error::ChatError;
use std::path::Path;

/// A byte-level BPE tokenizer, as `tokenizer.json` describes it.
///
/// Encoding is the `tokenizers` crate's. Decoding is ours: each id stands for fixed bytes, looked up in one table, so
/// that a stream can be decoded token by token without looking back.
pub struct Tokenizer {
    encoder: tokenizers::Tokenizer,
    /// All tokens' bytes, one after the other: token `id` is `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Ids of control tokens, sorted: they have bytes, but no place in text.
    special: Vec<u32>,
    /// Ids of all tokens that stand beside the vocabulary, sorted: control tokens and markup.
    added: Vec<u32>,
    /// The places where a text may be cut; `None` if it may not.
    cuts: Option<Cuts>,
    /// The most bytes a token stands for; `None` if a text can have fewer tokens than its length tells.
    longest: Option<usize>,
}

/// Ids above this are taken for damage in the file rather than for a vocabulary.
const MOST_IDS: u32 = 1 << 24;

impl Tokenizer {
    /// Reads `tokenizer.json` in a model's directory.
    pub fn load(dir: &Path) -> Result<Self, ChatError> {
        let path = dir.join("tokenizer.json");
        let failed = |why: String| ChatError::Tokenizer(format!("{}: {why}", path.display()));
        let file = std::fs::read(&path).map_err(|e| failed(e.to_string()))?;
        let mut encoder = tokenizers::Tokenizer::from_bytes(&file).map_err(|e| failed(e.to_string()))?;
        if !matches!(encoder.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_))) {
            return Err(failed("only byte-level BPE tokenizers are supported".into()));
        }
        // Some files ask for truncation or padding, which are for training batches.
        encoder.with_truncation(None).map_err(|e| failed(e.to_string()))?;
        encoder.with_padding(None);
        // The crate remembers up to 80 MB of words for each thread that encodes, for ever. Without, a text takes twice the
        // time, which is little beside that of the model.
        if let tokenizers::ModelWrapper::BPE(bpe) = encoder.get_model() {
            let mut bpe = bpe.clone();
            bpe.resize_cache(0);
            encoder.with_model(bpe);
        }

        let mut tokens: Vec<(u32, String)> = encoder.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        tokens.sort_unstable();
        if let Some((id, _)) = tokens.last().filter(|(id, _)| *id > MOST_IDS) {
            return Err(failed(format!("token id {id} is out of range")));
        }
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(tokens.len()));
        for (id, text) in &tokens {
            // Ids that no token has, and a second token of the same id, stand for nothing.
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
        let longest = longest(&encoder, &ends);
        Ok(Self { encoder, bytes, ends, special, added, cuts, longest })
    }

    /// Special tokens in the text are parsed; nothing is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let (mut ids, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let piece;
            (piece, rest) = rest.split_at(self.piece(rest));
            ids.extend(self.encode_piece(piece)?);
        }
        Ok(ids)
    }

    /// The end of the first piece of a text, in bytes. Pieces are encoded one by one to the ids of the whole; most have
    /// some sixteen thousand bytes, but a word is never cut.
    pub fn piece(&self, text: &str) -> usize {
        self.cuts.map_or(text.len(), |cuts| cuts.first(text, PIECE))
    }

    /// The fewest tokens that `text` can have, from its length alone.
    pub fn fewest(&self, text: &str) -> usize {
        // NFC makes text shorter, by 3.5 at most (U+1FBE U+0308 U+0301 to U+0390), but never ASCII by itself.
        let ascii = text.bytes().filter(u8::is_ascii).count();
        self.longest.map_or(0, |longest| (ascii + (text.len() - ascii) / 4) / longest)
    }

    /// The ids of a text, encoded at once.
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let encoding = self.encoder.encode_fast(text, false).map_err(|e| ChatError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some ids. Special tokens are dropped, other added tokens stay; ids outside the vocabulary are nothing;
    /// bytes that are no UTF-8 become U+FFFD, as in Python's `bytes.decode(errors="replace")`.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut text = String::new();
        let mut pending = Vec::new();
        for &id in ids {
            Decoder::append(&mut text, &mut pending, self.text_bytes(id));
        }
        Decoder::flush(&mut text, &mut pending);
        text
    }

    /// A token as the vocabulary spells it (`Ġhello` for " hello"), special or not.
    pub fn token(&self, id: u32) -> Option<String> {
        self.encoder.id_to_token(id)
    }

    /// The bytes a token stands for, special or not; empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.slice(id).to_vec()
    }

    /// The id of a token, spelt as the vocabulary spells it.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.encoder.token_to_id(token)
    }

    /// True if a token stands beside the vocabulary: a control token such as `<|im_end|>`, or markup such as `<think>`.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.binary_search(&id).is_ok()
    }

    /// One more than the largest id. A model's logits may have more rows than that, as padding.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// The first token that `other` has otherwise; `None` if all that both have are the same.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let both = self.vocab_size().min(other.vocab_size()) as u32;
        (0..both).find(|&id| self.slice(id) != other.slice(id) || self.is_added(id) != other.is_added(id))
    }

    /// The bytes that a token adds to text.
    pub(super) fn text_bytes(&self, id: u32) -> &[u8] {
        if self.special.binary_search(&id).is_ok() { &[] } else { self.slice(id) }
    }

    fn slice(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = if id == 0 { Some(0) } else { self.ends.get(id - 1).copied() };
        let range = start.zip(self.ends.get(id).copied()).map(|(start, end)| start..end);
        range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
    }
}

/// The most bytes of text that become one token, where no text is lost on the way: each byte has a token, and nothing
/// but NFC changes the text before.
fn longest(encoder: &tokenizers::Tokenizer, ends: &[usize]) -> Option<usize> {
    let plain = matches!(encoder.get_normalizer(), None | Some(tokenizers::NormalizerWrapper::NFC(_)));
    let added = encoder.get_added_tokens_decoder();
    let whole = added.values().all(|token| !token.lstrip && !token.rstrip);
    let bytes = (0..0x200).filter_map(char::from_u32).filter(|&c| spelt_byte(c).is_some());
    let every = bytes.clone().all(|c| encoder.token_to_id(c.encode_utf8(&mut [0; 4])).is_some());
    let starts = std::iter::once(&0).chain(ends);
    let longest = starts.zip(ends).map(|(start, end)| end - start).max();
    longest.filter(|&longest| plain && whole && every && longest > 0)
}

/// Byte-level BPE spells each byte as one printable character. A token with any other character (an added token with a
/// space, say) stands for itself.
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

/// GPT-2's `bytes_to_unicode`, reversed: printable Latin-1 is itself, the other 68 bytes are U+0100 and on, in order.
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
    fn a_token_with_a_space_stands_for_itself() {
        let mut bytes = Vec::new();
        write_bytes("<a b>", &mut bytes);
        write_bytes("Ġb", &mut bytes);
        assert_eq!(bytes, b"<a b> b");
    }
}
