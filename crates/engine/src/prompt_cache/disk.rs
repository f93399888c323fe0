//! The index of snapshot files on disk, with recent write volume and measured read speed.

use super::snapshot_files::{SnapshotFiles, TokenDigest};
use std::{
    collections::{HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Maximum number of bytes written per hour. The limit reduces SSD wear.
const MAX_BYTES_PER_HOUR: u64 = 16 << 30;
const HOUR: Duration = Duration::from_secs(3600);
/// Factor by which [`Throughput`] multiplies earlier measurements before it adds a new one.
const DECAY: f64 = 0.8;

/// Options of the disk cache, which keeps snapshots across restarts.
#[derive(Debug, Clone)]
pub struct DiskCacheOptions {
    pub dir: PathBuf,
    /// Maximum number of bytes on disk.
    pub limit: u64,
    /// Identifies all inputs of a state except the tokens: checkpoint, arithmetic, device and program version.
    pub key: String,
}

/// The snapshots on disk.
pub struct DiskIndex {
    pub files: Arc<SnapshotFiles>,
    pub limit: u64,
    /// Total bytes of all snapshot files.
    pub bytes: u64,
    /// Number of snapshots on disk that use each page.
    pub pages: HashMap<TokenDigest, usize>,
    /// Time and size of each write within the last hour.
    recent_writes: VecDeque<(Instant, u64)>,
    /// Tokens computed per second.
    pub prefill_speed: Throughput,
    /// Bytes read per second.
    pub read_speed: Throughput,
}

/// The `.state` file of a snapshot.
#[derive(Debug, Clone, Copy)]
pub struct DiskEntry {
    pub bytes: u64,
    pub last_used: SystemTime,
}

impl DiskIndex {
    pub fn new(files: Arc<SnapshotFiles>, limit: u64) -> Self {
        Self {
            files,
            limit,
            bytes: 0,
            pages: HashMap::new(),
            recent_writes: VecDeque::new(),
            prefill_speed: Throughput::default(),
            read_speed: Throughput::default(),
        }
    }

    pub fn record_write(&mut self, bytes: u64) {
        self.recent_writes.push_back((Instant::now(), bytes));
    }

    /// Number of bytes that may be written now.
    pub fn write_allowance(&mut self) -> u64 {
        while self.recent_writes.front().is_some_and(|(at, _)| at.elapsed() > HOUR) {
            self.recent_writes.pop_front();
        }
        MAX_BYTES_PER_HOUR.saturating_sub(self.recent_writes.iter().map(|(_, bytes)| bytes).sum())
    }

    /// For each whole page of `ids`, true if the page is not on disk. Also returns the number of bytes to write for the
    /// snapshot and its missing pages.
    pub fn missing_pages(&self, ids: &[u32]) -> (Vec<bool>, u64) {
        let (pages, _) = self.files.digests(ids);
        let missing: Vec<bool> = pages.iter().map(|page| !self.pages.contains_key(page)).collect();
        let (state, page) = self.files.bytes(ids.len());
        let bytes = state + page * missing.iter().filter(|missing| **missing).count() as u64;
        (missing, bytes)
    }
}

/// An exponentially weighted mean of a speed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Throughput {
    pub amount: f64,
    pub seconds: f64,
}

impl Throughput {
    pub fn record(&mut self, amount: f64, time: Duration) {
        self.amount = DECAY * self.amount + amount;
        self.seconds = DECAY * self.seconds + time.as_secs_f64();
    }

    /// Estimated seconds for `amount`. NaN before the first measurement.
    pub fn seconds_for(&self, amount: f64) -> f64 {
        amount * self.seconds / self.amount
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_measurements_count_less() {
        let mut speed = Throughput::default();
        speed.record(100.0, Duration::from_secs(10));
        speed.record(20.0, Duration::from_secs(4));
        assert_eq!(speed, Throughput { amount: 100.0, seconds: 12.0 });
    }
}
