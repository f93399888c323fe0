//! Log-probabilities of `/v1/completions`: four arrays with one entry per token and offsets in characters.

use crate::http::openai::{CompletionLogprobs, TopLogprobs};
use moestro_chat::Tokenizer;
use moestro_engine::Logprobs;
use std::{mem, sync::Arc};

/// Builds the arrays of one choice.
pub struct LogprobsBuilder {
    tokenizer: Arc<Tokenizer>,
    /// Entries that have not been sent yet.
    entries: CompletionLogprobs,
    /// Offset of the next token, in characters.
    offset: usize,
}

impl LogprobsBuilder {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, entries: CompletionLogprobs::default(), offset: 0 }
    }

    /// Adds a token of the prompt, whose text has special tokens, too. The first one has no log-probability.
    pub fn push_prompt(&mut self, id: u32, logprobs: Option<&Logprobs>) {
        let bytes = self.tokenizer.token_bytes(id);
        self.push(id, &bytes, logprobs);
    }

    /// Adds a token of the answer.
    pub fn push_answer(&mut self, id: u32, logprobs: &Logprobs) {
        let bytes = self.tokenizer.text_bytes(id).to_vec();
        self.push(id, &bytes, Some(logprobs));
    }

    /// Adds a token that adds `bytes` to the text.
    fn push(&mut self, id: u32, bytes: &[u8], logprobs: Option<&Logprobs>) {
        let token = token_text(&self.tokenizer, id).0;
        self.entries.text_offset.push(self.offset);
        // A character that spans several tokens counts for the token that has its first byte.
        self.offset += bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
        self.entries.token_logprobs.push(logprobs.map(|logprobs| logprobs.logprob));
        self.entries.top_logprobs.push(logprobs.map(|Logprobs { logprob, top }| {
            let mut top: Vec<_> =
                top.iter().map(|&(id, logprob)| (token_text(&self.tokenizer, id).0, logprob)).collect();
            if top.iter().all(|(other, _)| *other != token) {
                top.push((token.clone(), *logprob));
            }
            TopLogprobs(top)
        }));
        self.entries.tokens.push(token);
    }

    /// Returns the entries since the last call.
    pub fn take(&mut self) -> CompletionLogprobs {
        mem::take(&mut self.entries)
    }
}

/// A token as `logprobs` writes it: its text, or its bytes if they are not valid UTF-8 on their own.
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
