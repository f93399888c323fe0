//! Log-probabilities of an answer's content tokens. Reasoning, markup and tool calls of a chat are not listed, and
//! neither are tokens after a stop string.
//!
//! A token belongs to the content if at least one byte of its text belongs to the content. A token is listed with the
//! output that contains its first content byte, so in a stream the listed tokens never run ahead of the text.

use moestro_engine::Logprobs;
use std::{collections::VecDeque, mem, ops::Range};

/// Matches generated tokens with the content that is sent to the client.
#[derive(Debug, Default)]
pub struct ContentLogprobs {
    /// Number of bytes of generated text so far.
    length: usize,
    /// Tokens that have not completed a character yet. The text of these tokens comes with a later token.
    open: Vec<(u32, Logprobs)>,
    /// Tokens with their byte ranges in the generated text.
    waiting: VecDeque<(Range<usize>, u32, Logprobs)>,
    /// Content ranges in the generated text, each with the number of content bytes before it.
    spans: VecDeque<(Range<usize>, usize)>,
    /// Number of bytes of content so far.
    content: usize,
}

impl ContentLogprobs {
    pub fn push_token(&mut self, id: u32, logprobs: Logprobs) {
        self.open.push((id, logprobs));
    }

    /// Adds `length` bytes of text, which is the text of the tokens pushed since the last text. Returns their range.
    pub fn push_text(&mut self, length: usize) -> Range<usize> {
        let range = self.length..self.length + length;
        if length > 0 {
            self.length = range.end;
            self.waiting.extend(self.open.drain(..).map(|(id, logprobs)| (range.clone(), id, logprobs)));
        }
        range
    }

    /// Marks this range of the generated text as content.
    pub fn push_content(&mut self, span: Range<usize>) {
        let before = self.content;
        self.content += span.len();
        self.spans.push_back((span, before));
    }

    /// Returns the tokens whose text has been sent since the last call. `bytes` is the number of content bytes sent in
    /// total.
    pub fn take_sent(&mut self, bytes: usize) -> Vec<(u32, Logprobs)> {
        let mut listed = Vec::new();
        while let Some((span, before)) = self.spans.front() {
            // The part of the span that has been sent.
            let sent = span.start..(span.start + bytes.saturating_sub(*before)).min(span.end);
            let is_whole = sent.end == span.end;
            while !sent.is_empty() && self.waiting.front().is_some_and(|(range, ..)| range.start < sent.end) {
                let Some((range, id, logprobs)) = self.waiting.pop_front() else { break };
                if range.end > sent.start {
                    listed.push((id, logprobs));
                }
            }
            if !is_whole {
                break;
            }
            self.spans.pop_front();
        }
        listed
    }

    /// Returns the tokens at the end of the answer that have no text.
    pub fn take_open(&mut self) -> Vec<(u32, Logprobs)> {
        mem::take(&mut self.open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generation of tokens with these ids and text lengths.
    fn generated(tokens: &[(u32, usize)]) -> ContentLogprobs {
        let mut logprobs = ContentLogprobs::default();
        for &(id, length) in tokens {
            logprobs.push_token(id, Logprobs { logprob: -1.0, top: Vec::new() });
            logprobs.push_text(length);
        }
        logprobs
    }

    fn ids(listed: Vec<(u32, Logprobs)>) -> Vec<u32> {
        listed.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn tokens_are_listed_with_their_text() {
        // "thought", "</think>", "\n\n", "Hi", " th", "ere", "<tool_call>"
        let mut logprobs = generated(&[(1, 7), (2, 8), (3, 2), (4, 2), (5, 3), (6, 3), (7, 11)]);
        assert!(logprobs.take_sent(0).is_empty());
        logprobs.push_content(17..25);
        assert_eq!(ids(logprobs.take_sent(2)), [4], "the rest is held back as a possible stop string");
        assert_eq!(ids(logprobs.take_sent(3)), [5]);
        assert_eq!(ids(logprobs.take_sent(8)), [6]);
        assert_eq!(ids(logprobs.take_sent(8)), [0; 0]);
    }

    #[test]
    fn multi_token_character_lists_all_tokens() {
        let mut logprobs = generated(&[(1, 0), (2, 0), (3, 4)]);
        logprobs.push_content(0..4);
        assert_eq!(ids(logprobs.take_sent(4)), [1, 2, 3]);
    }

    #[test]
    fn markup_between_content_is_not_listed() {
        let mut logprobs = generated(&[(1, 4), (2, 9), (3, 5)]);
        logprobs.push_content(0..4);
        logprobs.push_content(14..18);
        assert_eq!(ids(logprobs.take_sent(8)), [1, 3]);
    }
}
