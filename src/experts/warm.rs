//! A warm start: which experts were hot when the server stopped, kept per model in the cache directory.

use super::{State, Store, heat::Key, slots::Reason};
use crate::platform::{partial, read_small};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

/// How often the list is written while serving.
const EVERY: Duration = Duration::from_secs(60);

/// Bytes of a list at most: an expert takes about thirty.
const MOST: u64 = 16 << 20;

/// Where the list is kept, and of which model it is.
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

impl Store {
    /// Writes the list of the experts in memory, hottest first; does nothing if none is kept. Never leaves half a file.
    pub fn save_hot(&self) -> io::Result<()> {
        self.write_hot(&self.state.borrow())
    }

    pub(super) fn save_hot_or_warn(&self) {
        if let Err(error) = self.save_hot() {
            tracing::warn!(%error, "the list of hot experts could not be kept");
        }
    }

    pub(super) fn save_hot_if_due(&self, state: &mut State) {
        if self.warm.is_none() || state.saved.elapsed() < EVERY {
            return;
        }
        state.saved = Instant::now();
        if let Err(error) = self.write_hot(state) {
            tracing::warn!(%error, "the list of hot experts could not be kept");
        }
    }

    fn write_hot(&self, state: &State) -> io::Result<()> {
        let Some(warm) = &self.warm else { return Ok(()) };
        if self.resident || state.slots.used() == 0 {
            return Ok(());
        }
        let mut hot: Vec<(f32, Key)> = state.slots.ready().map(|(key, _)| (state.heat.score(key), key)).collect();
        hot.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let stride = self.experts as u32;
        let experts = hot.iter().map(|&(score, key)| ((key / stride) as usize, key % stride, score)).collect();
        let text = serde_json::to_vec(&List { identity: warm.identity.clone(), experts })?;
        partial::replace(&warm.file, &text)
    }

    /// Starts reading in what was hot, below everything else; returns how many experts that is.
    pub(super) fn read_in_hot(&self) -> usize {
        let Some(warm) = &self.warm else { return 0 };
        let list = match read_small(&warm.file, MOST) {
            Ok(bytes) => serde_json::from_slice::<List>(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return 0,
            Err(error) => Err(serde_json::Error::io(error)),
        };
        let list = match list {
            Ok(list) if list.identity == warm.identity => list,
            Ok(_) => return 0,
            Err(error) => {
                tracing::warn!(%error, file = %warm.file.display(), "the list of hot experts is unreadable; starting cold");
                return 0;
            }
        };
        let state = &mut *self.state.borrow_mut();
        let mut sent = 0;
        for (layer, expert, score) in list.experts {
            let Some(key) = self.key(layer, expert) else { continue };
            // Free slots only: nothing that is in memory is colder than a memory.
            if state.slots.used() == state.slots.len() {
                break;
            }
            state.heat.prime(key, score);
            if let Some(claim) = state.slots.claim(key, Reason::Warm, &state.heat) {
                self.send(state, key, claim.place, Reason::Warm);
                sent += 1;
            }
        }
        sent
    }
}
