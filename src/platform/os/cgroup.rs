//! Memory limits of Linux control groups.
//!
//! `/proc/self/cgroup` names this process's group, `/proc/self/mountinfo` where the hierarchies are mounted. A limit on
//! any ancestor binds, so the least of the group and all its ancestors up to the mount point counts. In a container the
//! group's name may be the host's: then only what lies below the mount's own root can be looked up, and if the name is
//! outside of it, the mount point itself is the group.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Values at or above this mean "unlimited" (v1 writes the largest multiple of the page size below 2^63).
const UNLIMITED: u64 = 1 << 62;

pub fn limit() -> Option<u64> {
    groups().iter().filter_map(Group::limit).min()
}

/// The groups that this process is in, and their ancestors: those that can limit memory.
pub fn groups() -> Vec<Group> {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    all(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

fn all(groups: &str, mounts: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for mount in mounts.lines().filter_map(Mount::parse) {
        let Some(group) = groups.lines().find_map(|line| mount.group(line)) else { continue };
        let inside = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
        found.extend(inside.ancestors().map(|dir| Group { version: mount.version, dir: mount.point.join(dir) }));
    }
    found
}

/// One group.
pub struct Group {
    version: u8,
    dir: PathBuf,
}

impl Group {
    /// `memory.high` kills nothing but slows a process above it to a crawl, so it binds as well.
    pub fn limit(&self) -> Option<u64> {
        let files: &[&str] =
            if self.version == 2 { &["memory.max", "memory.high"] } else { &["memory.limit_in_bytes"] };
        let limits = files.iter().filter_map(|file| read(&self.dir.join(file)));
        limits.filter(|&limit| limit < UNLIMITED).min()
    }

    /// Bytes that the group may still take, and its limit. Pages of files count as free, as the kernel drops them first.
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

/// The number in a limit file; `max` and unreadable files are no limit.
fn read(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// One mounted hierarchy that can limit memory.
struct Mount {
    version: u8,
    /// The group that the mount point shows, as named in `/proc/self/cgroup`.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A line of `mountinfo`: `id parent dev root point options tags... - type source superoptions`.
    fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.split_once(" - ")?;
        let mut head = head.split(' ').skip(3);
        let (root, point) = (unescape(head.next()?), unescape(head.next()?));
        let mut tail = tail.split(' ');
        let version = match tail.next()? {
            "cgroup2" => 2,
            "cgroup" if tail.nth(1)?.split(',').any(|option| option == "memory") => 1,
            _ => return None,
        };
        Some(Self { version, root, point })
    }

    /// The group that a line of `/proc/self/cgroup` (`id:controllers:path`) names, if it is of this hierarchy.
    fn group<'a>(&self, line: &'a str) -> Option<&'a Path> {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let ours = match self.version {
            2 => id == "0" && controllers.is_empty(),
            _ => controllers.split(',').any(|controller| controller == "memory"),
        };
        ours.then(|| Path::new(path))
    }
}

/// Undoes `mountinfo`'s octal escapes of blanks and backslashes.
fn unescape(text: &str) -> PathBuf {
    PathBuf::from(text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn least(groups: &str, mounts: &str) -> Option<u64> {
        all(groups, mounts).iter().filter_map(Group::limit).min()
    }

    fn put(dir: &Path, file: &str, text: &str) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join(file), text).unwrap();
    }

    #[test]
    fn v2_takes_the_least_of_all_ancestors() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().display();
        put(&root.path().join("a"), "memory.max", "5000\n");
        put(&root.path().join("a/b"), "memory.max", "max\n");
        put(&root.path().join("a/b"), "memory.high", "9000\n");
        put(&root.path().join("c"), "memory.max", "1\n");
        let mounts = format!("30 20 0:26 / {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n");
        assert_eq!(least("0::/a/b\n", &mounts), Some(5000));
        put(&root.path().join("a/b"), "memory.high", "4000\n");
        assert_eq!(least("0::/a/b\n", &mounts), Some(4000));
        assert_eq!(least("0::/\n", &mounts), None);
    }

    #[test]
    fn v1_reads_the_memory_hierarchy_only() {
        let root = tempfile::tempdir().unwrap();
        let (memory, cpu) = (root.path().join("memory"), root.path().join("cpu"));
        put(&memory, "memory.limit_in_bytes", "9223372036854771712\n");
        put(&memory.join("box"), "memory.limit_in_bytes", "3000000\n");
        put(&cpu.join("box"), "memory.limit_in_bytes", "7\n");
        let mounts = format!(
            "34 31 0:31 / {} rw - cgroup cgroup rw,cpu\n35 31 0:32 / {} rw - cgroup cgroup rw,memory\n",
            cpu.display(),
            memory.display()
        );
        assert_eq!(least("4:memory:/box\n1:cpu:/box\n0::/\n", &mounts), Some(3_000_000));
        assert_eq!(least("4:memory:/\n1:cpu:/box\n0::/\n", &mounts), None);
    }

    #[test]
    fn a_container_sees_its_own_root() {
        let root = tempfile::tempdir().unwrap();
        let point = root.path().display();
        put(root.path(), "memory.limit_in_bytes", "800\n");
        // The mount shows the container's group, by its host name ...
        let mounts = format!("35 31 0:32 /docker/1f {point} rw - cgroup cgroup rw,memory\n");
        assert_eq!(least("4:memory:/docker/1f\n", &mounts), Some(800));
        // ... or the group's name has nothing to do with the mount.
        assert_eq!(least("4:memory:/system.slice/x\n", &mounts), Some(800));
    }

    #[test]
    fn pages_of_files_count_as_free() {
        let root = tempfile::tempdir().unwrap();
        let mounts = format!("30 20 0:26 / {} rw - cgroup2 cgroup2 rw\n", root.path().display());
        put(&root.path().join("a"), "memory.max", "1000\n");
        put(&root.path().join("a"), "memory.current", "950\n");
        put(&root.path().join("a"), "memory.stat", "anon 700\nfile 200\ninactive_file 150\nactive_file 50\n");
        let left: Vec<_> = all("0::/a\n", &mounts).iter().filter_map(Group::left).collect();
        assert_eq!(left, [(250, 1000)]);
        put(&root.path().join("a"), "memory.current", "1300\n");
        assert_eq!(all("0::/a\n", &mounts)[0].left(), Some((0, 1000)), "more is held than the new limit allows");
    }

    #[test]
    fn escapes() {
        assert_eq!(unescape("/a\\040b\\134c"), Path::new("/a b\\c"));
        assert!(Mount::parse("nonsense").is_none());
    }
}
