//! Reads the memory of a process from `/proc`.

/// `VmRSS` or `VmHWM` of `process`, a process id or `self`, in bytes.
pub fn memory(process: impl std::fmt::Display, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}
