//! A model's state on one device: the backend, which has adopted the weights, the activation buffers, and the KV pages.

use super::{
    drafts::mtp::MtpDeviceState,
    forward::buffers::{Buffers, Scratch},
    hidden_taps::TapBuffers,
    model_parts::ModelParts,
    placement::{
        PlacedSlots, adopt_slots, adopt_weights, check_supported, check_threads, choose_variants, slot_tables,
    },
    state::{
        kv_pages::PagePool,
        pass_ahead::{PassAhead, collect, drop_failure},
        sequence::{ArenaList, FreeArenas, kv_shape},
    },
};
use crate::error::ModelError;
use moestro_compute::ops::{AttentionShape, Backend, BackendLimits, ExpertSlots, ReservedBuffer};
use std::sync::Arc;

pub struct DeviceState {
    pub backend: Box<dyn Backend>,
    pub limits: BackendLimits,
    pub slots: ExpertSlots,
    pub buffers: Buffers,
    /// Sizes of the attention layers, and the format of their KV cache.
    pub kv_shape: AttentionShape,
    pub free_arenas: FreeArenas,
    pub pool: Arc<PagePool>,
    /// Pools of other formats that were in use before. Sequences may still hold pages of these pools.
    pub other_pools: Vec<(AttentionShape, Arc<PagePool>)>,
    pub scratch: Scratch,
    pub taps: TapBuffers,
    pub mtp: Option<MtpDeviceState>,
    /// The rows of the pass that was submitted last, if their logits were not read yet.
    pub ahead: Vec<Arc<PassAhead>>,
    /// The logits of the last pass. The next pass reuses their memory if nothing else uses it.
    pub last_logits: Arc<Vec<f32>>,
}

impl DeviceState {
    /// Places a model on a device. `kv` is the KV format of a lost device and the limits of that device. The new device
    /// keeps that format, because existing snapshots have it.
    ///
    /// # Errors
    /// The device cannot compute the model.
    pub fn new(
        parts: &ModelParts,
        mut backend: Box<dyn Backend>,
        kv: Option<(AttentionShape, BackendLimits)>,
    ) -> Result<Self, ModelError> {
        let mut limits = backend.limits();
        for buffer in parts.weights.iter().chain(parts.mtp.iter().flat_map(|head| &head.weights)) {
            adopt_weights(buffer, backend.as_mut())?;
        }
        // A pass has as many rows as a prompt chunk, so that each expert is read once per chunk.
        let rows = parts.plan.chunk.min(parts.plan.context).max(1);
        let context = parts.plan.context;
        let preferred = || kv_shape(&parts.config, &limits, parts.kv_bits, context, rows);
        let kv_shape = kv.map_or_else(preferred, |(shape, _)| shape);
        check_supported(&parts.net, &kv_shape, backend.as_ref())?;
        check_threads(&parts.net, &kv_shape, backend.as_mut())?;
        let slots = match &parts.store {
            Some(store) => {
                // A GPU maps whole segments of slots. The CPU does not map segments.
                store.release_whole_segments(limits.is_async);
                adopt_slots(store, ReservedBuffer::ExpertTable, backend.as_mut())?
            }
            None => ExpertSlots::default(),
        };
        choose_variants(&parts.net, slots.stride, backend.as_mut());
        if parts.gpu_awake && parts.store.is_some() {
            backend.keep_gpu_awake()?;
        }
        let buffers = Buffers::new(&parts.config, &limits, rows, context, |bytes| backend.allocate(bytes))?;
        if let Some(store) = &parts.store {
            store.clear_device();
            backend.write_words(buffers.slot_tables, &slot_tables(&parts.net, store))?;
        }
        if let Some((_, lost)) = kv {
            limits.kv_format = lost.kv_format;
            limits.recent_format = lost.recent_format;
        }
        let pool = PagePool::new(&parts.config, &kv_shape, &parts.plan, backend.as_mut())?;
        let mtp = match &parts.mtp {
            Some(head) => Some(MtpDeviceState::new(head, &parts.net.before_head, context, backend.as_mut())?),
            None => None,
        };
        // Wait, so that loading fails if a copy to the device fails.
        let end = backend.sync_point();
        backend.wait_for(end)?;
        Ok(Self {
            backend,
            limits,
            slots,
            buffers,
            kv_shape,
            free_arenas: ArenaList::new(parts.plan.parallel),
            pool,
            other_pools: Vec::new(),
            scratch: Scratch::default(),
            taps: TapBuffers::default(),
            mtp,
            ahead: Vec::new(),
            last_logits: Arc::default(),
        })
    }

    /// Runs `work` between two passes. Waits for a pass ahead first, whose sequence keeps its logits or its failure. A
    /// failure of `work` ends here, so that the next pass can succeed.
    pub fn between_passes<T, E: Into<ModelError>>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, ModelError> {
        collect(&mut self.ahead, self.backend.as_mut());
        let done = work(self);
        if done.is_err() {
            drop_failure(self.backend.as_mut());
        }
        done.map_err(Into::into)
    }

    /// The expert slots on the device, through which the store releases and restores segments.
    pub fn placed_slots(&mut self) -> PlacedSlots<'_> {
        PlacedSlots { backend: self.backend.as_mut(), slots: &self.slots, ahead: &mut self.ahead }
    }
}
