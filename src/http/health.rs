//! Storage health: whether the model's files were readable when they were last read.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Time after which a failure is forgotten if no request follows. A load balancer that only uses healthy servers would
/// otherwise never send the request that shows the recovery.
pub const FAILURE_MAX_AGE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub struct StorageHealth {
    failure: Mutex<Option<(Instant, String)>>,
}

impl StorageHealth {
    /// Records the outcome of a generation: a storage error, or `None` if the generation finished.
    pub fn record(&self, error: Option<&dyn std::fmt::Display>) {
        let failure = error.map(|error| (Instant::now(), error.to_string()));
        *self.failure.lock() = failure;
    }

    /// The last storage error, if the error is recent and no generation has finished after it.
    pub fn failure(&self) -> Option<String> {
        let failure = self.failure.lock();
        failure.as_ref().filter(|(at, _)| at.elapsed() < FAILURE_MAX_AGE).map(|(_, error)| error.clone())
    }
}
