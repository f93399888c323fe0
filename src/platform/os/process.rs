//! What this process uses: files, threads, CPU time, address space.

use std::fs;

/// Open file descriptors of this process.
pub fn open_files() -> Option<u64> {
    // The directory itself is open while it is read.
    Some((fs::read_dir("/dev/fd").ok()?.count() as u64).saturating_sub(1))
}

/// The limit of open files. `None` without a limit.
pub fn max_files() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local `rlimit`.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// CPU seconds of all threads of this process, user and system.
pub fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the buffer is a `rusage`, and all-zero bytes are a valid value of it.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// What only `/proc` tells.
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

/// Parses `/proc/self/stat` and the system's start in `/proc/stat`. The process's name, in brackets, may hold spaces.
fn parse(process: &str, system: &str, ticks: u64) -> Option<ProcessStat> {
    let (_, fields) = process.rsplit_once(')')?;
    // The first field after the name has number 3 in proc(5).
    let field = |number: usize| fields.split_whitespace().nth(number - 3)?.parse::<u64>().ok();
    let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(ProcessStat { threads: field(20)?, started: boot + field(22)? / ticks, virtual_memory: field(23)? })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let open = || open_files().unwrap();
        // Other tests open and close files meanwhile.
        let held: Vec<_> = (0..64).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        assert!(open() >= 64 && open() <= max_files().unwrap_or(u64::MAX));
        drop(held);
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let before = cpu_seconds();
        while cpu_seconds() < before + 0.005 {
            std::hint::spin_loop();
        }
    }
}
