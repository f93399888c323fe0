//! Helpers of tests that compare instruction sets.

use super::Isa;

thread_local! {
    /// The instruction set that this thread uses.
    pub(super) static FORCED: std::cell::Cell<Option<Isa>> = const { std::cell::Cell::new(None) };
}

/// Runs `job` with `isa` on this thread.
pub(crate) fn with<R>(isa: Isa, job: impl FnOnce() -> R) -> R {
    FORCED.set(Some(isa));
    let result = job();
    FORCED.set(None);
    result
}
