//! Reads the memory of a process from `/proc`.

/// The value `VmRSS` or `VmHWM` of a process, in bytes. `process` is a process id or `self`.
pub fn memory(process: impl std::fmt::Display, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}
