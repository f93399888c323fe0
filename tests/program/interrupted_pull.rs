//! Tests of downloads that a signal ends, and of what `moestro pull` reports. `HF_ENDPOINT` is a test hub that stops
//! within a file.

#![cfg(feature = "hub")]

use crate::{
    process::exchange,
    program::{self, signal},
};
use serde_json::Value;
use std::{
    fs,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use test_support::hub::{TestHub, hash};

/// A hub with one shard, which has no zero byte and two pieces. Sends `stops_at` bytes.
fn stopping_hub(stops_at: usize) -> (TestHub, Vec<u8>) {
    let shard: Vec<u8> = (0..40u32 << 20).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8 | 1).collect();
    let hub = TestHub::new(&[("config.json", b"{}".to_vec()), ("model.safetensors", shard.clone())]);
    hub.change(|state| state.stops_at = Some(stops_at));
    (hub, shard)
}

fn command(args: &[&str], endpoint: &str, home: &Path) -> Command {
    let mut command = program::moestro(home);
    command.args(args).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", endpoint);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn blob(home: &Path, shard: &[u8]) -> PathBuf {
    home.join("hf/hub/models--org--name/blobs").join(hash(shard))
}

/// Number of bytes that the map file counts as missing.
fn saved_missing(blob: &Path) -> Option<usize> {
    let map: Value = serde_json::from_slice(&fs::read(blob.with_extension("map")).ok()?).ok()?;
    let ranges = map["missing"].as_array()?.iter();
    Some(ranges.map(|range| (range[1].as_u64().unwrap() - range[0].as_u64().unwrap()) as usize).sum())
}

/// Number of bytes in the part file.
fn written(blob: &Path) -> usize {
    fs::read(blob.with_extension("part")).map_or(0, |part| part.iter().filter(|byte| **byte != 0).count())
}

/// Waits until the hub has stopped and the part file has all bytes that it has sent.
fn wait_for_bytes(hub: &TestHub, blob: &Path, child: &mut Child) {
    let begin = Instant::now();
    let has_stopped = || {
        let state = hub.state.lock().unwrap();
        state.sent + (1 << 16) > state.stops_at.unwrap()
    };
    let config = 2;
    while !has_stopped() || written(blob) + config < hub.state.lock().unwrap().sent {
        assert!(begin.elapsed().as_secs() < 60 && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(10));
    }
}

/// Checks that the saved progress has all bytes of the part file. Returns the number of missing bytes.
fn check_saved(blob: &Path, shard: &[u8]) -> usize {
    let missing = saved_missing(blob).expect("a map file");
    assert_eq!(shard.len() - missing, written(blob));
    missing
}

/// True if this process ignores a signal, as the programs that it starts do: in the background of a shell, or after
/// `nohup`.
fn is_ignored(number: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (number - 1) & 1 == 1)
}

#[test]
fn signal_saves_progress_of_a_pull() {
    let signals = [("INT", 2, 1 << 20), ("TERM", 15, 6 << 20), ("HUP", 1, 12 << 20)];
    for (name, number, stops_at) in signals.into_iter().filter(|(_, number, _)| !is_ignored(*number)) {
        let (hub, shard) = stopping_hub(stops_at);
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let blob = blob(home.path(), &shard);
        let mut pull = command(&["pull", "org/name"], &hub.endpoint, home.path()).spawn().unwrap();
        wait_for_bytes(&hub, &blob, &mut pull);
        signal(name, pull.id());
        let ended = pull.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(number), "{stderr}");
        assert!(stderr.contains("the download is interrupted; the same command resumes it"), "{stderr}");
        let missing = check_saved(&blob, &shard);
        hub.change(|state| {
            state.stops_at = None;
            state.lengths.clear();
        });
        let resumed = command(&["pull", "org/name"], &hub.endpoint, home.path()).output().unwrap();
        assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
        assert_eq!(hub.sent("model.safetensors"), missing, "only missing bytes are requested");
        let dir = String::from_utf8(resumed.stdout).unwrap();
        assert!(fs::read(Path::new(dir.trim()).join("model.safetensors")).unwrap() == shard);
    }
}

#[test]
fn signal_saves_progress_of_a_server() {
    let (hub, shard) = stopping_hub(2 << 20);
    let port = program::free_port();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let blob = blob(home.path(), &shard);
    let mut server =
        command(&["serve", "org/name", "--port", &port.to_string()], &hub.endpoint, home.path()).spawn().unwrap();
    wait_for_bytes(&hub, &blob, &mut server);
    let health = exchange(port, "GET /health", "", "");
    signal("TERM", server.id());
    let ended = server.wait_with_output().unwrap();
    // A check of the health is no event worth a line, also while the model is loaded.
    let log = String::from_utf8_lossy(&ended.stderr);
    assert!(health.starts_with("HTTP/1.1 503") && !log.contains("GET /health"), "{health}\n{log}");
    let stdout = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && stdout.contains(r#"{"event":"exiting","reason":"SIGTERM"}"#), "{stdout}");
    check_saved(&blob, &shard);
}

#[test]
fn json_reports_speed_of_this_run() {
    let (hub, shard) = stopping_hub(36 << 20);
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let blob = blob(home.path(), &shard);
    let mut first = command(&["pull", "org/name"], &hub.endpoint, home.path()).spawn().unwrap();
    wait_for_bytes(&hub, &blob, &mut first);
    signal("TERM", first.id());
    first.wait().unwrap();
    hub.change(|state| (state.stops_at, state.bytes_per_second) = (None, Some(1 << 20)));
    let missing = saved_missing(&blob).unwrap() as u64;
    let pulled = command(&["pull", "org/name", "--json"], &hub.endpoint, home.path()).output().unwrap();
    let stdout = String::from_utf8(pulled.stdout).unwrap();
    let events: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (complete, progress) = events.split_last().unwrap();
    assert_eq!((&complete["event"], &complete["model"]), (&"complete".into(), &"org/name".into()));
    assert!(Path::new(complete["path"].as_str().unwrap()).join("model.safetensors").exists());
    assert!(progress.len() > 1, "{stdout}");
    for event in progress {
        let [on_disk, received, speed] =
            ["on_disk", "received", "bytes_per_second"].map(|field| event[field].as_u64().unwrap());
        // The speed is measured over at least a tenth of a second. The bytes on disk before would be more than that.
        assert!(speed <= 10 * received, "{event}");
        assert!(on_disk <= shard.len() as u64 + 2 && received <= missing + 2, "{event}");
    }
    assert_eq!(progress.last().unwrap()["on_disk"], shard.len() + 2);
    assert!(pulled.stderr.is_empty(), "{}", String::from_utf8_lossy(&pulled.stderr));
}

#[test]
fn quiet_pull_prints_only_the_directory() {
    let hub = TestHub::new(&[("config.json", b"{}".to_vec()), ("model.safetensors", vec![1; 1000])]);
    let home = tempfile::tempdir().unwrap();
    let mut pull = command(&["pull", "-q", "org/name"], &hub.endpoint, home.path()).spawn().unwrap();
    let mut stdout = String::new();
    pull.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    let ended = pull.wait_with_output().unwrap();
    assert!(ended.status.success() && Path::new(stdout.trim()).join("config.json").exists(), "{stdout}");
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
}
