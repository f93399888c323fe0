//! The log-probabilities of `/v1/completions`: four arrays, one entry a token, with places counted in characters.

use crate::http::openai::chunks::{FinishReason, TextLogprobs, TopLogprobs};
use crate::{chat::Tokenizer, engine::Logprobs};
use std::mem;

/// Entries that have not been sent yet.
pub struct Scores<'a> {
    tokenizer: &'a Tokenizer,
    entries: TextLogprobs,
    /// The next token's offset, in characters.
    offset: usize,
    /// Characters of text told to the client.
    told: usize,
}

impl<'a> Scores<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, entries: TextLogprobs::default(), offset: 0, told: 0 }
    }

    /// A token and its log-probability; none for the first of a prompt.
    pub fn push(&mut self, id: u32, logprobs: Option<&Logprobs>) {
        let (token, bytes) = token_text(self.tokenizer, id);
        self.entries.text_offset.push(self.offset);
        // A character that is cut into several tokens counts where it begins.
        self.offset += bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
        self.entries.token_logprobs.push(logprobs.map(|logprobs| logprobs.logprob));
        self.entries.top_logprobs.push(logprobs.map(|Logprobs { logprob, top }| {
            let mut likeliest: Vec<_> =
                top.iter().map(|&(id, logprob)| (token_text(self.tokenizer, id).0, logprob)).collect();
            if likeliest.iter().all(|(other, _)| *other != token) {
                likeliest.push((token.clone(), *logprob));
            }
            TopLogprobs(likeliest)
        }));
        self.entries.tokens.push(token);
    }

    /// The client was told `text`.
    pub fn told(&mut self, text: &str) {
        self.told += text.chars().count();
    }

    /// The entries since the last call. At a stop string's place the text was cut, and so are they.
    pub fn take(&mut self, end: Option<FinishReason>) -> TextLogprobs {
        let mut entries = mem::take(&mut self.entries);
        if end == Some(FinishReason::Stop) {
            let kept = entries.text_offset.partition_point(|&offset| offset < self.told);
            entries.tokens.truncate(kept);
            entries.token_logprobs.truncate(kept);
            entries.top_logprobs.truncate(kept);
            entries.text_offset.truncate(kept);
        }
        entries
    }
}

/// A token as it stands in `logprobs`: its text, or its bytes where they are no text by themselves.
pub fn token_text(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(id);
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    };
    (text, bytes)
}

/// The exact text of `ids`, special tokens included.
pub fn text(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
