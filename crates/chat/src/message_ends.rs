//! Finds the ends of the messages of a rendered prompt, in tokens.
//!
//! Qwen's templates open every message with `<|im_start|>` and the role. Special tokens are never merged with the text
//! around them. The tokens before a special token are therefore the same in every prompt that starts with the same
//! text.

use super::Tokenizer;

/// The writer of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speaker {
    /// The system prompt, including the tools.
    System,
    /// The user.
    User,
    /// The model, or a tool.
    Other,
}

/// For every message except the last: the number of tokens up to the end of the message, and its speaker. Empty if the
/// tokenizer has no `<|im_start|>`.
pub fn message_ends(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<(usize, Speaker)> {
    let Some(open) = tokenizer.id("<|im_start|>") else { return Vec::new() };
    let starts: Vec<usize> = ids.iter().enumerate().filter(|&(_, &id)| id == open).map(|(at, _)| at).collect();
    let speaker = |message: &[u32]| {
        // 32 tokens are more than the longest prefix that is compared here.
        let text: Vec<u8> = message.iter().take(32).flat_map(|&id| tokenizer.token_bytes(id)).collect();
        if text.starts_with(b"system\n") {
            Speaker::System
        } else if text.starts_with(b"user\n") && !text.starts_with(b"user\n<tool_response>") {
            Speaker::User
        } else {
            Speaker::Other
        }
    };
    starts.windows(2).map(|pair| (pair[1], speaker(&ids[pair[0] + 1..pair[1]]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_ends_where_the_next_starts() {
        let tokenizer = Tokenizer::load(&test_support::demo()).unwrap();
        let parts = [
            ("<|im_start|>system\nBe brief.<|im_end|>\n", Speaker::System),
            ("<|im_start|>user\nWhat is 1+2?<|im_end|>\n", Speaker::User),
            ("<|im_start|>assistant\n<tool_call>\n</tool_call><|im_end|>\n", Speaker::Other),
            ("<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n", Speaker::Other),
        ];
        let opening = "<|im_start|>assistant\n<think>\n";
        let text: String = parts.iter().map(|part| part.0).chain([opening]).collect();
        let ids = tokenizer.encode(&text).unwrap();
        let mut before = String::new();
        let wanted: Vec<_> = parts
            .iter()
            .map(|(part, speaker)| {
                before += part;
                (tokenizer.encode(&before).unwrap().len(), *speaker)
            })
            .collect();
        assert_eq!(message_ends(&tokenizer, &ids), wanted);
        assert_eq!(message_ends(&tokenizer, &tokenizer.encode("plain text").unwrap()), []);
        assert_eq!(message_ends(&tokenizer, &[]), []);
    }
}
