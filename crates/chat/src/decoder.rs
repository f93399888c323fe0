//! Streaming detokenizer: token ids to text, one id at a time.

use super::Tokenizer;
use std::sync::Arc;

/// Decodes a stream of token ids.
///
/// A character may be spread over several tokens. The decoder keeps the first bytes of such a character until the other
/// bytes arrive. The texts of all [`Decoder::push`] calls and of [`Decoder::finish`] together equal
/// [`Tokenizer::decode`] of all ids.
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    /// First bytes of an incomplete character, at most three between two calls of `push`.
    pending: Vec<u8>,
}

impl Decoder {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// Returns the text that `id` completes. The text may be empty.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        Self::append(&mut text, &mut self.pending, self.tokenizer.text_bytes(id));
        text
    }

    /// Ends the stream. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        Self::flush(&mut text, &mut self.pending);
        text
    }

    /// Appends `bytes` to `text`, except an incomplete character at the end, which stays in `pending`.
    pub(super) fn append(text: &mut String, pending: &mut Vec<u8>, bytes: &[u8]) {
        pending.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            // `error_len` is `None` if the input ends inside a character.
            let is_incomplete = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if is_incomplete && done + invalid.len() == pending.len() {
                break;
            }
            text.extend((!invalid.is_empty()).then_some(char::REPLACEMENT_CHARACTER));
            done += invalid.len();
        }
        pending.drain(..done);
    }

    pub(super) fn flush(text: &mut String, pending: &mut Vec<u8>) {
        text.push_str(&String::from_utf8_lossy(pending));
        pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode_in_pieces(bytes: &[u8], pieces: &[usize]) -> String {
        let mut text = String::new();
        let mut pending = Vec::new();
        let mut rest = bytes;
        for piece in pieces {
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            Decoder::append(&mut text, &mut pending, now);
            assert!(pending.len() < 4);
            rest = later;
        }
        Decoder::append(&mut text, &mut pending, rest);
        Decoder::flush(&mut text, &mut pending);
        text
    }

    proptest! {
        #[test]
        fn pieces_decode_as_the_whole(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..40),
                prop::collection::vec(prop::sample::select(b"a\x80\xbf\xc3\xe2\x82\xac\xed\xa0\xf0\x9f\x98\x80\xf4\xff".to_vec()), 0..40),
                any::<String>().prop_map(String::into_bytes),
            ],
            pieces in prop::collection::vec(0usize..5, 0..20),
        ) {
            prop_assert_eq!(decode_in_pieces(&bytes, &pieces), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn character_waits_for_its_last_byte() {
        let mut text = String::new();
        let mut pending = Vec::new();
        Decoder::append(&mut text, &mut pending, b"a\xf0\x9f");
        assert_eq!(text, "a");
        Decoder::append(&mut text, &mut pending, b"\x98\x80b");
        assert_eq!(text, "a😀b");
        Decoder::append(&mut text, &mut pending, b"\xe2\x82");
        Decoder::flush(&mut text, &mut pending);
        assert_eq!(text, "a😀b\u{fffd}");
    }
}
