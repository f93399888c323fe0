//! Reads the memory and the number of open files of a process from `/proc`.

/// The value `VmRSS` or `VmHWM` of a process, in bytes. `process` is a process id or `self`.
pub fn memory(process: impl std::fmt::Display, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Number of open files of `process`, a process id or `self`.
pub fn open_files(process: impl std::fmt::Display) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}
