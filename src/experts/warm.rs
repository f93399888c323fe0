//! A warm start: which experts were hot when the server stopped, kept per model in the cache directory.

use super::{
    Experts, Live,
    eviction::Key,
    slots::{Purpose, State},
};
use crate::platform::{partial, read_small};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

/// The interval at which the list is written while serving.
const EVERY: Duration = Duration::from_secs(60);

/// Bytes of a list at most: an expert takes about thirty.
const MOST: u64 = 16 << 20;

/// The list's file, and the identity of its model.
#[derive(Debug, Clone)]
pub struct Warm {
    pub file: PathBuf,
    /// Changes whenever the checkpoint does; a list with another identity is ignored.
    pub identity: String,
}

/// The file: the hottest experts first.
#[derive(Serialize, Deserialize)]
struct List {
    identity: String,
    /// Layer, expert, and the score it had.
    experts: Vec<(usize, u32, f32)>,
}

impl Experts {
    /// Writes the list of the experts in memory, hottest first; does nothing if none is kept. Never leaves half a file.
    pub fn save_hot(&self) -> io::Result<()> {
        self.write_hot(&self.live.borrow())
    }

    pub(super) fn save_hot_or_warn(&self) {
        if let Err(error) = self.save_hot() {
            tracing::warn!(%error, "the list of hot experts could not be kept");
        }
    }

    pub(super) fn save_hot_if_due(&self, live: &mut Live) {
        if self.warm.is_none() || live.saved.elapsed() < EVERY {
            return;
        }
        live.saved = Instant::now();
        if let Err(error) = self.write_hot(live) {
            tracing::warn!(%error, "the list of hot experts could not be kept");
        }
    }

    fn write_hot(&self, live: &Live) -> io::Result<()> {
        let Some(warm) = &self.warm else { return Ok(()) };
        if self.is_resident() || live.slots.used() == 0 {
            return Ok(());
        }
        let mut hot: Vec<(f32, Key)> =
            live.slots.all(State::Ready).map(|(key, _)| (live.scores.score(key), key)).collect();
        hot.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let stride = self.experts as u32;
        let experts = hot.iter().map(|&(score, key)| ((key / stride) as usize, key % stride, score)).collect();
        let text = serde_json::to_vec(&List { identity: warm.identity.clone(), experts })?;
        partial::replace(&warm.file, &text)
    }

    /// Starts reading in what was hot, below everything else.
    pub(super) fn read_in_hot(&self) {
        let Some(warm) = &self.warm else { return };
        let list = match read_small(&warm.file, MOST) {
            Ok(bytes) => serde_json::from_slice::<List>(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => Err(serde_json::Error::io(error)),
        };
        let list = match list {
            Ok(list) if list.identity == warm.identity => list,
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(%error, file = %warm.file.display(), "the list of hot experts is unreadable; starting cold");
                return;
            }
        };
        let live = &mut *self.live.borrow_mut();
        for (layer, expert, score) in list.experts {
            let Some(key) = self.key(layer, expert) else { continue };
            // Free slots only: nothing that is in memory is colder than a memory.
            if live.slots.used() == live.slots.len() {
                break;
            }
            live.scores.prime(key, score);
            if let Some(claim) = live.slots.claim(key, Purpose::WarmStart, &live.scores) {
                self.send(live, key, claim.slot, Purpose::WarmStart);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Options, Phase,
            tests::{checkpoint, take},
        },
        *,
    };

    #[test]
    fn the_list_is_written_once_a_minute() {
        let (checkpoint, dir) = (checkpoint(), tempfile::tempdir().unwrap());
        let file = dir.path().join("hot.json");
        let warm = Warm { file: file.clone(), identity: "a".into() };
        let (store, _) = checkpoint.open(Options { warm: Some(warm), ..Options::new(6) });
        for expert in 0..3 {
            take(&store, &checkpoint.map, 0, &[expert], Phase::Decode);
        }
        assert!(!file.exists(), "it is too early");
        store.live.borrow_mut().saved = Instant::now().checked_sub(EVERY).unwrap();
        take(&store, &checkpoint.map, 0, &[0], Phase::Decode);
        assert!(file.exists());
        std::fs::remove_file(&file).unwrap();
        take(&store, &checkpoint.map, 0, &[0], Phase::Decode);
        assert!(!file.exists(), "not again at once");
    }
}
