//! Name, memory, processor and cores of the machine.

pub use sys::{processor, system, total_memory};

/// The machine's host name.
pub fn host_name() -> Option<String> {
    let mut name = [0; 256];
    // SAFETY: the call writes at most the given number of bytes into the buffer. The last byte stays zero.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0)?;
    (status == 0).then(|| String::from_utf8_lossy(&name[..length]).into_owned())
}

/// Number of physical cores that this process may use, at least 1. If there are several kinds of cores, counts only
/// performance cores. A core with several hardware threads counts once. A CPU quota limits the number.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    sys::physical_cores().unwrap_or(allowed).clamp(1, allowed)
}

#[cfg(target_os = "linux")]
mod sys {
    use super::super::proc_table::field;
    use std::{collections::BTreeSet, fs};

    /// The operating system's name and version.
    pub fn system() -> Option<String> {
        let release = fs::read_to_string("/etc/os-release").ok()?;
        let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?.trim_matches('"');
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
        Some(format!("{name}, Linux {}", kernel.trim()))
    }

    /// The processor's name.
    pub fn processor() -> Option<String> {
        let table = fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = table.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().into())
    }

    /// Size of the physical memory of this machine in bytes.
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
}

#[cfg(target_os = "macos")]
mod sys {
    use super::super::sysctl;

    pub fn system() -> Option<String> {
        Some(format!("macOS {}", sysctl::text(c"kern.osproductversion")?))
    }

    pub fn processor() -> Option<String> {
        Some(format!("{} ({})", sysctl::text(c"machdep.cpu.brand_string")?, sysctl::text(c"hw.model")?))
    }

    pub fn total_memory() -> Option<u64> {
        sysctl::number(c"hw.memsize")
    }

    pub fn physical_cores() -> Option<usize> {
        let cores = sysctl::number(c"hw.perflevel0.physicalcpu").or_else(|| sysctl::number(c"hw.physicalcpu"))?;
        usize::try_from(cores).ok()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn machine_reports_memory_and_cores() {
        assert!(total_memory().unwrap() > 1 << 28);
        assert!(physical_cores() >= 1);
    }

    #[test]
    fn kernel_lists_parse() {
        assert_eq!(sys::list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(sys::list("0-"), None);
    }
}
