//! Memory: the peak stays under every limit given, and a control group of that limit plus 10 % kills nothing.
//!
//! Needs the right to make a memory control group (v1 or v2), which an ordinary user has not; without it the limits are
//! only measured, not enforced, and the test says so.

#![cfg(target_os = "linux")]

use moestro::{
    demo,
    tools::synth::{self, Dimensions},
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

const MIB: u64 = 1 << 20;

/// A group of our own, removed in the end.
struct Group {
    dir: PathBuf,
    limit: &'static str,
}

impl Group {
    fn new() -> Option<Self> {
        let name = format!("moestro-test-{}", std::process::id());
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

    fn set(&self, bytes: u64) {
        fs::write(self.dir.join(self.limit), bytes.to_string()).unwrap();
    }

    /// How often something was killed in it.
    fn kills(&self) -> u64 {
        let read = |file: &str| fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        let text = read("memory.oom_control") + &read("memory.events");
        text.lines().filter_map(|line| line.strip_prefix("oom_kill ")?.parse::<u64>().ok()).sum()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What the page cache holds for the group may keep it for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// 120 MB, nearly all of it experts.
fn model(dir: &Path) {
    let dimensions = Dimensions {
        hidden: 512,
        layers: 8,
        heads: 4,
        linear_key_heads: 4,
        linear_value_heads: 8,
        experts: 64,
        expert_hidden: 256,
        shared_hidden: 256,
        vocab: 2048,
        ..Dimensions::of_35b()
    };
    let lent = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let options = synth::Options {
        dimensions,
        seed: 1,
        router_skew: 0.5,
        eos_token_ids: vec![2040],
        shard: 50 << 20,
        threads: 2,
        extras: lent.map(|name| (name.to_owned(), demo::file(name).unwrap().to_vec())).into(),
    };
    synth::write(dir, &options, &|_| ()).unwrap();
}

fn bench(model: &Path, group: Option<&Group>, limit: u64, io: &str) -> Output {
    let enter =
        group.map_or(String::new(), |group| format!("echo $$ > {}/cgroup.procs || exit 9; ", group.dir.display()));
    Command::new("sh")
        .args(["-c", &format!("{enter}exec \"$@\""), "sh", env!("CARGO_BIN_EXE_moestro"), "bench"])
        .arg(model)
        .args(["--prompt-tokens", "200", "--gen-tokens", "12", "--repeat", "1", "--json", "--expert-io", io])
        .args(["--memory-limit", &limit.to_string()])
        .output()
        .unwrap()
}

#[test]
fn the_peak_stays_under_the_limit_and_nothing_is_killed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    model(&dir);
    let group = Group::new();
    if group.is_none() {
        eprintln!("no right to make a memory control group: the limits are measured, not enforced");
    }
    let mut residencies = Vec::new();
    for limit in [100, 130, 180, 300].map(|mib| mib * MIB) {
        for io in ["direct", "buffered"] {
            if let Some(group) = &group {
                group.set(limit + limit / 10 + 4096);
            }
            let output = bench(&dir, group.as_ref(), limit, io);
            let said = String::from_utf8_lossy(&output.stderr);
            if io == "direct" && said.contains("cannot be read past the page cache") {
                eprintln!("this file system knows no direct reads");
                continue;
            }
            assert!(output.status.success(), "{limit} {io}: {:?} {said}", output.status);
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let peak = report["peak_memory"].as_u64().unwrap();
            assert!(peak <= limit, "{io}: {peak} bytes at the peak, the limit is {limit}");
            assert!(report["plan"]["limit"].as_u64().unwrap() <= limit);
            if io == "direct" {
                residencies.push(report["plan"]["residency"].as_f64().unwrap());
            }
        }
    }
    assert!(residencies.windows(2).all(|pair| pair[0] <= pair[1]), "{residencies:?}");
    assert!(residencies.first() < Some(&0.7) && residencies.last() == Some(&1.0), "{residencies:?}");
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
    // What cannot fit is refused in words, not tried.
    let output = bench(&dir, None, 40 * MIB, "auto");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the model does not fit in 40.0 MiB (--memory-limit)"), "{said}");
}
