//! [`SequenceCache`]: finds the state from which a prompt starts. A prompt extends the sequence of a finished request,
//! or restores a snapshot, or starts empty.

use super::{
    cache_salt::CachedPrompt,
    prompt_cache::{PromptCache, SnapshotKind, SnapshotSource, snapshot_policy},
    request::Request,
    sequence::Sequence,
};
use moestro_model::{
    error::ModelError,
    model::{Model, PagePool, SequenceState},
};
use std::sync::Arc;

/// The sequences of finished requests, and the prompt cache.
pub struct SequenceCache<S> {
    /// Oldest first.
    idle: Vec<IdleSequence<S>>,
    pub snapshots: Arc<PromptCache>,
}

/// A sequence that no live request uses.
struct IdleSequence<S> {
    sequence: Sequence<S>,
    /// Value of [`PromptCache::clear_count`] when the sequence's request began.
    clear_count: u64,
}

impl<S: SequenceState> SequenceCache<S> {
    pub fn new(snapshots: Arc<PromptCache>) -> Self {
        Self { idle: Vec::new(), snapshots }
    }

    /// Index of the longest idle sequence that is a prefix of the prompt.
    fn longest_idle(&self, prompt: CachedPrompt<'_>) -> Option<usize> {
        let prefixes = self.idle.iter().enumerate().filter(|(_, idle)| idle.sequence.is_prefix_of(prompt));
        prefixes.max_by_key(|(_, idle)| idle.sequence.len()).map(|(index, _)| index)
    }

    /// Length of the longest cached prefix of the prompt, in tokens.
    pub fn prefix_len(&self, prompt: CachedPrompt<'_>) -> usize {
        let idle = self.longest_idle(prompt).map_or(0, |index| self.idle[index].sequence.len());
        idle.max(self.snapshots.prefix_len(&prompt.keys()))
    }

    /// A sequence with the longest cached prefix of `prompt`, and the source of the snapshot if the prefix comes from a
    /// snapshot. `clear_count` is the value of [`PromptCache::clear_count`] when the request began.
    ///
    /// Drops idle sequences before a new state is allocated, so that at most `max_idle` remain.
    pub fn resume<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        request: &Request,
        prompt: CachedPrompt<'_>,
        clear_count: u64,
        max_idle: usize,
    ) -> Result<(Sequence<S>, Option<SnapshotSource>), ModelError> {
        // A cleared cache must not contain earlier prompts.
        self.idle.retain(|idle| idle.clear_count == clear_count);
        let longest = self.longest_idle(prompt).filter(|_| request.may_reuse());
        let previous = longest.map(|index| self.idle.remove(index).sequence);
        while self.idle.len() > max_idle {
            self.drop_oldest();
        }
        let keys = prompt.keys();
        let mut source = None;
        let sequence = Sequence::sync(previous, model, prompt, |model, offered| {
            // A snapshot shares only whole pages, so the sequence needs one page for the tokens after them.
            self.snapshots.evict_for_pages(1);
            let (snapshot, from) =
                if request.may_reuse() { self.snapshots.longest_prefix(&keys, offered, model) } else { None }?;
            source = Some(from);
            Some(snapshot)
        })?;
        Ok((sequence, source))
    }

    /// The positions at which to take snapshots of the request's prompt, ascending. The first `cached` tokens are
    /// cached.
    pub fn snapshot_positions(&self, request: &Request, cached: usize) -> Vec<(usize, SnapshotKind)> {
        let max = if request.cache_prompt { self.snapshots.max_snapshots_per_prompt() } else { 0 };
        let mut positions = snapshot_policy::choose(&request.boundaries, cached, request.ids.len(), max);
        positions.retain(|&(at, _)| request.cached_prompt().has_whole_keys(at));
        positions
    }

    /// Keeps the sequence of a finished request.
    pub fn keep(&mut self, sequence: Sequence<S>, clear_count: u64) {
        self.idle.push(IdleSequence { sequence, clear_count });
    }

    /// Takes a snapshot of the newest idle sequence. If this fails, drops the sequence.
    pub fn save_newest<M: Model<State = S>>(&mut self, model: &mut M) -> Result<(), ModelError> {
        let Some(IdleSequence { sequence, clear_count }) = self.idle.last_mut() else { return Ok(()) };
        if !sequence.cached_prompt().has_whole_keys(sequence.len()) {
            return Ok(());
        }
        let cache = &self.snapshots;
        let needed = || cache.snapshot_size().bytes(sequence.len(), sequence.state().shared_positions());
        let keys = sequence.cached_prompt().keys().into_owned();
        if !cache.make_room(&keys, SnapshotKind::Answer, &needed) {
            return Ok(());
        }
        match sequence.snapshot(model) {
            Ok(snapshot) => cache.insert(&keys, SnapshotKind::Answer, snapshot, *clear_count),
            Err(error) => {
                self.idle.pop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Evicts snapshots, and then drops idle sequences, until `missing()` pages are free. Returns false if there are
    /// too few pages.
    pub fn free_pages(&mut self, pool: Option<&PagePool>, missing: &dyn Fn() -> usize) -> bool {
        loop {
            // A snapshot can share pages with the sequences that need some, so the number changes.
            let missing = missing();
            self.snapshots.evict_for_pages(missing);
            if pool.is_none_or(|pool| pool.free() >= missing) {
                return true;
            }
            if self.idle.is_empty() {
                return false;
            }
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        self.idle.remove(0);
    }

    /// Drops everything in memory, because the device that holds it is lost. New snapshots share the pages of `pool`.
    pub fn clear(&mut self, pool: Option<Arc<PagePool>>) {
        self.idle.clear();
        self.snapshots.set_page_pool(pool);
    }
}
