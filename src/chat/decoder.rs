use super::Tokenizer;
use std::sync::Arc;

/// Token ids to text, one at a time. Never splits a character.
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
}

impl Decoder {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer }
    }

    /// The text that `id` completes.
    pub fn push(&mut self, id: u32) -> String {
        let _ = (&self.tokenizer, id);
        todo!()
    }

    /// What was held back: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        todo!()
    }
}
