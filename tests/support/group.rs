//! [`Group`]: a memory control group (v1 or v2) for one test. Dropping this value removes the group.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

pub struct Group {
    dir: PathBuf,
    limit: &'static str,
}

impl Group {
    /// Creates a group. Returns `None` if this process has no permission to create a group.
    pub fn new() -> Option<Self> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let name = format!("moestro-test-{}-{}", std::process::id(), TURN.fetch_add(1, Ordering::Relaxed));
        let v1 = Path::new("/sys/fs/cgroup/memory").to_owned();
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let v2 =
            own.lines().find_map(|line| line.strip_prefix("0::/")).map(|own| Path::new("/sys/fs/cgroup").join(own));
        [(v1, "memory.limit_in_bytes"), (v2?, "memory.max")].into_iter().find_map(|(parent, limit)| {
            let group = Self { dir: parent.join(&name), limit };
            fs::create_dir(&group.dir).ok()?;
            group.dir.join(limit).exists().then_some(group)
        })
    }

    /// A group for a process with this memory limit. Without the permission to create a group, prints a note and
    /// returns `None`.
    pub fn with_margin(limit: u64) -> Option<Self> {
        let group = Self::new();
        match &group {
            Some(group) => group.set_margin(limit),
            None => eprintln!("cannot create a memory control group: limits are measured, not enforced"),
        }
        group
    }

    /// Lets the kernel kill a process that exceeds this memory limit by more than 10 %.
    pub fn set_margin(&self, limit: u64) {
        self.set(limit + limit / 10 + 4096);
    }

    pub fn set(&self, bytes: u64) {
        self.try_set(bytes).unwrap();
    }

    /// Sets the group's memory limit. Version 1 refuses a limit below the group's current usage.
    pub fn try_set(&self, bytes: u64) -> std::io::Result<()> {
        fs::write(self.dir.join(self.limit), bytes.to_string())
    }

    /// The number of processes that the kernel killed in the group.
    pub fn kills(&self) -> u64 {
        let read = |file: &str| fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        let text = read("memory.oom_control") + &read("memory.events");
        text.lines().filter_map(|line| line.strip_prefix("oom_kill ")?.parse::<u64>().ok()).sum()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Retry, since cached pages that are charged to the group can delay its removal.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// A command that runs the program. If `group` is given, the program runs inside the group.
pub fn command(group: Option<&Group>) -> Command {
    let enter =
        group.map_or(String::new(), |group| format!("echo $$ > {}/cgroup.procs || exit 9; ", group.dir.display()));
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{enter}exec \"$@\""), "sh", crate::program::MOESTRO]);
    command
}
