//! A model's tokenizer: text to ids and back.

use super::Decoder;
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
        let mut special: Vec<u32> =
            encoder.get_added_tokens_decoder().iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        special.sort_unstable();
        Ok(Self { encoder, bytes, ends, special })
    }

    /// Special tokens in the text are parsed; nothing is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ChatError> {
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

    /// One more than the largest id. A model's logits may have more rows than that, as padding.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
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
