//! Chooses the launches of the experts.

use super::GpuBackend;
use crate::{
    device::{DeviceError, Driver},
    ops::{Backend, CombineExperts, ExpertSet, Experts, MoeWeights, NO_SLOT, experts::Jobs},
};

impl<D: Driver> GpuBackend<D> {
    /// True if the experts of decoded rows, and the shared expert, are multiplied on matrix units in full precision.
    pub(super) fn tiles_experts(&self, layer: &MoeWeights) -> bool {
        self.half.is_none() && self.min_tiled_weights.is_some() && layer.fits_tiles()
    }

    pub(super) fn experts(&mut self, op: &Experts<'_>) -> Result<(), DeviceError> {
        let tiled = self.tiles_experts(op.layer);
        match op.experts {
            ExpertSet::Table { slots, .. } if tiled => self.launch(op.up_tiles(slots, true)),
            ExpertSet::Table { slots, .. } => self.launch(op.up(slots, true)),
            ExpertSet::Loaded { groups: [], shared: false, .. } => Ok(()),
            ExpertSet::Loaded { groups: [], per_assignment: None, .. } if !tiled => Ok(()),
            ExpertSet::Loaded { groups, assignments, shared, per_assignment: Some(at) } => {
                let mut slots = std::mem::take(&mut self.slots);
                slots.clear();
                slots.resize(op.tokens * op.layer.k, NO_SLOT);
                for group in groups {
                    for assignment in &assignments[group.first as usize..][..group.count as usize] {
                        slots[*assignment as usize] = group.slot;
                    }
                }
                let written = self.write_words(at, &slots);
                self.slots = slots;
                written?;
                self.launch(if tiled { op.up_tiles(at, shared) } else { op.up(at, shared) })
            }
            ExpertSet::Loaded { groups, assignments, shared, per_assignment: None } => {
                let mut words = std::mem::take(&mut self.slots);
                words.clear();
                if tiled || self.half.is_some() {
                    words.extend(
                        groups.iter().flat_map(|group| Experts::jobs(group.slot, group.first, group.count)).flatten(),
                    );
                } else {
                    words.extend(groups.iter().flat_map(|group| [group.slot, group.first, group.count]));
                }
                let count = words.len() / 3;
                let jobs = op.buffers.jobs;
                let order = op.buffers.order;
                let written = self.write_words(jobs, &words).and_then(|()| self.write_words(order, assignments));
                self.slots = words;
                written?;
                let jobs = Jobs { count, jobs, order: order.floats(assignments.len()) };
                match self.half {
                    Some(half) => self.all(op.half_launches(jobs, half)),
                    None if tiled => {
                        self.all(op.by_expert_tiles(jobs, shared).into_iter().filter(|launch| launch.grid[1] > 0))
                    }
                    None => self.all(op.by_expert(jobs)),
                }
            }
        }
    }

    pub(super) fn combine_experts(&mut self, op: &CombineExperts<'_>) -> Result<(), DeviceError> {
        let tiled = self.tiles_experts(op.layer);
        match op.per_assignment {
            Some(slots) if tiled => self.all(op.down_tiles(slots)),
            Some(slots) => self.launch(op.down(slots)),
            None if tiled => self.all(op.sum_tiles()),
            None => self.all(op.sum(self.half)),
        }
    }
}
