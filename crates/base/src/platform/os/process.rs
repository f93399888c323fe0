//! Resource use of this process: memory, disk reads, open files, threads, CPU time and address space.

use std::fs;
pub use sys::{disk_bytes_read, peak_resident_memory, process_memory, resident_memory};

/// Memory of this process that the system cannot move or free, in bytes. `None` if the system does not report it.
pub fn wired_memory() -> Option<u64> {
    process_memory().into_iter().find(|(kind, _)| *kind == "wired").map(|(_, bytes)| bytes)
}

/// Raises the limit of open files to the system's maximum, but at most 10,240. Returns the new limit.
pub fn raise_descriptor_limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local `rlimit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return None;
    }
    // macOS refuses values above `OPEN_MAX` (10,240), even if the hard limit is higher.
    let raised = libc::rlimit { rlim_cur: limit.rlim_max.min(10_240).max(limit.rlim_cur), ..limit };
    // SAFETY: the pointer is to a local `rlimit`. A refused change has no effect.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
        limit = raised;
    }
    usize::try_from(limit.rlim_cur).ok()
}

/// Number of open file descriptors of this process.
pub fn open_files() -> Option<u64> {
    // The descriptor of the directory itself does not count.
    Some((fs::read_dir("/dev/fd").ok()?.count() as u64).saturating_sub(1))
}

/// The limit of open files. `None` if there is no limit.
pub fn max_files() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local `rlimit`.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// CPU time of all threads of this process in seconds, in user mode and in the kernel.
pub fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the buffer is a `rusage`, and all-zero bytes are a valid `rusage`.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Values of this process that are only available in `/proc`.
#[derive(Debug, PartialEq)]
pub struct ProcessStat {
    pub threads: u64,
    /// Start of the process, in seconds since 1970.
    pub started: u64,
    pub virtual_memory: u64,
}

/// Threads, start and address space of this process. `None` on systems without `/proc`.
pub fn process_stat() -> Option<ProcessStat> {
    let read = |file| fs::read_to_string(file).ok();
    // SAFETY: a system call without pointers.
    let ticks = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|&ticks| ticks > 0)?;
    parse(&read("/proc/self/stat")?, &read("/proc/stat")?, ticks)
}

/// Parses `/proc/self/stat`, and the boot time in `/proc/stat`. In `/proc/self/stat`, the process name is in brackets
/// and may itself contain spaces and brackets.
fn parse(process: &str, system: &str, ticks: u64) -> Option<ProcessStat> {
    let (_, fields) = process.rsplit_once(')')?;
    // In proc(5), the first field after the name has number 3.
    let field = |number: usize| fields.split_whitespace().nth(number - 3)?.parse::<u64>().ok();
    let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(ProcessStat { threads: field(20)?, started: boot + field(22)? / ticks, virtual_memory: field(23)? })
}

#[cfg(target_os = "linux")]
mod sys {
    use super::super::proc_table::field;
    use std::fs;

    /// Resident memory of this process, in bytes.
    pub fn resident_memory() -> Option<u64> {
        field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
    }

    /// Memory of this process in bytes, by kind: `resident` on all systems, `swapped` and `locked` on Linux,
    /// `footprint` and `wired` on macOS. macOS decides by the footprint which processes to kill.
    pub fn process_memory() -> Vec<(&'static str, u64)> {
        let table = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kinds = [("resident", "VmRSS"), ("swapped", "VmSwap"), ("locked", "VmLck")];
        kinds.into_iter().filter_map(|(kind, key)| Some((kind, field(&table, key)?))).collect()
    }

    /// Peak resident memory of this process, in bytes.
    pub fn peak_resident_memory() -> Option<u64> {
        // `getrusage` cannot be used: its maximum survives `exec`, so it may belong to the shell that started this
        // process.
        field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
    }

    /// Number of bytes that this process has read from disks since it started, not counting hits in the page cache.
    pub fn disk_bytes_read() -> Option<u64> {
        field(&fs::read_to_string("/proc/self/io").ok()?, "read_bytes")
    }
}

#[cfg(target_os = "macos")]
mod sys {
    use std::mem::MaybeUninit;

    fn usage() -> Option<libc::rusage_info_v4> {
        let mut info = MaybeUninit::<libc::rusage_info_v4>::zeroed();
        // SAFETY: the flavour matches the buffer, a `rusage_info_v4`. All-zero bytes are a valid `rusage_info_v4`.
        unsafe {
            let code = libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, info.as_mut_ptr().cast());
            (code == 0).then(|| info.assume_init())
        }
    }

    pub fn resident_memory() -> Option<u64> {
        Some(usage()?.ri_resident_size)
    }

    pub fn process_memory() -> Vec<(&'static str, u64)> {
        usage().map_or(Vec::new(), |usage| {
            let kinds = [usage.ri_resident_size, usage.ri_phys_footprint, usage.ri_wired_size];
            ["resident", "footprint", "wired"].into_iter().zip(kinds).collect()
        })
    }

    pub fn peak_resident_memory() -> Option<u64> {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the buffer is a `rusage` and is read only on success. macOS reports `ru_maxrss` in bytes.
        let usage =
            unsafe { (libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) == 0).then(|| usage.assume_init()) };
        u64::try_from(usage?.ru_maxrss).ok()
    }

    pub fn disk_bytes_read() -> Option<u64> {
        Some(usage()?.ri_diskio_bytesread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::own_process::{ran_in_own_process, ran_in_own_process_with};

    #[test]
    fn stat_parses_with_brackets_in_name() {
        let process = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 9 8 0 0 20 0 5 0 1250 4096000 300 1 1\n";
        let expected = ProcessStat { threads: 5, started: 1_000_012, virtual_memory: 4_096_000 };
        assert_eq!(parse(process, "cpu 1\nbtime 1000000\n", 100), Some(expected));
        assert_eq!(parse("7 (a) S 1", "btime 1\n", 100), None);
        assert_eq!(parse(process, "cpu 1\n", 100), None);
    }

    #[test]
    fn open_file_is_counted() {
        if ran_in_own_process(open_file_is_counted) {
            return;
        }
        let before = open_files().unwrap();
        let held: Vec<_> = (0..64).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        assert_eq!(open_files().unwrap(), before + 64);
        assert!(before + 64 <= max_files().unwrap_or(u64::MAX));
        drop(held);
        assert_eq!(open_files().unwrap(), before);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        if ran_in_own_process(cpu_time_grows_with_work) {
            return;
        }
        let before = cpu_seconds();
        while cpu_seconds() < before + 0.005 {
            std::hint::spin_loop();
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn written_memory_becomes_resident() {
        if ran_in_own_process(written_memory_becomes_resident) {
            return;
        }
        let before = resident_memory().unwrap();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = resident_memory().unwrap();
        assert!(after >= before + (48 << 20), "{before} -> {after}");
        drop(block);
        assert!(peak_resident_memory().unwrap() >= after / 2);
    }

    #[test]
    fn own_process_runs_one_test() {
        const PARENT: &str = "MOESTRO_TEST_PARENT";
        let id = std::process::id().to_string();
        if ran_in_own_process_with(own_process_runs_one_test, |child| _ = child.env(PARENT, &id)) {
            return;
        }
        assert!(std::env::var(PARENT).is_ok_and(|parent| parent != id));
    }

    #[test]
    #[should_panic(expected = "own_process_reports_failure failed in its own process")]
    fn own_process_reports_failure() {
        assert!(ran_in_own_process(own_process_reports_failure), "in the child process");
    }
}
