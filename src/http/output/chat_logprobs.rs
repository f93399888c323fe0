//! Log-probabilities of the tokens that a chat's content consists of: reasoning, markup and tool calls are not listed.
//!
//! A token belongs to the content if some byte of its text does. It is listed when the first such byte is given, so in a
//! stream no chunk's tokens run ahead of its text.

use crate::engine::Logprobs;
use std::{collections::VecDeque, ops::Range};

/// Tokens whose place is not yet known.
#[derive(Debug, Default)]
pub struct Scored {
    /// Bytes of text so far.
    length: usize,
    /// Tokens that have not completed a character yet.
    open: Vec<(u32, Logprobs)>,
    /// Tokens and their ranges in the text.
    waiting: VecDeque<(Range<usize>, u32, Logprobs)>,
    /// The content's ranges in the text, and the bytes of content before each.
    spans: VecDeque<(Range<usize>, usize)>,
    /// Bytes of content so far.
    content: usize,
}

impl Scored {
    pub fn token(&mut self, id: u32, logprobs: Logprobs) {
        self.open.push((id, logprobs));
    }

    /// The tokens so far have completed `length` bytes of text.
    pub fn text(&mut self, length: usize) {
        if length > 0 {
            let range = self.length..self.length + length;
            self.length = range.end;
            self.waiting.extend(self.open.drain(..).map(|(id, logprobs)| (range.clone(), id, logprobs)));
        }
    }

    /// This part of the text is content.
    pub fn content(&mut self, span: Range<usize>) {
        let before = self.content;
        self.content += span.len();
        self.spans.push_back((span, before));
    }

    /// The client has been given `bytes` of content in all: the tokens that it has now seen a part of.
    pub fn given(&mut self, bytes: usize) -> Vec<(u32, Logprobs)> {
        let mut listed = Vec::new();
        while let Some((span, before)) = self.spans.front() {
            // The part of the span that has been given.
            let given = span.start..(span.start + bytes.saturating_sub(*before)).min(span.end);
            let whole = given.end == span.end;
            while !given.is_empty() && self.waiting.front().is_some_and(|(range, ..)| range.start < given.end) {
                let Some((range, id, logprobs)) = self.waiting.pop_front() else { break };
                if range.end > given.start {
                    listed.push((id, logprobs));
                }
            }
            if !whole {
                break;
            }
            self.spans.pop_front();
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logprobs() -> Logprobs {
        Logprobs { logprob: -1.0, top: Vec::new() }
    }

    fn ids(listed: Vec<(u32, Logprobs)>) -> Vec<u32> {
        listed.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn tokens_are_listed_with_their_text() {
        let mut scored = Scored::default();
        // "thought", "</think>", "\n\n", "Hi", " th", "ere", "<tool_call>"
        for (id, length) in [(1, 7), (2, 8), (3, 2), (4, 2), (5, 3), (6, 3), (7, 11)] {
            scored.token(id, logprobs());
            scored.text(length);
        }
        assert!(scored.given(0).is_empty());
        scored.content(17..25);
        assert_eq!(ids(scored.given(2)), [4], "the rest is held back: it may become a stop string");
        assert_eq!(ids(scored.given(3)), [5]);
        assert_eq!(ids(scored.given(8)), [6]);
        assert_eq!(ids(scored.given(8)), [0; 0]);
    }

    #[test]
    fn a_character_of_many_tokens_lists_them_all() {
        let mut scored = Scored::default();
        for id in [1, 2, 3] {
            scored.token(id, logprobs());
            scored.text(if id == 3 { 4 } else { 0 });
        }
        scored.content(0..4);
        assert_eq!(ids(scored.given(4)), [1, 2, 3]);
    }

    #[test]
    fn content_around_markup() {
        let mut scored = Scored::default();
        for (id, length) in [(1, 4), (2, 9), (3, 5)] {
            scored.token(id, logprobs());
            scored.text(length);
        }
        scored.content(0..4);
        scored.content(14..18);
        assert_eq!(ids(scored.given(8)), [1, 3]);
    }
}
