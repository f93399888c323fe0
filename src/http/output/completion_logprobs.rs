//! Log-probabilities of `/v1/completions`: four arrays with one entry per token and offsets in characters.

use crate::http::{
    openai::{CompletionLogprobs, TopLogprobs},
    output::FinishReason,
};
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
    /// Number of characters of text that have been sent.
    sent: usize,
}

impl LogprobsBuilder {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, entries: CompletionLogprobs::default(), offset: 0, sent: 0 }
    }

    /// Adds a token. The first token of a prompt has no log-probability.
    pub fn push(&mut self, id: u32, logprobs: Option<&Logprobs>) {
        let (token, bytes) = token_text(&self.tokenizer, id);
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

    /// Counts text that is sent to the client.
    pub fn push_sent(&mut self, text: &str) {
        self.sent += text.chars().count();
    }

    /// Returns the entries since the last call. If a stop string cut the text, the entries after the cut are removed.
    pub fn take(&mut self, finish: Option<FinishReason>) -> CompletionLogprobs {
        let mut entries = mem::take(&mut self.entries);
        if finish == Some(FinishReason::Stop) {
            let kept = entries.text_offset.partition_point(|&offset| offset < self.sent);
            entries.tokens.truncate(kept);
            entries.token_logprobs.truncate(kept);
            entries.top_logprobs.truncate(kept);
            entries.text_offset.truncate(kept);
        }
        entries
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
