//! Divides the time between prefill and decode, and chooses the chunk size of a prefill.
//!
//! Decoding sequences wait while a chunk of a prompt runs. After a chunk of `t` seconds, sequences decode for `t`
//! seconds before the next chunk, so they keep at least half of their rate. A short prompt is exempt in two ways: it
//! may start before these `t` seconds are over, and it may start before an older, longer prompt is complete. The time
//! of such exempt chunks is limited, so that a stream of short requests cannot starve other requests.

use std::time::{Duration, Instant};

/// Time for which chunks stay small after the last moment when several requests were live. A client that sends one
/// request after another is absent for some milliseconds between two of them, and for seconds if it runs a tool. Its
/// next request must not wait for a chunk of the largest size.
const ABSENCE: Duration = Duration::from_secs(5);
/// Target duration of a chunk while several requests share the time, in seconds.
pub const CHUNK_SECONDS: f64 = 0.5;
/// Number of chunk sizes: the largest size, a half of it, a quarter, and so on.
const SIZES: usize = 6;
/// Minimum chunk size in rows.
const MIN_ROWS: usize = 32;
/// Maximum time per row of a chosen chunk size, relative to the most efficient size. Small chunks can be inefficient: a
/// streamed model reads most experts once per chunk, even if the chunk has few rows.
const MAX_COST: f64 = 1.5;
/// Weight of a new measurement in the exponential moving average of a chunk size's duration.
const NEW_WEIGHT: f64 = 0.3;

#[derive(Default)]
pub struct TimeShare {
    /// Number of seconds that decoding sequences must run before the next chunk that is not exempt.
    decode_debt: f64,
    /// Total seconds of chunks that ran although `decode_debt` was positive. Reset when the debt is paid.
    skipped_wait: f64,
    /// Total seconds of chunks that overtook an older prompt, minus the seconds of other chunks. At least 0.
    overtaking: f64,
    /// Duration in seconds of the last chunk that ran with `decode_debt` 0.
    last_chunk: f64,
    /// Mean seconds of a chunk by size, largest size first. `None` if the size was never measured.
    seconds: [Option<f64>; SIZES],
    /// The last moment when several requests were live.
    last_shared: Option<Instant>,
}

impl TimeShare {
    /// True if the time is divided among several requests, or was until [`ABSENCE`] ago. `live` is the number of live
    /// requests.
    pub fn is_shared(&mut self, live: usize, now: Instant) -> bool {
        if live > 1 {
            self.last_shared = Some(now);
        }
        self.last_shared.is_some_and(|last| now.duration_since(last) < ABSENCE)
    }

    /// Number of rows in the next chunk while requests share the time. `most` is the largest chunk size.
    pub fn chunk_rows(&self, most: usize) -> usize {
        let sizes = (0..SIZES).filter(|size| *size == 0 || most >> size >= MIN_ROWS);
        let least = most >> sizes.clone().next_back().unwrap_or(0);
        let expected: Vec<_> = sizes.filter_map(|size| Some((most >> size, self.expected(size)?))).collect();
        let cost = |&(rows, seconds): &(usize, f64)| seconds / rows as f64;
        let limit = MAX_COST * expected.iter().map(cost).fold(f64::INFINITY, f64::min);
        // The chunk is at most twice the largest measured size, since an estimate can be wrong.
        let largest = most >> self.seconds.iter().position(Option::is_some).unwrap_or(0);
        let mut efficient = expected.iter().filter(|size| cost(size) <= limit && size.0 / 2 <= largest);
        let next = expected.iter().find(|size| size.0 / 2 <= largest);
        let smallest = efficient.clone().next_back().or(next);
        efficient.find(|size| size.1 <= CHUNK_SECONDS).or(smallest).map_or(least, |size| size.0)
    }

    /// Expected seconds of a chunk, by index of its size. `None` if neither this size nor a size near it was measured.
    fn expected(&self, size: usize) -> Option<f64> {
        let known = |size: usize| self.seconds.get(size).copied().flatten();
        // A size below the measured sizes is expected to take the same time per row. For a size above them, the line
        // through the two largest measured sizes is extrapolated. If only one size was measured, twice the rows are
        // expected to take the same time.
        let from_larger = (0..size).rev().find_map(|larger| Some(known(larger)? / (1 << (size - larger)) as f64));
        let from_smaller = || {
            let largest = (size..SIZES).find(|&size| known(size).is_some())?;
            let seconds = known(largest)?;
            let Some(half) = known(largest + 1) else { return Some(seconds).filter(|_| largest == size + 1) };
            let grown = 2 * ((1 << (largest - size)) - 1);
            Some(seconds + f64::from(grown) * (seconds - half).max(0.0))
        };
        known(size).or(from_larger).or_else(from_smaller)
    }

    /// True if a chunk may run while sequences decode. `is_short` is true if the chunk completes its prompt.
    pub fn may_run_chunk(&self, is_short: bool) -> bool {
        self.decode_debt <= 0.0 || (is_short && self.skipped_wait < self.allowance())
    }

    /// True if a short prompt may run before an older prompt is complete.
    pub fn may_overtake(&self) -> bool {
        self.overtaking < self.allowance()
    }

    /// Maximum total seconds of chunks that run early, and maximum total seconds of chunks that overtake an older
    /// prompt.
    fn allowance(&self) -> f64 {
        self.last_chunk.max(CHUNK_SECONDS)
    }

    /// Records the duration of a chunk. `most` is the largest chunk size. `overtakes` is true if an older prompt was
    /// not complete.
    pub fn record_chunk(&mut self, rows: usize, most: usize, seconds: f64, overtakes: bool) {
        if self.decode_debt > 0.0 {
            self.skipped_wait += seconds
        } else {
            self.last_chunk = seconds
        }
        self.decode_debt += seconds;
        self.overtaking += if overtakes { seconds } else { -seconds.min(self.overtaking) };
        if let Some(size) = (0..SIZES).find(|size| most >> size == rows) {
            let mean = self.seconds[size].map_or(seconds, |mean| mean + NEW_WEIGHT * (seconds - mean));
            self.seconds[size] = Some(mean);
        }
    }

    /// Records the duration of a decode step.
    pub fn record_decode(&mut self, seconds: f64) {
        self.decode_debt -= seconds;
        if self.decode_debt <= 0.0 {
            self.decode_debt = 0.0;
            self.skipped_wait = 0.0;
        }
    }

    /// Clears the debt. Called when no sequence decodes.
    pub fn clear_decode_debt(&mut self) {
        self.decode_debt = 0.0;
        self.skipped_wait = 0.0;
    }
}
