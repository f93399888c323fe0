//! Memory limits of Linux control groups.
//!
//! `/proc/self/cgroup` names the group of this process, and `/proc/self/mountinfo` lists where hierarchies are mounted.
//! The limits of all ancestors apply, so the effective limit is the lowest limit from the group up to the mount point.
//!
//! In a container, `/proc/self/cgroup` may contain the group's name on the host. To get the path below the mount point,
//! the mount's root is then removed from the start of the name. If the name does not start with the mount's root, the
//! mount point itself is the group.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Lowest value that means "unlimited". Version 1 uses the largest multiple of the page size below 2^63.
const UNLIMITED: u64 = 1 << 62;

/// The lowest memory limit of this process's groups, in bytes.
pub fn limit() -> Option<u64> {
    groups().iter().filter_map(MemoryGroup::limit).min()
}

/// The groups of this process that can limit memory, including the ancestors of each group.
pub fn groups() -> Vec<MemoryGroup> {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    all(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

fn all(groups: &str, mounts: &str) -> Vec<MemoryGroup> {
    let mut found = Vec::new();
    for mount in mounts.lines().filter_map(CgroupMount::parse) {
        let Some(group) = groups.lines().find_map(|line| mount.group(line)) else { continue };
        let inside = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
        found.extend(inside.ancestors().map(|dir| MemoryGroup { version: mount.version, dir: mount.point.join(dir) }));
    }
    found
}

/// A control group that can limit memory.
pub struct MemoryGroup {
    version: u8,
    dir: PathBuf,
}

impl MemoryGroup {
    /// The limit in bytes. Includes `memory.high`, since the kernel heavily throttles processes above it.
    pub fn limit(&self) -> Option<u64> {
        let files: &[&str] =
            if self.version == 2 { &["memory.max", "memory.high"] } else { &["memory.limit_in_bytes"] };
        let limits = files.iter().filter_map(|file| read(&self.dir.join(file)));
        limits.filter(|&limit| limit < UNLIMITED).min()
    }

    /// Number of bytes that the group can still allocate, and the limit of the group. Page cache counts as free, since
    /// the kernel reclaims it first.
    pub fn left(&self) -> Option<(u64, u64)> {
        let limit = self.limit()?;
        let (usage, names) = match self.version {
            2 => ("memory.current", ["active_file", "inactive_file"]),
            _ => ("memory.usage_in_bytes", ["total_active_file", "total_inactive_file"]),
        };
        let usage = read(&self.dir.join(usage))?;
        let stat = fs::read_to_string(self.dir.join("memory.stat")).ok()?;
        let bytes =
            |name| stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
        let files: u64 = names.into_iter().filter_map(bytes).sum();
        Some((limit.saturating_sub(usage.saturating_sub(files)), limit))
    }
}

/// The number in a limit file. `None` if the file contains `max` or cannot be read.
fn read(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// A mounted hierarchy that can limit memory.
struct CgroupMount {
    version: u8,
    /// Name of the group at the mount point, in the namespace of `/proc/self/cgroup`.
    root: PathBuf,
    point: PathBuf,
}

impl CgroupMount {
    /// Parses a line of `mountinfo`: `id parent dev root point options tags... - type source superoptions`.
    fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.split_once(" - ")?;
        let mut head = head.split(' ').skip(3);
        let root = unescape(head.next()?);
        let point = unescape(head.next()?);
        let mut tail = tail.split(' ');
        let version = match tail.next()? {
            "cgroup2" => 2,
            "cgroup" if tail.nth(1)?.split(',').any(|option| option == "memory") => 1,
            _ => return None,
        };
        Some(Self { version, root, point })
    }

    /// The group in a line of `/proc/self/cgroup` (`id:controllers:path`). `None` if the line belongs to another
    /// hierarchy.
    fn group<'a>(&self, line: &'a str) -> Option<&'a Path> {
        let mut parts = line.splitn(3, ':');
        let id = parts.next()?;
        let controllers = parts.next()?;
        let path = parts.next()?;
        let ours = match self.version {
            2 => id == "0" && controllers.is_empty(),
            _ => controllers.split(',').any(|controller| controller == "memory"),
        };
        ours.then(|| Path::new(path))
    }
}

/// Decodes the octal escapes of `mountinfo` for white space and backslashes.
fn unescape(text: &str) -> PathBuf {
    PathBuf::from(text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowest(groups: &str, mounts: &str) -> Option<u64> {
        all(groups, mounts).iter().filter_map(MemoryGroup::limit).min()
    }

    fn put(dir: &Path, file: &str, text: &str) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join(file), text).unwrap();
    }

    #[test]
    fn v2_limit_is_lowest_of_ancestors() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().display();
        put(&root.path().join("a"), "memory.max", "5000\n");
        put(&root.path().join("a/b"), "memory.max", "max\n");
        put(&root.path().join("a/b"), "memory.high", "9000\n");
        put(&root.path().join("c"), "memory.max", "1\n");
        let mounts = format!("30 20 0:26 / {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n");
        assert_eq!(lowest("0::/a/b\n", &mounts), Some(5000));
        put(&root.path().join("a/b"), "memory.high", "4000\n");
        assert_eq!(lowest("0::/a/b\n", &mounts), Some(4000));
        assert_eq!(lowest("0::/\n", &mounts), None);
    }

    #[test]
    fn v1_limit_uses_memory_hierarchy_only() {
        let root = tempfile::tempdir().unwrap();
        let memory = root.path().join("memory");
        let cpu = root.path().join("cpu");
        put(&memory, "memory.limit_in_bytes", "9223372036854771712\n");
        put(&memory.join("box"), "memory.limit_in_bytes", "3000000\n");
        put(&cpu.join("box"), "memory.limit_in_bytes", "7\n");
        let mounts = format!(
            "34 31 0:31 / {} rw - cgroup cgroup rw,cpu\n35 31 0:32 / {} rw - cgroup cgroup rw,memory\n",
            cpu.display(),
            memory.display()
        );
        assert_eq!(lowest("4:memory:/box\n1:cpu:/box\n0::/\n", &mounts), Some(3_000_000));
        assert_eq!(lowest("4:memory:/\n1:cpu:/box\n0::/\n", &mounts), None);
    }

    #[test]
    fn container_group_uses_mount_root() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().display();
        put(root.path(), "memory.limit_in_bytes", "800\n");
        // The mount root is the container's group under its host name.
        let mounts = format!("35 31 0:32 /docker/1f {point} rw - cgroup cgroup rw,memory\n");
        assert_eq!(lowest("4:memory:/docker/1f\n", &mounts), Some(800));
        // The group's name does not start with the mount root.
        assert_eq!(lowest("4:memory:/system.slice/x\n", &mounts), Some(800));
    }

    #[test]
    fn page_cache_counts_as_free() {
        let root = tempfile::tempdir().unwrap();
        let mounts = format!("30 20 0:26 / {} rw - cgroup2 cgroup2 rw\n", root.path().display());
        put(&root.path().join("a"), "memory.max", "1000\n");
        put(&root.path().join("a"), "memory.current", "950\n");
        put(&root.path().join("a"), "memory.stat", "anon 700\nfile 200\ninactive_file 150\nactive_file 50\n");
        let left: Vec<_> = all("0::/a\n", &mounts).iter().filter_map(MemoryGroup::left).collect();
        assert_eq!(left, [(250, 1000)]);
        put(&root.path().join("a"), "memory.current", "1300\n");
        assert_eq!(all("0::/a\n", &mounts)[0].left(), Some((0, 1000)), "usage above a lowered limit leaves nothing");
    }

    #[test]
    fn mountinfo_escapes_are_decoded() {
        assert_eq!(unescape("/a\\040b\\134c"), Path::new("/a b\\c"));
        assert!(CgroupMount::parse("nonsense").is_none());
    }
}
