//! The memory that requests take: their bodies, these parsed and rendered, their tokens. A request asks for its [`Share`]
//! before it takes the memory, and is refused if there is none: with 503 if others hold it, with 413 if it is more than
//! there is. The plan sets the budget aside, as its `requests`.
//!
//! Work that takes long or much (parsing, rendering, tokenizing) runs beside the asynchronous threads, a few at a time,
//! in the order of arrival, and in steps that are short, because a step cannot be interrupted: a client that leaves is
//! noticed after the step that it waits for.

use crate::http::errors::ApiError;
use crate::{metrics::Metrics, platform::os};
use prometheus::IntGauge;
use serde_json::Value;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Semaphore, task::spawn_blocking};

/// The budget until the plan is known, in bytes.
const UNPLANNED: usize = 128 << 20;

/// Memory for each byte of text that is being tokenized: 309 bytes were measured for a text of digits, the most.
pub const TOKENIZING: usize = 400;

/// The bytes of text that one step of tokenizing may take without asking, and the memory set aside for it.
pub const PIECE: usize = 20 << 10;
const STEP: usize = TOKENIZING * PIECE;

/// Steps at a time: one in a small budget.
const STEPS: [usize; 2] = [1, 2];

/// A share beyond this is large. Large ones leave a quarter of the budget to the small.
const LARGE: usize = 256 << 10;

/// Memory for each bracket, comma and colon of JSON read into [`Value`]s: 246 bytes were measured for `[[[0]]]` repeated,
/// the most.
const MARK: usize = 256;

/// Bytes freed before they are returned to the operating system.
const WORTH_TRIMMING: usize = 1 << 20;

/// An answer is freed a little later than the share of its request.
const TRIM_AFTER: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(400)];

/// The requests' memory, in bytes.
pub struct RequestMemory {
    total: AtomicUsize,
    used: AtomicUsize,
    gauge: IntGauge,
    steps: Arc<Semaphore>,
    /// There was room for two steps once.
    wide: AtomicBool,
    /// Freed since the last trim, and whether one is due.
    freed: AtomicUsize,
    trimming: AtomicBool,
}

impl RequestMemory {
    pub fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            total: AtomicUsize::new(UNPLANNED),
            used: AtomicUsize::new(0),
            gauge: metrics.memory_requests.clone(),
            steps: Arc::new(Semaphore::new(STEPS[0])),
            wide: AtomicBool::new(false),
            freed: AtomicUsize::new(0),
            trimming: AtomicBool::new(false),
        })
    }

    /// Sets the budget to what the plan of the model that is loaded says.
    pub fn plan(&self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if bytes >= 64 << 20 && !self.wide.swap(true, Relaxed) {
            self.steps.add_permits(STEPS[1] - STEPS[0]);
        }
        let steps = STEPS[usize::from(self.wide.load(Relaxed))];
        self.total.store(bytes.saturating_sub(steps * STEP), Relaxed);
    }

    /// Bytes that all shares may hold together.
    pub fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    pub fn permit(self: &Arc<Self>) -> MemoryPermit {
        MemoryPermit { held: Arc::new(PermitBytes { budget: self.clone(), bytes: AtomicUsize::new(0) }) }
    }

    fn take_back(self: &Arc<Self>, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
        self.gauge.sub(signed(bytes));
        if self.freed.fetch_add(bytes, Relaxed).saturating_add(bytes) > WORTH_TRIMMING {
            self.trim();
        }
    }

    fn trim(self: &Arc<Self>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.trimming.swap(true, Relaxed) {
            return;
        }
        let budget = self.clone();
        runtime.spawn(async move {
            for wait in TRIM_AFTER {
                tokio::time::sleep(wait).await;
                budget.freed.store(0, Relaxed);
                // It may take some milliseconds. That it was done is not waited for.
                drop(spawn_blocking(os::trim_memory));
            }
            budget.trimming.store(false, Relaxed);
            if budget.freed.load(Relaxed) > WORTH_TRIMMING {
                budget.trim();
            }
        });
    }
}

/// One request's part of the budget; given back when it and its last step are gone.
pub struct MemoryPermit {
    held: Arc<PermitBytes>,
}

struct PermitBytes {
    budget: Arc<RequestMemory>,
    /// Changed by the share alone.
    bytes: AtomicUsize,
}

impl MemoryPermit {
    /// Holds `bytes` in all from now on.
    pub fn resize(&mut self, bytes: usize) -> Result<(), ApiError> {
        let (budget, before) = (&self.held.budget, self.bytes());
        let more = bytes.saturating_sub(before);
        if more > 0 {
            let total = budget.total.load(Relaxed);
            let most = if bytes > LARGE { total / 4 * 3 } else { total };
            if bytes > most {
                return Err(ApiError::too_much_memory(bytes, most));
            }
            let fits = |used: usize| used.checked_add(more).filter(|&used| used <= most);
            budget.used.fetch_update(Relaxed, Relaxed, fits).map_err(|_| ApiError::memory_in_use())?;
            budget.gauge.add(signed(more));
        } else {
            budget.take_back(before - bytes);
        }
        self.held.bytes.store(bytes, Relaxed);
        Ok(())
    }

    /// Holds `bytes` more.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.resize(self.bytes().saturating_add(bytes))
    }

    pub fn bytes(&self) -> usize {
        self.held.bytes.load(Relaxed)
    }

    /// Runs one step beside the asynchronous threads, when it is its turn. If nobody waits for it any more, it does not
    /// begin.
    pub async fn run<T: Send + 'static>(&self, step: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let failed = |_| ApiError::failed("The request could not be worked on.");
        let turn =
            self.held.budget.steps.clone().acquire_owned().await.map_err(|_| ApiError::failed("The server stops."))?;
        // The request of a client that left is dropped before its memory is counted as free.
        let held = self.held.clone();
        let step = move || {
            let done = step();
            drop(turn);
            (done, held)
        };
        let (done, _) = spawn_blocking(step).await.map_err(failed)?;
        Ok(done)
    }
}

impl Drop for PermitBytes {
    fn drop(&mut self) {
        self.budget.take_back(self.bytes.load(Relaxed));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The most memory that `json` takes when it is read into [`Value`]s, its strings included: what it has of brackets,
/// commas and colons outside of strings bounds how many there can be.
pub fn parsed(json: &[u8]) -> usize {
    let (mut marks, mut inside, mut escaped) = (0usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = inside,
            b'"' => inside = !inside,
            b'[' | b'{' | b',' | b':' if !inside => marks += 1,
            _ => {}
        }
    }
    json.len().saturating_add(marks.saturating_mul(MARK))
}

/// The memory that rendering takes for `values`: a copy, the template's values, what it makes of each text, and the
/// prompt, which may have room for twice its length.
pub fn rendered<'a>(values: impl IntoIterator<Item = &'a Value>) -> usize {
    values.into_iter().map(rendering).sum()
}

fn rendering(value: &Value) -> usize {
    MARK + match value {
        Value::String(text) => 5 * text.len(),
        Value::Array(items) => items.iter().map(rendering).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| 5 * name.len() + MARK + rendering(value)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn budget(bytes: usize) -> Arc<RequestMemory> {
        let budget = RequestMemory::new(&Metrics::new("0", "cpu"));
        budget.plan((bytes + STEP) as u64);
        budget
    }

    #[test]
    fn what_is_held_is_given_back() {
        let budget = budget(1 << 20);
        let (mut one, mut other) = (budget.permit(), budget.permit());
        one.resize(700 << 10).unwrap();
        assert_eq!(other.resize(300 << 10).unwrap_err().status, 503, "others hold it");
        assert_eq!(other.resize(2 << 20).unwrap_err().status, 413, "there never is as much");
        other.resize(200 << 10).unwrap();
        other.grow(50 << 10).unwrap();
        assert_eq!(budget.gauge.get(), 950 << 10);
        one.resize(1).unwrap();
        other.resize(700 << 10).unwrap();
        drop((one, other));
        assert_eq!((budget.used.load(Relaxed), budget.gauge.get()), (0, 0));
    }

    #[test]
    fn there_is_a_second_step_at_a_time_once_there_was_room_for_it() {
        let budget = RequestMemory::new(&Metrics::new("0", "cpu"));
        let enough: usize = 64 << 20;
        for (bytes, steps) in [(enough - 1, 1), (enough, 2), (2 * enough, 2), (enough / 2, 2), (enough, 2)] {
            budget.plan(bytes as u64);
            assert_eq!(budget.steps.available_permits(), steps, "{bytes} bytes");
            assert_eq!(budget.total(), bytes - steps * STEP, "{bytes} bytes");
        }
    }

    #[test]
    fn the_large_leave_room_for_the_small() {
        let budget = budget(4 << 20);
        let mut large = [budget.permit(), budget.permit(), budget.permit(), budget.permit()];
        let held = large.iter_mut().filter_map(|permit| permit.resize(1 << 20).ok()).count();
        assert_eq!(held, 3);
        budget.permit().resize(LARGE).unwrap();
    }

    #[tokio::test]
    async fn memory_is_trimmed_twice_and_then_left_alone() {
        let budget = budget(64 << 20);
        budget.permit().resize(WORTH_TRIMMING).unwrap();
        assert!(!budget.trimming.load(Relaxed), "that was not worth it");
        budget.permit().resize(WORTH_TRIMMING).unwrap();
        assert!(budget.trimming.load(Relaxed));
        let over = tokio::time::timeout(Duration::from_secs(20), async {
            while budget.trimming.load(Relaxed) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        over.await.expect("an end");
        assert_eq!(budget.freed.load(Relaxed), 0);
    }

    #[test]
    fn marks_in_strings_do_not_count() {
        assert_eq!(parsed(br#"{"a": [0, 0], "b,:[{": "\"[,"}"#), 30 + 6 * MARK);
        assert_eq!(parsed(b""), 0);
    }

    #[test]
    fn what_is_rendered_counts_its_texts() {
        assert_eq!(rendered([&json!("abcd")]), MARK + 20);
        assert_eq!(rendered([&json!({"ab": [1, null]})]), MARK + 10 + MARK + 3 * MARK);
    }
}
