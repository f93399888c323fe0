//! Finds the new requests whose prompt begins like a prompt that is being computed. They wait for a snapshot at the end
//! of the common prefix, if that is sooner than computing the prefix a second time.

use super::{
    live_request::{LiveRequest, Stage},
    sequence_cache::SequenceCache,
};
use moestro_model::model::SequenceState;

/// Sets [`LiveRequest::waits_for_prefix`] and [`LiveRequest::awaited`] of all requests. Called before each step, so
/// that no request waits for one that has ended, or has lost its sequence.
///
/// A request that others wait for takes a snapshot at the end of the common prefix, in addition to its own snapshots.
pub fn find_waiting<S: SequenceState>(live: &mut [LiveRequest<S>], sequences: &SequenceCache<S>) {
    for live in &mut *live {
        live.waits_for_prefix = false;
        live.awaited = None;
    }
    // A cache with room for few snapshots keeps those that the prompt chose for itself.
    let may_add = sequences.snapshots.max_snapshots_per_prompt() > 1;
    let clear_count = sequences.snapshots.clear_count();
    for new in 0..live.len() {
        let LiveRequest { submitted, stage: Stage::New, .. } = &live[new] else { continue };
        if !submitted.request.may_reuse() {
            continue;
        }
        let prompt = submitted.request.cached_prompt();
        let cached = sequences.prefix_len(prompt);
        // A snapshot of a request that began before the cache was cleared would not be kept.
        let others = live.iter().enumerate().filter(|(_, other)| other.clear_count == clear_count);
        let coming = others.filter_map(|(index, other)| Some((other.coming_snapshot(prompt, cached, may_add)?, index)));
        if let Some((at, other)) = coming.max() {
            live[new].waits_for_prefix = true;
            live[other].expect_snapshot(at);
        }
    }
}
