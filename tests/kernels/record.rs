//! With `MOESTRO_RECORD=DIR`, every dispatch a test runs is written down, with the bytes it read and wrote: so that another
//! device can be held to the same results (`benches/gpu/replay.py`).

use moestro::device::{BufferAccess, Launch};
use sha2::Digest;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// Buffers larger than this are not recorded (bytes).
const MOST: usize = 32 << 20;

pub fn wanted(dispatch: &Launch) -> Option<PathBuf> {
    let size: usize = dispatch.bindings.iter().map(|binding| binding.region.len).sum();
    (size <= MOST).then(|| std::env::var_os("MOESTRO_RECORD")).flatten().map(PathBuf::from)
}

/// `before` has every binding's bytes, `after` those of the ones written to.
pub fn write(dir: &Path, dispatch: &Launch, before: &[Vec<u8>], after: &[Vec<u8>]) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut after = after.iter();
    let bindings = dispatch.bindings.iter().zip(before).map(|(binding, before)| {
        let before = (binding.access != BufferAccess::Write).then(|| blob(dir, before));
        let after = (binding.access != BufferAccess::Read).then(|| blob(dir, after.next().unwrap()));
        serde_json::json!({ "bytes": binding.region.len, "before": before, "after": after })
    });
    let record = serde_json::json!({
        "bindings": bindings.collect::<Vec<_>>(),
        "kernel": dispatch.kernel,
        "args": dispatch.args,
        "grid": dispatch.grid,
        "threads": dispatch.threads,
    });
    fs::write(dir.join(format!("{number:05}.json")), record.to_string()).unwrap();
}

/// Keeps bytes under a name that is theirs, once.
fn blob(dir: &Path, bytes: &[u8]) -> String {
    let name: String = sha2::Sha256::digest(bytes)[..12].iter().map(|byte| format!("{byte:02x}")).collect();
    let path = dir.join(&name);
    if !path.exists() {
        fs::write(path, bytes).unwrap();
    }
    name
}
