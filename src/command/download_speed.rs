//! [`DownloadSpeed`]: the speed of a download over the last seconds. Counts only bytes that this run has received.

use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Time over which the speed is averaged.
const WINDOW: Duration = Duration::from_secs(10);
/// Minimum time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Samples of a download: time and bytes received until then. The first sample is at most one older than the window.
#[derive(Default)]
pub struct DownloadSpeed(Mutex<VecDeque<(Instant, u64)>>);

impl DownloadSpeed {
    /// `received` is the number of bytes that this run has received.
    pub fn record(&self, received: u64) {
        self.record_at(Instant::now(), received);
    }

    /// Bytes per second.
    pub fn per_second(&self) -> f64 {
        self.per_second_at(Instant::now())
    }

    fn record_at(&self, now: Instant, received: u64) {
        let mut samples = self.0.lock();
        // The time until the first bytes arrive is no part of the speed.
        if samples.back().is_some_and(|(_, before)| *before == 0) {
            samples.clear();
        }
        if samples.back().is_none_or(|(last, _)| now.duration_since(*last) >= SAMPLE_INTERVAL) {
            samples.push_back((now, received));
        }
        while samples.get(1).is_some_and(|(second, _)| now.duration_since(*second) > WINDOW) {
            samples.pop_front();
        }
    }

    fn per_second_at(&self, now: Instant) -> f64 {
        let samples = self.0.lock();
        let (Some((start, before)), Some((_, received))) = (samples.front(), samples.back()) else { return 0.0 };
        let seconds = now.duration_since(*start).as_secs_f64();
        if seconds > 0.0 { (received - before) as f64 / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_first_bytes_is_not_counted() {
        let speed = DownloadSpeed::default();
        let start = Instant::now();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        speed.record_at(at(0), 0);
        for tenth in 20..=50 {
            speed.record_at(at(tenth), (tenth - 19) * 1_000_000);
        }
        assert!((speed.per_second_at(at(50)) / 1e7 - 1.0).abs() < 0.01, "{}", speed.per_second_at(at(50)));
    }

    #[test]
    fn speed_is_that_of_last_seconds() {
        let speed = DownloadSpeed::default();
        let start = Instant::now();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        assert_eq!(speed.per_second_at(at(0)), 0.0);
        for tenth in 0..=50 {
            speed.record_at(at(tenth), tenth * 4_500_000);
        }
        assert!((speed.per_second_at(at(50)) / 45e6 - 1.0).abs() < 0.01, "{}", speed.per_second_at(at(50)));
        // Ten times as slow for 20 seconds.
        for tenth in 51..=250 {
            speed.record_at(at(tenth), 50 * 4_500_000 + (tenth - 50) * 450_000);
        }
        assert!((speed.per_second_at(at(250)) / 4.5e6 - 1.0).abs() < 0.02, "{}", speed.per_second_at(at(250)));
        assert!(speed.per_second_at(at(1250)) < 5e5, "a stalled download becomes slow");
    }
}
