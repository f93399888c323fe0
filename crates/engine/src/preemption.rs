//! Decides which live requests keep their pages if the page pool has too few pages for all of them.

use super::live_request::LiveRequest;
use moestro_model::model::{PagePool, SequenceState};

/// Number of pages that the requests hold or are expected to need.
pub fn reserved_pages<'a, S: SequenceState + 'a>(live: impl IntoIterator<Item = &'a LiveRequest<S>>) -> usize {
    live.into_iter().map(LiveRequest::reserved_pages).sum()
}

/// False for a preempted request while the other requests need the pages that the preempted request would use.
pub fn may_resume<S: SequenceState>(request: &LiveRequest<S>, all: &[LiveRequest<S>], pool: Option<&PagePool>) -> bool {
    let Some(pool) = pool.filter(|_| request.sequence.is_none()) else { return true };
    let taken = reserved_pages(all.iter().filter(|other| other.sequence.is_some()));
    taken == 0 || request.reserved_pages() + taken <= pool.count()
}

/// Drops the sequence of the youngest request, unless no other request has a sequence. Returns the index of the
/// request.
pub fn preempt_youngest<S: SequenceState>(live: &mut [LiveRequest<S>]) -> Option<usize> {
    let mut holders = (0..live.len()).rev().filter(|&index| live[index].sequence.is_some());
    let youngest = holders.next()?;
    let _other = holders.next()?;
    live[youngest].drop_sequence();
    Some(youngest)
}
