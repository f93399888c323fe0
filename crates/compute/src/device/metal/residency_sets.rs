//! Metal residency sets (macOS 15 and later) keep buffers resident in memory between command buffers.

use crate::device::set_assignment::SetAssignment;
use candle_metal_kernels::metal::{Buffer, Device, ResidencySet};
use objc2::{
    rc::autoreleasepool,
    runtime::{AnyClass, ProtocolObject},
};
use objc2_metal::{MTLCommandQueue, MTLResidencySet};
use parking_lot::Mutex;
use std::sync::Arc;

/// The residency sets of a device and the buffers in them.
pub struct ResidencySets {
    device: Device,
    assignment: SetAssignment,
    /// The sets are in a mutex, since the residency thread requests residency while the engine's thread adds buffers.
    sets: Arc<Mutex<Vec<ResidencySet>>>,
}

impl ResidencySets {
    /// Returns `None` before macOS 15, where buffers are resident only during the command buffers that use them.
    pub fn new(device: &Device) -> Option<Self> {
        AnyClass::get(c"MTLResidencySetDescriptor")?;
        let assignment = SetAssignment::new(device.recommended_max_working_set_size() as u64);
        Some(Self { device: device.clone(), assignment, sets: Arc::default() })
    }

    /// Adds a buffer to a set. If the set is new, adds the set to the queue. Returns the number of the set.
    pub fn add(&mut self, buffer: &Buffer, queue: &ProtocolObject<dyn MTLCommandQueue>) -> usize {
        let set = self.assignment.add(buffer.length() as u64);
        let mut sets = self.sets.lock();
        if set == sets.len() {
            let new = ResidencySet::new(&self.device);
            if let Some(raw) = new.raw() {
                queue.addResidencySet(raw);
            }
            sets.push(new);
        }
        sets[set].insert(buffer);
        set
    }

    pub fn remove(&mut self, set: usize, buffer: &Buffer) {
        self.assignment.remove(set, buffer.length() as u64);
        if let Some(set) = self.sets.lock().get(set) {
            set.remove(buffer);
        }
    }

    /// Adds all sets to a new queue.
    pub fn add_to(&self, queue: &ProtocolObject<dyn MTLCommandQueue>) {
        self.sets.lock().iter().filter_map(ResidencySet::raw).for_each(|set| queue.addResidencySet(set));
    }

    /// A function that renews the residency of all sets.
    pub fn request(&self) -> impl Fn() + Send + use<> {
        let sets = self.sets.clone();
        move || {
            autoreleasepool(|_| sets.lock().iter().filter_map(ResidencySet::raw).for_each(|set| set.requestResidency()))
        }
    }
}
