//! Memory that runs short while this process runs: of the machine, or of the control groups it is in.
//!
//! On Linux what is left is counted (`MemAvailable`, and each group's limit less what its processes hold), and stalls for want
//! of memory are a second sign (`/proc/pressure/memory`), which counts only where not much is left: they may be those of
//! others in a group of their own. macOS tells a level of pressure and no number.

use std::time::Duration;

/// The system's memory now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// So many had better be given back at once.
    Short(u64),
    /// There is enough, and not more.
    Enough,
    /// So many can be taken without its getting short.
    Spare(u64),
}

/// Memory is short with less than 1/32 of it left, and can be taken down to 1/16. A plan leaves 1/11 of a group's limit and
/// a quarter of the machine's memory.
#[cfg(any(target_os = "linux", test))]
const SHORT: u64 = 32;
#[cfg(any(target_os = "linux", test))]
const SPARE: u64 = 16;

/// Whom to ask.
pub struct Pressure {
    #[cfg(target_os = "linux")]
    groups: Vec<super::cgroup::Group>,
    /// The next look at stalls: the kernel brings them up to date as seldom.
    #[cfg(target_os = "linux")]
    next: std::time::Instant,
}

#[cfg(target_os = "linux")]
impl Pressure {
    /// The share of the last ten seconds in which somebody stood still for want of memory that is too much (per cent), and
    /// the part of memory left from which on that does not count.
    const STALLED: f64 = 10.0;
    const PLENTY: u64 = 8;
    const STALLS: Duration = Duration::from_secs(2);

    /// The time until memory that was given back is counted as free.
    pub const SETTLES: Duration = Duration::from_millis(250);

    pub fn new() -> Self {
        Self { groups: super::cgroup::groups(), next: std::time::Instant::now() }
    }

    pub fn look(&mut self) -> Memory {
        let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let [left, all] = ["MemAvailable", "MemTotal"].map(|name| super::sys::field(&table, name));
        let machine = left.zip(all);
        let mut memory = judge(machine.into_iter().chain(self.groups.iter().filter_map(|group| group.left())));
        let now = std::time::Instant::now();
        if let Some((_, all)) = machine.filter(|(left, all)| *left < all / Self::PLENTY && now >= self.next) {
            self.next = now + Self::STALLS;
            let stalls = std::fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
            if stalled(&stalls) > Self::STALLED {
                memory = worse(memory, Memory::Short(all / 64));
            }
        }
        memory
    }
}

#[cfg(target_os = "macos")]
impl Pressure {
    /// The level changes some seconds after memory was given back.
    pub const SETTLES: Duration = Duration::from_secs(2);

    pub fn new() -> Self {
        Self {}
    }

    /// The level is 1 (normal), 2 (warning) or 4 (critical): what `DISPATCH_SOURCE_TYPE_MEMORYPRESSURE` tells, asked for.
    pub fn look(&mut self) -> Memory {
        let all = super::total_memory().unwrap_or(0);
        match super::sys::sysctl(c"kern.memorystatus_vm_pressure_level") {
            Some(4..) => Memory::Short(all / 16),
            Some(2..) => Memory::Short(all / 64),
            Some(_) => Memory::Spare(all / 64),
            None => Memory::Enough,
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
impl Pressure {
    pub const SETTLES: Duration = Duration::from_secs(2);

    pub fn new() -> Self {
        Self {}
    }

    pub fn look(&mut self) -> Memory {
        Memory::Enough
    }
}

impl Default for Pressure {
    fn default() -> Self {
        Self::new()
    }
}

/// The least favourable of several bounds: bytes left, and bytes in all. Short of one, so much is missing that giving it back
/// leaves some to spare.
#[cfg(any(target_os = "linux", test))]
fn judge(bounds: impl Iterator<Item = (u64, u64)>) -> Memory {
    let one = |(left, all): (u64, u64)| match left {
        left if left < all / SHORT => Memory::Short(all / SPARE - left),
        left if left <= all / SPARE => Memory::Enough,
        left => Memory::Spare(left - all / SPARE),
    };
    bounds.map(one).reduce(worse).unwrap_or(Memory::Enough)
}

#[cfg(any(target_os = "linux", test))]
fn worse(a: Memory, b: Memory) -> Memory {
    use Memory::{Enough, Short, Spare};
    match (a, b) {
        (Short(a), Short(b)) => Short(a.max(b)),
        (Short(a), _) | (_, Short(a)) => Short(a),
        (Spare(a), Spare(b)) => Spare(a.min(b)),
        _ => Enough,
    }
}

/// `avg10` of the line `some avg10=1.23 avg60=...`.
#[cfg(any(target_os = "linux", test))]
fn stalled(text: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let share = line.and_then(|line| line.split(' ').find_map(|word| word.strip_prefix("avg10=")));
    share.and_then(|share| share.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_bound_counts() {
        let all = 3200;
        assert_eq!(judge([].into_iter()), Memory::Enough);
        assert_eq!(judge([(1000, all)].into_iter()), Memory::Spare(800));
        assert_eq!(judge([(1000, all), (300, all)].into_iter()), Memory::Spare(100));
        assert_eq!(judge([(1000, all), (200, all)].into_iter()), Memory::Enough);
        assert_eq!(judge([(99, all), (1000, all)].into_iter()), Memory::Short(101));
        assert_eq!(judge([(99, all), (0, 320), (150, all)].into_iter()), Memory::Short(101));
        // Giving that back leaves enough: neither short again at once, nor so much that it is taken again.
        assert_eq!(judge([(99 + 101, all)].into_iter()), Memory::Enough);
    }

    #[test]
    fn stalls_are_read() {
        let text =
            "some avg10=12.50 avg60=3.00 avg300=0.00 total=145770069\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(stalled(text), 12.5);
        assert_eq!(stalled("full avg10=9.00"), 0.0);
        assert_eq!(stalled(""), 0.0);
    }
}
