use crate::error::ChatError;
use std::path::Path;

/// A model's tokenizer.
pub struct Tokenizer {}

impl Tokenizer {
    /// Reads `tokenizer.json` in a model's directory.
    pub fn load(_dir: &Path) -> Result<Self, ChatError> {
        todo!()
    }

    /// Special tokens in the text are parsed; nothing is added.
    pub fn encode(&self, _text: &str) -> Result<Vec<u32>, ChatError> {
        todo!()
    }

    /// Special tokens are dropped, other added tokens stay.
    pub fn decode(&self, _ids: &[u32]) -> String {
        todo!()
    }

    /// A token as text, special or not.
    pub fn token(&self, _id: u32) -> Option<String> {
        todo!()
    }

    /// The bytes a token stands for; empty for an id outside the vocabulary.
    pub fn token_bytes(&self, _id: u32) -> Vec<u8> {
        todo!()
    }

    /// The id of a token's text.
    pub fn id(&self, _token: &str) -> Option<u32> {
        todo!()
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        todo!()
    }
}
