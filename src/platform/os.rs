//! Facts from the operating system: memory and its limits, cores, I/O counts, user directories.
//!
//! Values that a system does not report are `None`, never a guess.

#[cfg(target_os = "linux")]
mod cgroup;
mod pressure;
mod process;

pub use pressure::{MemoryLevel, MemoryMonitor};
pub use process::{cpu_seconds, max_files, open_files, process_stat};

use std::path::{Path, PathBuf};

/// Bytes of physical memory in this machine.
pub fn total_memory() -> Option<u64> {
    sys::total_memory()
}

/// The machine's own name in the network.
pub fn host_name() -> Option<String> {
    let mut name = [0; 256];
    // SAFETY: the call writes at most the given number of bytes into the buffer. The last byte stays zero.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0)?;
    (status == 0).then(|| String::from_utf8_lossy(&name[..length]).into_owned())
}

/// The operating system's name and version.
pub fn system() -> Option<String> {
    sys::system()
}

/// The processor's name.
pub fn processor() -> Option<String> {
    sys::processor()
}

/// The lowest memory limit of the control groups (v1 or v2) that this process is in, ancestors included. `None` without a
/// limit, and on systems without control groups.
pub fn cgroup_limit() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return cgroup::limit();
    #[cfg(not(target_os = "linux"))]
    None
}

/// Number of physical cores that this process may use, at least 1: performance cores where cores differ. Hardware threads
/// of one core count once. A CPU quota limits the number.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    sys::physical_cores().unwrap_or(allowed).clamp(1, allowed)
}

/// Resident memory of this process, in bytes.
pub fn resident_memory() -> Option<u64> {
    sys::resident_memory()
}

/// Memory of this process in bytes, by kind: `resident`; on Linux also `swapped` and `locked`; on macOS also `footprint`,
/// which decides whether the system kills a process, and `wired`.
pub fn process_memory() -> Vec<(&'static str, u64)> {
    sys::process_memory()
}

/// Peak resident memory of this process, in bytes.
pub fn peak_resident_memory() -> Option<u64> {
    sys::peak_resident_memory()
}

/// Raises the limit of open files to what the system allows, and returns it.
pub fn raise_descriptor_limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local `rlimit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return None;
    }
    // macOS has its own limit below the hard one.
    let raised = libc::rlimit { rlim_cur: limit.rlim_max.min(10_240).max(limit.rlim_cur), ..limit };
    // SAFETY: the pointer is to a local `rlimit`. A refused change has no effect.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
        limit = raised;
    }
    usize::try_from(limit.rlim_cur).ok()
}

/// Configures glibc to return freed memory to the operating system. Blocks of 1 MiB and more are mapped and unmapped
/// directly. By default glibc raises that threshold once such a block was freed, keeps the memory, and copies growing
/// blocks instead of remapping them. Smaller blocks share one heap, because [`trim_memory`] does not release per-thread
/// heaps completely.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets integers under a lock of glibc.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns memory that the allocator keeps after `free` to the operating system (glibc). Takes up to a few milliseconds.
pub fn trim_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc locks its own state. The call has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes that the disk delivered to this process since it started. Hits in the page cache do not count.
pub fn disk_bytes_read() -> Option<u64> {
    sys::disk_bytes_read()
}

/// Gives this thread the lowest priority for CPU and disk. If the system refuses, the priority is unchanged.
pub fn background_thread() {
    sys::background_thread();
}

/// Marks this thread as one that a user waits for. macOS then runs it on performance cores, also if the process was started
/// by a background service.
pub fn interactive_thread() {
    sys::interactive_thread();
}

/// Bytes available to this user on the file system of `path`, or of its nearest existing ancestor.
pub fn free_space(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|p| p.exists()).filter(|p| !p.as_os_str().is_empty());
    let path = existing.unwrap_or(Path::new("."));
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a NUL-terminated string. `stat` is large enough and is read only on success.
    let stat = unsafe { (libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    #[allow(clippy::unnecessary_cast)] // the fields' widths differ between systems
    (stat.f_bavail as u64).checked_mul(stat.f_frsize as u64)
}

/// Asks a child process to end (SIGTERM). Nothing happens if it has ended.
pub fn terminate(child: u32) {
    if let Ok(id @ 1..) = libc::pid_t::try_from(child) {
        // SAFETY: a system call on a number. A positive number is one process.
        unsafe {
            libc::kill(id, libc::SIGTERM);
        }
    }
}

/// The numeric user id.
pub fn user() -> u32 {
    // SAFETY: a system call without arguments that cannot fail.
    unsafe { libc::getuid() }
}

/// The directory for files that can be recreated: `$XDG_CACHE_HOME/moestro`, else `~/.cache/moestro`; on macOS
/// `~/Library/Caches/moestro` unless `XDG_CACHE_HOME` is set. `None` without a home directory.
pub fn cache_dir() -> Option<PathBuf> {
    user_dir("XDG_CACHE_HOME", sys::CACHE)
}

/// The directory for user data: `$XDG_DATA_HOME/moestro`, else `~/.local/share/moestro`; on macOS
/// `~/Library/Application Support/moestro` unless `XDG_DATA_HOME` is set. `None` without a home directory.
pub fn data_dir() -> Option<PathBuf> {
    user_dir("XDG_DATA_HOME", sys::DATA)
}

/// The directory for state such as histories: `$XDG_STATE_HOME/moestro`, else `~/.local/state/moestro`; on
/// macOS the same as [`data_dir`] unless `XDG_STATE_HOME` is set. `None` without a home directory.
pub fn state_dir() -> Option<PathBuf> {
    user_dir("XDG_STATE_HOME", sys::STATE)
}

/// `moestro` in the directory that `variable` names, else in the directory `inside` of the home directory.
fn user_dir(variable: &str, inside: &str) -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(inside)))?;
    Some(base.join("moestro"))
}

#[cfg(target_os = "linux")]
mod sys {
    use std::{collections::BTreeSet, fs};

    pub const CACHE: &str = ".cache";
    pub const DATA: &str = ".local/share";
    pub const STATE: &str = ".local/state";

    /// The number of `key` in a `key: value [kB]` table of `/proc`.
    pub fn field(table: &str, key: &str) -> Option<u64> {
        let line = table.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        let mut words = line.split_whitespace();
        let value: u64 = words.next()?.parse().ok()?;
        if words.next() == Some("kB") { value.checked_mul(1024) } else { Some(value) }
    }

    pub fn background_thread() {
        const WHO_PROCESS: libc::c_int = 1;
        /// I/O class 3, idle: disk time only when no other process needs it.
        const IDLE: libc::c_int = 3 << 13;
        // SAFETY: system calls without pointers on the calling thread. The results are ignored.
        unsafe {
            libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as libc::id_t, 19);
            libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, IDLE);
        }
    }

    pub fn interactive_thread() {}

    pub fn system() -> Option<String> {
        let release = fs::read_to_string("/etc/os-release").ok()?;
        let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?.trim_matches('"');
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
        Some(format!("{name}, Linux {}", kernel.trim()))
    }

    pub fn processor() -> Option<String> {
        let table = fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = table.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().into())
    }

    pub fn total_memory() -> Option<u64> {
        field(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal")
    }

    pub fn physical_cores() -> Option<usize> {
        let affinity = fs::read_to_string("/proc/self/status").ok()?;
        let allowed = affinity.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let siblings = |cpu: usize| {
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
        };
        let cores: BTreeSet<String> = list(allowed.trim())?.into_iter().map(siblings).collect::<Option<_>>()?;
        Some(cores.len())
    }

    /// Parses a kernel list such as `0-3,8,10-11`.
    pub fn list(text: &str) -> Option<Vec<usize>> {
        let mut numbers = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            numbers.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
        }
        Some(numbers)
    }

    pub fn resident_memory() -> Option<u64> {
        field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
    }

    pub fn process_memory() -> Vec<(&'static str, u64)> {
        let table = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kinds = [("resident", "VmRSS"), ("swapped", "VmSwap"), ("locked", "VmLck")];
        kinds.into_iter().filter_map(|(kind, key)| Some((kind, field(&table, key)?))).collect()
    }

    pub fn peak_resident_memory() -> Option<u64> {
        // Not `getrusage`: its maximum survives `exec`, so it can belong to the shell that started this process.
        field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
    }

    pub fn disk_bytes_read() -> Option<u64> {
        field(&fs::read_to_string("/proc/self/io").ok()?, "read_bytes")
    }
}

#[cfg(target_os = "macos")]
mod sys {
    use std::mem::MaybeUninit;

    pub const CACHE: &str = "Library/Caches";
    pub const DATA: &str = "Library/Application Support";
    pub const STATE: &str = DATA;

    pub fn background_thread() {
        // SAFETY: a system call without pointers on the calling thread. The result is ignored.
        unsafe { libc::pthread_set_qos_class_self_np(libc::qos_class_t::QOS_CLASS_BACKGROUND, 0) };
    }

    pub fn interactive_thread() {
        // SAFETY: as above.
        unsafe { libc::pthread_set_qos_class_self_np(libc::qos_class_t::QOS_CLASS_USER_INITIATED, 0) };
    }

    /// The integer value of a `sysctl`.
    pub fn sysctl(name: &std::ffi::CStr) -> Option<u64> {
        let mut bytes = [0u8; 8];
        let mut len = bytes.len();
        // SAFETY: `name` is NUL-terminated. The kernel writes at most `len` bytes and sets `len` to the number written.
        let code =
            unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, std::ptr::null_mut(), 0) };
        // Little-endian: a 4-byte value leaves the upper half zero.
        (code == 0 && (len == 4 || len == 8)).then(|| u64::from_le_bytes(bytes))
    }

    /// The text value of a `sysctl`.
    fn text(name: &std::ffi::CStr) -> Option<String> {
        let mut bytes = [0u8; 128];
        let mut len = bytes.len();
        // SAFETY: as in `sysctl`.
        let code =
            unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, std::ptr::null_mut(), 0) };
        let text = std::ffi::CStr::from_bytes_until_nul(&bytes).ok()?;
        (code == 0).then(|| text.to_string_lossy().into_owned())
    }

    pub fn system() -> Option<String> {
        Some(format!("macOS {}", text(c"kern.osproductversion")?))
    }

    pub fn processor() -> Option<String> {
        Some(format!("{} ({})", text(c"machdep.cpu.brand_string")?, text(c"hw.model")?))
    }

    fn usage() -> Option<libc::rusage_info_v4> {
        let mut info = MaybeUninit::<libc::rusage_info_v4>::zeroed();
        // SAFETY: the flavour matches the buffer, a `rusage_info_v4`. All-zero bytes are a valid value of it.
        unsafe {
            let code = libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, info.as_mut_ptr().cast());
            (code == 0).then(|| info.assume_init())
        }
    }

    pub fn total_memory() -> Option<u64> {
        sysctl(c"hw.memsize")
    }

    pub fn physical_cores() -> Option<usize> {
        let cores = sysctl(c"hw.perflevel0.physicalcpu").or_else(|| sysctl(c"hw.physicalcpu"))?;
        usize::try_from(cores).ok()
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

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod sys {
    pub const CACHE: &str = ".cache";
    pub const DATA: &str = ".local/share";
    pub const STATE: &str = ".local/state";

    pub fn background_thread() {}

    pub fn interactive_thread() {}

    pub fn system() -> Option<String> {
        None
    }
    pub fn processor() -> Option<String> {
        None
    }
    pub fn total_memory() -> Option<u64> {
        None
    }
    pub fn physical_cores() -> Option<usize> {
        None
    }
    pub fn resident_memory() -> Option<u64> {
        None
    }
    pub fn process_memory() -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    pub fn peak_resident_memory() -> Option<u64> {
        None
    }
    pub fn disk_bytes_read() -> Option<u64> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn machine_reports_memory_and_cores() {
        let total = total_memory().unwrap();
        let resident = resident_memory().unwrap();
        assert!(resident > 0 && resident < total, "{resident} of {total}");
        assert!(peak_resident_memory().unwrap() >= resident / 2);
        assert!(physical_cores() >= 1);
        assert!(free_space(Path::new("/no/such/place/yet")).unwrap() > 0);
        assert!(free_space(Path::new("relative")).unwrap() > 0);
    }

    #[test]
    fn proc_tables_and_lists_parse() {
        assert_eq!(sys::field("A:\t12 kB\nAB: 3\n", "A"), Some(12 * 1024));
        assert_eq!(sys::field("A:\t12 kB\nAB: 3\n", "AB"), Some(3));
        assert_eq!(sys::field("A: x\n", "A"), None);
        assert_eq!(sys::list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(sys::list("0-"), None);
    }

    #[test]
    fn written_memory_becomes_resident() {
        let before = resident_memory().unwrap();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = resident_memory().unwrap();
        assert!(after >= before + (48 << 20), "{before} -> {after}");
        drop(block);
    }
}
