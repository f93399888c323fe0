//! [`MemoryMonitor`] detects memory pressure, on the machine or in this process's control groups.
//!
//! On Linux the monitor compares the free memory with the total. For the machine, the free memory is `MemAvailable`.
//! For each control group, it is the limit minus the usage. Memory stalls (`/proc/pressure/memory`) are a second
//! signal. Stalls count only if little memory is free, because processes in another group may cause them. macOS reports
//! a pressure level instead of a number of bytes.

use std::time::Duration;

/// The amount of free memory of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLevel {
    /// Memory is short: this process should free this many bytes now.
    Short(u64),
    /// Memory is not short, but this process should not allocate more.
    Enough,
    /// This many bytes can be allocated without causing a shortage.
    Spare(u64),
}

/// Memory is short if less than `1 / SHORT` of the total is free. For comparison, a memory plan leaves 1/11 of a
/// group's limit or a quarter of the machine's memory free.
#[cfg(any(target_os = "linux", test))]
const SHORT: u64 = 32;
/// Memory can be allocated while more than `1 / SPARE` of the total is free.
#[cfg(any(target_os = "linux", test))]
const SPARE: u64 = 16;

/// Reads the system's memory counters.
pub struct MemoryMonitor {
    #[cfg(target_os = "linux")]
    groups: Vec<super::cgroup::MemoryGroup>,
    /// Time of the next check of memory stalls.
    #[cfg(target_os = "linux")]
    next_stall_check: std::time::Instant,
}

impl MemoryMonitor {
    /// Interval between two calls of `check`.
    pub const CHECK_INTERVAL: Duration = Duration::from_millis(250);
}

#[cfg(target_os = "linux")]
impl MemoryMonitor {
    /// Percentage of the last ten seconds. If processes waited for memory for a larger share of this time, memory is
    /// short.
    const MAX_STALL_PERCENT: f64 = 10.0;
    /// Memory stalls are ignored if at least `1 / STALLS_IGNORED_ABOVE` of memory is free.
    const STALLS_IGNORED_ABOVE: u64 = 8;
    /// Interval at which the kernel updates its stall averages.
    const STALL_INTERVAL: Duration = Duration::from_secs(2);

    /// Time until the kernel counts freed memory as available.
    pub const SETTLE_TIME: Duration = Duration::from_millis(250);

    pub fn open() -> Self {
        Self { groups: super::cgroup::groups(), next_stall_check: std::time::Instant::now() }
    }

    pub fn check(&mut self) -> MemoryLevel {
        let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let [left, all] = ["MemAvailable", "MemTotal"].map(|name| super::proc_table::field(&table, name));
        let machine = left.zip(all);
        let mut memory = judge(machine.into_iter().chain(self.groups.iter().filter_map(|group| group.left())));
        let now = std::time::Instant::now();
        if let Some((_, all)) =
            machine.filter(|(left, all)| *left < all / Self::STALLS_IGNORED_ABOVE && now >= self.next_stall_check)
        {
            self.next_stall_check = now + Self::STALL_INTERVAL;
            let stalls = std::fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
            if stall_percent(&stalls) > Self::MAX_STALL_PERCENT {
                memory = worse(memory, MemoryLevel::Short(all / 64));
            }
        }
        memory
    }
}

#[cfg(target_os = "macos")]
impl MemoryMonitor {
    /// Time until the pressure level changes after memory was freed.
    pub const SETTLE_TIME: Duration = Duration::from_secs(2);

    pub fn open() -> Self {
        Self {}
    }

    /// Reads the pressure level: 1 (normal), 2 (warning) or 4 (critical), as in `DISPATCH_SOURCE_TYPE_MEMORYPRESSURE`.
    pub fn check(&mut self) -> MemoryLevel {
        let all = super::machine::total_memory().unwrap_or(0);
        match super::sysctl::number(c"kern.memorystatus_vm_pressure_level") {
            Some(4..) => MemoryLevel::Short(all / 16),
            Some(2..) => MemoryLevel::Short(all / 64),
            Some(_) => MemoryLevel::Spare(all / 64),
            None => MemoryLevel::Enough,
        }
    }
}

/// The worst level of several bounds. Each bound has the number of bytes left and the total. If memory is short, the
/// result is the number of bytes to free so that 1/16 of the total is free.
#[cfg(any(target_os = "linux", test))]
fn judge(bounds: impl Iterator<Item = (u64, u64)>) -> MemoryLevel {
    let one = |(left, all): (u64, u64)| match left {
        left if left < all / SHORT => MemoryLevel::Short(all / SPARE - left),
        left if left <= all / SPARE => MemoryLevel::Enough,
        left => MemoryLevel::Spare(left - all / SPARE),
    };
    bounds.map(one).reduce(worse).unwrap_or(MemoryLevel::Enough)
}

#[cfg(any(target_os = "linux", test))]
fn worse(a: MemoryLevel, b: MemoryLevel) -> MemoryLevel {
    use MemoryLevel::{Enough, Short, Spare};
    match (a, b) {
        (Short(a), Short(b)) => Short(a.max(b)),
        (Short(a), _) | (_, Short(a)) => Short(a),
        (Spare(a), Spare(b)) => Spare(a.min(b)),
        _ => Enough,
    }
}

/// Parses the value of `avg10` in the line `some avg10=1.23 avg60=...`.
#[cfg(any(target_os = "linux", test))]
fn stall_percent(text: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let share = line.and_then(|line| line.split(' ').find_map(|word| word.strip_prefix("avg10=")));
    share.and_then(|share| share.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tightest_bound_decides_the_level() {
        let all = 3200;
        assert_eq!(judge([].into_iter()), MemoryLevel::Enough);
        assert_eq!(judge([(1000, all)].into_iter()), MemoryLevel::Spare(800));
        assert_eq!(judge([(1000, all), (300, all)].into_iter()), MemoryLevel::Spare(100));
        assert_eq!(judge([(1000, all), (200, all)].into_iter()), MemoryLevel::Enough);
        assert_eq!(judge([(99, all), (1000, all)].into_iter()), MemoryLevel::Short(101));
        assert_eq!(judge([(99, all), (0, 320), (150, all)].into_iter()), MemoryLevel::Short(101));
        // After this number of bytes is freed, memory is neither short nor spare.
        assert_eq!(judge([(99 + 101, all)].into_iter()), MemoryLevel::Enough);
    }

    #[test]
    fn stall_percentage_parses() {
        let text =
            "some avg10=12.50 avg60=3.00 avg300=0.00 total=145770069\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(stall_percent(text), 12.5);
        assert_eq!(stall_percent("full avg10=9.00"), 0.0);
        assert_eq!(stall_percent(""), 0.0);
    }
}
