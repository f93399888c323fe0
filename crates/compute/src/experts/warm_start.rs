//! Warm start: saves the list of hot experts of a model in the cache directory, and loads it at the next start.

use moestro_base::platform::{atomic_file::replace_file, read_small_file};
use serde::{Deserialize, Serialize};
use std::{io, path::PathBuf, time::Duration};

/// Interval between two writes of the list while serving.
pub(super) const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum size of the file in bytes. An entry of the list takes about 30 bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The file of the list, and the model to which it belongs.
#[derive(Debug, Clone)]
pub struct WarmStart {
    pub file: PathBuf,
    /// Identity of the checkpoint's files. A list of another checkpoint is ignored.
    pub identity: String,
}

/// The file format: hottest experts first.
#[derive(Serialize, Deserialize)]
struct HotExperts {
    identity: String,
    /// Each entry has layer, expert and eviction score.
    experts: Vec<(usize, u32, f32)>,
}

impl WarmStart {
    /// Replaces the list. Each entry has layer, expert and eviction score.
    pub(super) fn save(&self, experts: Vec<(usize, u32, f32)>) -> io::Result<()> {
        let text = serde_json::to_vec(&HotExperts { identity: self.identity.clone(), experts })?;
        replace_file(&self.file, &text)
    }

    /// The saved list. Empty if the file has no list for this model. If the file is unreadable, logs a warning and
    /// returns an empty list.
    pub(super) fn load(&self) -> Vec<(usize, u32, f32)> {
        let list = match read_small_file(&self.file, MAX_BYTES) {
            Ok(bytes) => serde_json::from_slice::<HotExperts>(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => Err(serde_json::Error::io(error)),
        };
        match list {
            Ok(list) if list.identity == self.identity => list.experts,
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, file = %self.file.display(), "cannot read the list of hot experts; starting cold");
                Vec::new()
            }
        }
    }
}
