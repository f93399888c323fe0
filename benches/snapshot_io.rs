//! Reads a prompt snapshot of a long context from disk, with the sizes of a 35B-A3B, and compares the speed with `fio`.
//!
//! ```text
//! cargo bench --bench snapshot_io -- DIR [--tokens 32768] [--rounds 7]
//! ```
//! DIR needs 1.5 GB of free space. Each round reads the snapshot as a restarted server does. Then `fio`, if it is
//! installed, reads a file of the same size with direct I/O: 1 MiB per read, 16 reads in flight. Neither file is in the
//! page cache. Prints CSV: the round, MB/s of both, their ratio.

use mock_model::MockModel;
use moestro_base::metrics::Metrics;
use moestro_engine::{
    DiskCacheOptions,
    prompt_cache::{PromptCache, SnapshotKind},
};
use moestro_model::model::{PAGE, PageSize, Snapshot, SnapshotSize};
use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

/// 30 delta-net layers with 32 heads of 128 by 128 and the last 3 inputs of a convolution over 8,192 channels. 10
/// attention layers with 2 key heads.
const SIZE: SnapshotSize = SnapshotSize {
    state: 30 * 4 * (32 * 128 * 128 + 3 * 8192),
    page: PageSize::without_indexer(10 * 2 * 2 * (256 * 2 + 4)),
};

/// Incompressible bytes.
fn noise(bytes: usize, word: &mut u64) -> Vec<u8> {
    let next = |_| {
        *word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*word ^ *word >> 29).to_le_bytes()
    };
    let mut noise: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(next).collect();
    noise.truncate(bytes);
    noise
}

/// All files below `dir`.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Evicts the files from the page cache.
#[cfg(target_os = "linux")]
fn forget(dir: &Path) {
    for path in files(dir) {
        let file = File::open(path).expect("a file");
        // SAFETY: the descriptor is open; the advice changes no byte.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
}

#[cfg(not(target_os = "linux"))]
fn forget(dir: &Path) {
    for path in files(dir) {
        let _ = File::open(path).map(|file| file.as_raw_fd());
    }
}

/// MB/s of `fio` on a file of this size. Writes the file first if it is missing.
fn fio(file: &Path, bytes: u64) -> Option<f64> {
    let run = |how: &[&str]| {
        let output = Command::new("fio")
            .args(["--name=read", "--bs=1M", "--direct=1", "--ioengine=libaio", "--iodepth=16", "--output-format=json"])
            .arg(format!("--filename={}", file.display()))
            .arg(format!("--size={}", bytes >> 20 << 20))
            .args(how)
            .output()
            .ok()?;
        serde_json::from_slice::<serde_json::Value>(&output.stdout).ok()
    };
    if !file.exists() {
        run(&["--rw=write", "--end_fsync=1"])?;
    }
    let report = run(&["--rw=read"])?;
    Some(report["jobs"][0]["read"]["bw_bytes"].as_f64()? / 1e6)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some(dir) = args.first() else {
        println!("snapshot_io: no directory given, nothing measured");
        return;
    };
    let number = |name: &str, default: usize| {
        let at = args.iter().position(|arg| arg == name);
        at.and_then(|at| args.get(at + 1)).map_or(default, |text| text.parse().expect("a number"))
    };
    let (tokens, rounds) = (number("--tokens", 32_768), number("--rounds", 7));
    let root = Path::new(dir).join("moestro-snapshots");
    let storage = DiskCacheOptions { dir: root.clone(), limit: 8 << 30, key: "a bench".into() };
    let open = || {
        let cache = Arc::new(PromptCache::new(4 << 30, SIZE, Metrics::new("bench", "cpu")));
        cache.open_disk(storage.clone(), tokens, || ());
        cache
    };
    let ids: Vec<u32> = (0..tokens as u32).collect();
    let mut word = 1;
    let mut page = |ids: &[u32]| Arc::new(noise(SIZE.page.bytes(ids.len()) as usize, &mut word).into());
    let pages = ids.chunks(PAGE).map(&mut page).collect();
    let snapshot = Snapshot { len: tokens, pages, state: Arc::new(noise(SIZE.state as usize, &mut 2)) };
    let bytes = SIZE.bytes(tokens, 0);
    // The pages of this model are copies.
    let mut model = MockModel::default();
    let cache = open();
    cache.insert(&ids, SnapshotKind::Message, snapshot, cache.clear_count());
    let begin = Instant::now();
    while cache.status().disk.is_none_or(|disk| disk.snapshots == 0) {
        assert!(begin.elapsed() < Duration::from_secs(300), "the snapshot was not written within five minutes");
        cache.answer_page_request(&mut model);
        std::thread::yield_now();
    }
    println!("# {tokens} tokens, {bytes} bytes; written in {:.2} s", begin.elapsed().as_secs_f64());
    cache.close(&mut model);
    drop(cache);
    println!("round,read_mb_s,fio_mb_s,ratio");
    let mut ratios = Vec::new();
    let prompt = [&ids[..], &[0]].concat();
    for round in 1..=rounds {
        forget(&root);
        let cache = open();
        let begin = Instant::now();
        let found = cache.longest_prefix(&prompt, 0, &mut model).expect("the snapshot").0;
        let rate = bytes as f64 / begin.elapsed().as_secs_f64() / 1e6;
        assert_eq!(found.len, tokens);
        cache.close(&mut model);
        drop((found, cache));
        match fio(&Path::new(dir).join("moestro-fio"), bytes) {
            Some(fio) => {
                println!("{round},{rate:.0},{fio:.0},{:.3}", rate / fio);
                ratios.push(rate / fio);
            }
            None => println!("{round},{rate:.0},,"),
        }
    }
    ratios.sort_by(f64::total_cmp);
    if let Some(median) = ratios.get(ratios.len() / 2) {
        println!("# median ratio {median:.3}");
    }
    let _ = fs::remove_dir_all(&root);
    let _ = fs::remove_file(Path::new(dir).join("moestro-fio"));
}
