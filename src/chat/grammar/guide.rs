//! Walks one answer token by token: through its reasoning, which may have a budget, into the form it must have.
//!
//! ```text
//! Reasoning --</think>--> Forced "\n\n" --> Answer       (nothing is forced where no form is asked)
//!     |  \--<tool_call>-----------------> Answer
//!     \--budget spent--> Forced "\n</think>\n\n" --> Answer
//! ```

use crate::chat::Tokenizer;
use llguidance::Matcher;
use std::sync::Arc;

const THOUGHT: &str = "</think>";

/// Tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextTokens {
    Any,
    /// Bit `id % 32` of word `id / 32`.
    Only(Vec<u32>),
}

/// The tokens that a model's reasoning and its answers begin and end with.
pub(super) struct Marks {
    /// `<tool_call>`, if it is one token.
    pub call: Option<u32>,
    /// The end of the reasoning, as templates write it: after a newline, and elsewhere.
    closing: [Vec<u32>; 2],
    /// Between reasoning and answer.
    gap: Vec<u32>,
    /// Every token but those that end the answer.
    open: Vec<u32>,
}

impl Marks {
    pub fn new(tokenizer: &Tokenizer, eos: &[u32]) -> Self {
        // A tokenizer that cannot spell these has nothing to force.
        let spell = |text: &str| tokenizer.encode(text).unwrap_or_default();
        let mut open = vec![u32::MAX; tokenizer.vocab_size().div_ceil(32)];
        for &id in eos {
            if let Some(word) = open.get_mut(id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        Self {
            call: tokenizer.id("<tool_call>"),
            closing: [spell(&format!("{THOUGHT}\n\n")), spell(&format!("\n{THOUGHT}\n\n"))],
            gap: spell("\n\n"),
            open,
        }
    }
}

/// One answer on its way.
#[derive(Clone)]
pub struct TokenConstraint {
    tokenizer: Arc<Tokenizer>,
    marks: Arc<Marks>,
    form: Option<Matcher>,
    /// A `<tool_call>` ends the reasoning.
    calls: bool,
    budget: Option<usize>,
    phase: Phase,
}

#[derive(Clone)]
enum Phase {
    /// `spent` tokens so far, whose text ends with `tail`.
    Reasoning {
        spent: usize,
        tail: Vec<u8>,
    },
    /// These tokens must come, from `at` on.
    Forced {
        tokens: Vec<u32>,
        at: usize,
    },
    Answer,
}

impl TokenConstraint {
    pub(super) fn new(
        tokenizer: Arc<Tokenizer>,
        marks: Arc<Marks>,
        form: Option<Matcher>,
        calls: bool,
        in_reasoning: bool,
        budget: Option<usize>,
    ) -> Self {
        // The prompt ends with `<think>\n`.
        let phase = if in_reasoning { Phase::Reasoning { spent: 0, tail: b"\n".into() } } else { Phase::Answer };
        let mut guide = Self { tokenizer, marks, form, calls, budget, phase };
        guide.check_budget();
        guide
    }

    /// Tokens that may come next.
    pub fn allowed(&mut self) -> Result<NextTokens, String> {
        match &self.phase {
            Phase::Reasoning { .. } if self.form.is_none() => Ok(NextTokens::Any),
            // An answer that ended here would not have its form.
            Phase::Reasoning { .. } => Ok(NextTokens::Only(self.marks.open.clone())),
            Phase::Forced { tokens, at } => Ok(self.one(tokens[*at])),
            Phase::Answer => match &mut self.form {
                None => Ok(NextTokens::Any),
                Some(form) => match form.compute_mask_or_eos() {
                    Ok(mask) => Ok(NextTokens::Only(mask.into())),
                    Err(error) => Err(first_line(&error.to_string())),
                },
            },
        }
    }

    /// `id` came.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        match &mut self.phase {
            Phase::Reasoning { spent, tail } => {
                *spent += 1;
                if self.calls && Some(id) == self.marks.call {
                    self.phase = Phase::Answer;
                    return self.consume(id);
                }
                tail.extend_from_slice(&self.tokenizer.token_bytes(id));
                let end = tail.windows(THOUGHT.len()).position(|bytes| bytes == THOUGHT.as_bytes());
                if let Some(end) = end {
                    let rest = tail.split_off(end + THOUGHT.len());
                    return self.answer(&rest);
                }
                tail.drain(..tail.len().saturating_sub(THOUGHT.len() - 1));
                self.check_budget();
                Ok(())
            }
            Phase::Forced { tokens, at } => {
                *at += 1;
                if *at == tokens.len() {
                    self.phase = Phase::Answer;
                }
                Ok(())
            }
            Phase::Answer => self.consume(id),
        }
    }

    /// The reasoning is over; `rest` is what the token that ended it says beyond its end.
    fn answer(&mut self, rest: &[u8]) -> Result<(), String> {
        self.phase = Phase::Answer;
        let Some(form) = &mut self.form else { return Ok(()) };
        if rest.is_empty() && !self.marks.gap.is_empty() {
            self.phase = Phase::Forced { tokens: self.marks.gap.clone(), at: 0 };
            return Ok(());
        }
        // The tag was spelt out, and its last token says more.
        let begun = rest.trim_ascii_start();
        let tokens = form.tok_env().map(|env| env.tok_trie().greedy_tokenize(begun));
        tokens.and_then(|tokens| form.consume_tokens(&tokens)).map_err(|error| first_line(&error.to_string()))
    }

    fn consume(&mut self, id: u32) -> Result<(), String> {
        let Some(form) = &mut self.form else { return Ok(()) };
        form.consume_token(id).map_err(|error| first_line(&error.to_string()))
    }

    fn check_budget(&mut self) {
        if let (Phase::Reasoning { spent, tail }, Some(budget)) = (&self.phase, self.budget)
            && *spent >= budget
        {
            let tokens = self.marks.closing[usize::from(!tail.ends_with(b"\n"))].clone();
            self.phase = if tokens.is_empty() { Phase::Answer } else { Phase::Forced { tokens, at: 0 } };
        }
    }

    fn one(&self, id: u32) -> NextTokens {
        let mut words = vec![0; self.marks.open.len()];
        if let Some(word) = words.get_mut(id as usize / 32) {
            *word = 1 << (id % 32);
        }
        NextTokens::Only(words)
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
