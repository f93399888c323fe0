//! With `MOESTRO_RECORD=DIR`, records every launch of a test with the bytes that the launch read and wrote.
//! `benches/gpu/replay.py` compares another device with these records.

use moestro_compute::device::{BufferAccess, Launch};
use sha2::Digest;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// Maximum number of bytes of a recorded launch.
const MAX_BYTES: usize = 32 << 20;

pub fn wanted(launch: &Launch) -> Option<PathBuf> {
    // A launch with a table is not recorded, because another device has other addresses.
    if launch.bindings.iter().any(|binding| binding.is_table) {
        return None;
    }
    let size: usize = launch.bindings.iter().map(|binding| binding.region.len).sum();
    (size <= MAX_BYTES).then(|| std::env::var_os("MOESTRO_RECORD")).flatten().map(PathBuf::from)
}

/// `before` has the bytes of every binding. `after` has the bytes of the bindings that were written.
pub fn write(dir: &Path, launch: &Launch, before: &[Vec<u8>], after: &[Vec<u8>]) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut after = after.iter();
    let bindings = launch.bindings.iter().zip(before).map(|(binding, before)| {
        let before = (binding.access != BufferAccess::Write).then(|| blob(dir, before));
        let after = (binding.access != BufferAccess::Read).then(|| blob(dir, after.next().unwrap()));
        serde_json::json!({ "bytes": binding.region.len, "before": before, "after": after })
    });
    let record = serde_json::json!({
        "bindings": bindings.collect::<Vec<_>>(),
        "kernel": launch.kernel,
        "args": launch.args,
        "grid": launch.grid,
        "threads": launch.threads,
    });
    fs::write(dir.join(format!("{number:05}.json")), record.to_string()).unwrap();
}

/// Stores bytes once, under a name derived from their hash. Returns the name.
fn blob(dir: &Path, bytes: &[u8]) -> String {
    let name: String = sha2::Sha256::digest(bytes)[..12].iter().map(|byte| format!("{byte:02x}")).collect();
    let path = dir.join(&name);
    if !path.exists() {
        fs::write(path, bytes).unwrap();
    }
    name
}
