//! Metal's residency set (macOS 15 and later).

use crate::device::ResidencySet;
use candle_metal_kernels::metal::{self, Buffer, Device};
use objc2::{
    rc::autoreleasepool,
    runtime::{AnyClass, ProtocolObject},
};
use objc2_metal::{MTLCommandQueue, MTLDevice, MTLGPUFamily, MTLResidencySet};
use std::sync::Arc;

/// A set that Metal has created.
#[derive(Clone)]
pub struct ResidentBuffers(Arc<metal::ResidencySet>);

impl ResidentBuffers {
    /// True on macOS 15 and later with a GPU of the family Metal3. Virtual machines have residency sets that do not work,
    /// and no such GPU.
    pub fn are_supported(device: &Device) -> bool {
        AnyClass::get(c"MTLResidencySetDescriptor").is_some() && device.as_ref().supportsFamily(MTLGPUFamily::Metal3)
    }

    /// Creates a set and adds it to the queue. `None` if Metal refuses.
    pub fn create(device: &Device, queue: &ProtocolObject<dyn MTLCommandQueue>) -> Option<Self> {
        let set = metal::ResidencySet::new(device);
        queue.addResidencySet(set.raw()?);
        Some(Self(Arc::new(set)))
    }

    pub fn add_to(&self, queue: &ProtocolObject<dyn MTLCommandQueue>) {
        self.0.raw().into_iter().for_each(|set| queue.addResidencySet(set));
    }
}

impl ResidencySet for ResidentBuffers {
    type Buffer = Buffer;

    fn insert(&self, buffer: &Buffer) {
        self.0.insert(buffer);
    }

    fn remove(&self, buffer: &Buffer) {
        self.0.remove(buffer);
    }

    fn request_residency(&self) {
        autoreleasepool(|_| self.0.raw().into_iter().for_each(|set| set.requestResidency()));
    }
}
