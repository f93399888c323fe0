//! Sequences of finished requests, kept for later prompts that extend them.

use super::{cache_salt::CachedPrompt, sequence::Sequence};
use crate::model::SequenceState;

/// Idle sequences, oldest first.
pub struct IdleSequences<S>(Vec<IdleSequence<S>>);

/// A sequence that no live request uses.
pub struct IdleSequence<S> {
    pub sequence: Sequence<S>,
    /// Value of [`clear_count`](super::prompt_cache::PromptCache::clear_count) when the sequence's request began.
    pub clear_count: u64,
}

impl<S> Default for IdleSequences<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S: SequenceState> IdleSequences<S> {
    pub fn push(&mut self, sequence: Sequence<S>, clear_count: u64) {
        self.0.push(IdleSequence { sequence, clear_count });
    }

    /// Index and length of the longest sequence that is a prefix of the prompt.
    fn longest(&self, prompt: CachedPrompt<'_>) -> Option<(usize, usize)> {
        let prefixes = self.0.iter().enumerate().filter(|(_, idle)| idle.sequence.is_prefix_of(prompt));
        prefixes.map(|(index, idle)| (index, idle.sequence.len())).max_by_key(|(_, len)| *len)
    }

    /// Length of the longest sequence that is a prefix of the prompt, in tokens.
    pub fn prefix_len(&self, prompt: CachedPrompt<'_>) -> usize {
        self.longest(prompt).map_or(0, |(_, len)| len)
    }

    /// Removes and returns the longest sequence that is a prefix of the prompt.
    pub fn take_prefix(&mut self, prompt: CachedPrompt<'_>) -> Option<Sequence<S>> {
        self.longest(prompt).map(|(index, _)| self.0.remove(index).sequence)
    }

    /// Drops sequences whose requests began before the prompt cache was last cleared.
    pub fn drop_cleared(&mut self, clear_count: u64) {
        self.0.retain(|idle| idle.clear_count == clear_count);
    }

    /// Drops the oldest sequence. Returns false if there is no sequence.
    pub fn drop_oldest(&mut self) -> bool {
        if self.0.is_empty() {
            return false;
        }
        self.0.remove(0);
        true
    }

    pub fn newest(&mut self) -> Option<&mut IdleSequence<S>> {
        self.0.last_mut()
    }

    pub fn drop_newest(&mut self) {
        self.0.pop();
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}
