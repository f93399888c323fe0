//! Constrains one answer token by token: first its reasoning, which may have a token budget, then the required format.
//!
//! ```text
//! Reasoning --</think>--> Forced "\n\n" --> Answer       (nothing is forced without a format)
//!     |  \--<tool_call>-----------------> Answer
//!     \--budget used up--> Forced "\n</think>\n\n" --> Answer
//! ```

use super::format::plain_reason;
use crate::Tokenizer;
use llguidance::Matcher;
use std::sync::Arc;

const END_OF_REASONING: &str = "</think>";

/// The tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextTokens {
    Any,
    /// A bit mask of the allowed tokens. Token `id` is bit `id % 32` of word `id / 32`.
    Only(Vec<u32>),
}

/// Tokens at the start and at the end of reasoning and answers.
pub(super) struct MarkupTokens {
    /// Id of `<tool_call>`, if this text is one token.
    pub call: Option<u32>,
    /// Tokens that end the reasoning as templates do. The first entry is for reasoning that ends with a line feed, the
    /// second for any other reasoning.
    end_of_reasoning: [Vec<u32>; 2],
    /// Tokens of the text between reasoning and answer.
    gap: Vec<u32>,
    /// Mask of all tokens except those that end the answer.
    not_eos: Vec<u32>,
}

impl MarkupTokens {
    pub fn new(tokenizer: &Tokenizer, eos: &[u32]) -> Self {
        // If a text cannot be encoded, its list is empty and no tokens are forced.
        let encode = |text: &str| tokenizer.encode(text).unwrap_or_default();
        let mut not_eos = vec![u32::MAX; tokenizer.vocab_size().div_ceil(32)];
        for &id in eos {
            if let Some(word) = not_eos.get_mut(id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        Self {
            call: tokenizer.id("<tool_call>"),
            end_of_reasoning: [
                encode(&format!("{END_OF_REASONING}\n\n")),
                encode(&format!("\n{END_OF_REASONING}\n\n")),
            ],
            gap: encode("\n\n"),
            not_eos,
        }
    }
}

/// The state of one constrained answer.
#[derive(Clone)]
pub struct TokenConstraint {
    tokenizer: Arc<Tokenizer>,
    markup: Arc<MarkupTokens>,
    format: Option<Matcher>,
    /// True if tools may be called. A `<tool_call>` then ends the reasoning.
    calls: bool,
    budget: Option<usize>,
    phase: AnswerPhase,
}

#[derive(Clone)]
enum AnswerPhase {
    /// The model is reasoning. `tokens` is the number of tokens so far, and `tail` is the end of their text.
    Reasoning {
        tokens: usize,
        tail: Vec<u8>,
    },
    /// `tokens[at..]` must come next.
    Forced {
        tokens: Vec<u32>,
        at: usize,
    },
    Answer,
}

impl TokenConstraint {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        markup: Arc<MarkupTokens>,
        format: Option<Matcher>,
        calls: bool,
        in_reasoning: bool,
        budget: Option<usize>,
    ) -> Self {
        // A prompt that opens the reasoning ends with `<think>\n`.
        let phase =
            if in_reasoning { AnswerPhase::Reasoning { tokens: 0, tail: b"\n".into() } } else { AnswerPhase::Answer };
        let mut constraint = Self { tokenizer, markup, format, calls, budget, phase };
        constraint.check_budget();
        constraint
    }

    /// The tokens that may come next.
    pub fn allowed(&mut self) -> Result<NextTokens, String> {
        match &self.phase {
            AnswerPhase::Reasoning { .. } if self.format.is_none() => Ok(NextTokens::Any),
            // Generation must not end before the answer has the required format.
            AnswerPhase::Reasoning { .. } => Ok(NextTokens::Only(self.markup.not_eos.clone())),
            AnswerPhase::Forced { tokens, at } => Ok(self.only(tokens[*at])),
            AnswerPhase::Answer => match &mut self.format {
                None => Ok(NextTokens::Any),
                Some(format) => match format.compute_mask_or_eos() {
                    Ok(mask) => Ok(NextTokens::Only(mask.into())),
                    Err(error) => Err(plain_reason(&error.to_string())),
                },
            },
        }
    }

    /// Advances by a sampled token.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        match &mut self.phase {
            AnswerPhase::Reasoning { tokens, tail } => {
                *tokens += 1;
                if self.calls && Some(id) == self.markup.call {
                    self.phase = AnswerPhase::Answer;
                    return self.consume(id);
                }
                tail.extend_from_slice(&self.tokenizer.token_bytes(id));
                let end = tail.windows(END_OF_REASONING.len()).position(|bytes| bytes == END_OF_REASONING.as_bytes());
                if let Some(end) = end {
                    let rest = tail.split_off(end + END_OF_REASONING.len());
                    return self.start_answer(&rest);
                }
                tail.drain(..tail.len().saturating_sub(END_OF_REASONING.len() - 1));
                self.check_budget();
                Ok(())
            }
            AnswerPhase::Forced { tokens, at } => {
                *at += 1;
                if *at == tokens.len() {
                    self.phase = AnswerPhase::Answer;
                }
                Ok(())
            }
            AnswerPhase::Answer => self.consume(id),
        }
    }

    /// Ends the reasoning. `rest` is the text after `</think>` in the token that completed this tag.
    fn start_answer(&mut self, rest: &[u8]) -> Result<(), String> {
        self.phase = AnswerPhase::Answer;
        let Some(format) = &mut self.format else { return Ok(()) };
        if rest.is_empty() && !self.markup.gap.is_empty() {
            self.phase = AnswerPhase::Forced { tokens: self.markup.gap.clone(), at: 0 };
            return Ok(());
        }
        // The tag was split into several tokens, and the last of these tokens also contains the start of the answer.
        let text = rest.trim_ascii_start();
        let tokens = format.tok_env().map(|env| env.tok_trie().greedy_tokenize(text));
        tokens.and_then(|tokens| format.consume_tokens(&tokens)).map_err(|error| plain_reason(&error.to_string()))
    }

    fn consume(&mut self, id: u32) -> Result<(), String> {
        let Some(format) = &mut self.format else { return Ok(()) };
        format.consume_token(id).map_err(|error| plain_reason(&error.to_string()))
    }

    fn check_budget(&mut self) {
        if let (AnswerPhase::Reasoning { tokens, tail }, Some(budget)) = (&self.phase, self.budget)
            && *tokens >= budget
        {
            let tokens = self.markup.end_of_reasoning[usize::from(!tail.ends_with(b"\n"))].clone();
            self.phase = if tokens.is_empty() { AnswerPhase::Answer } else { AnswerPhase::Forced { tokens, at: 0 } };
        }
    }

    fn only(&self, id: u32) -> NextTokens {
        let mut words = vec![0; self.markup.not_eos.len()];
        if let Some(word) = words.get_mut(id as usize / 32) {
            *word = 1 << (id % 32);
        }
        NextTokens::Only(words)
    }
}
