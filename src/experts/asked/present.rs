//! Experts that are in memory, for a pass that does without the others: it reads nothing, evicts nothing, and is not counted.

use super::{Asked, Phase};
use crate::{
    device::Timeline,
    error::StoreError,
    experts::{Experts, Live, eviction::Key, slots::State},
};

impl Experts {
    /// True if this expert is in memory.
    pub fn is_present(&self, layer: usize, expert: u32) -> bool {
        self.key(layer, expert).is_some_and(|key| is_ready(&self.live.borrow(), key))
    }

    /// The first of a layer's experts that is in memory.
    pub fn any_present(&self, layer: usize) -> Option<u32> {
        let experts = self.map.layers.get(layer).map_or(0, Vec::len) as u32;
        (0..experts).find(|expert| self.is_present(layer, *expert))
    }

    /// [`Experts::ask`] for experts that are in memory: they are handed out at once. Scores, predictions and counts stay as
    /// they are.
    ///
    /// # Errors
    /// One of them is not in memory.
    pub fn ask_present(&self, layer: usize, ids: &[u32], device: &mut dyn Timeline) -> Result<Asked<'_>, StoreError> {
        let live = &mut *self.live.borrow_mut();
        let absent = |id: &&u32| self.key(layer, **id).is_none_or(|key| !is_ready(live, key));
        if let Some(expert) = ids.iter().find(absent) {
            return Err(StoreError::Other(format!("layer {layer}, expert {expert} is not in memory")));
        }
        live.slots.advance(device.completed());
        let mut lists = live.spare.pop().unwrap_or_default();
        lists.group(ids);
        while let Some(mut wanted) = lists.waiting.pop_front() {
            if let Some(slot) = self.key(layer, wanted.expert).and_then(|key| live.slots.find(key)) {
                live.slots.pin(slot);
                wanted.slot = slot;
                lists.coming.push(wanted);
            }
        }
        Ok(Asked { experts: self, layer, phase: Phase::Decode, lists })
    }
}

fn is_ready(live: &Live, key: Key) -> bool {
    live.slots.find(key).is_some_and(|slot| live.slots.state(slot) == State::Ready)
}
