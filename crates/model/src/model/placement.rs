//! Places the weights and expert slots of a model on a backend.

use super::{
    json_table::refuse,
    state::pass_ahead::{PassAhead, collect},
    weights::{Ffn, Mixer, Network, Residual},
};
use crate::{checkpoint::TrunkBuffer, error::ModelError};
use moestro_compute::{
    device::{DeviceError, SyncPoint, Timeline},
    experts::{ExpertStore, SlotDevice},
    ops::{AttentionShape, Backend, DecodedProduct, ExpertSlots, ModelPart, NO_SLOT, ReservedBuffer, Weight},
};
use std::{ops::Range, sync::Arc};

/// Lets the backend adopt the buffer of the weights under its reserved number, which the regions of the weights have.
pub fn adopt_weights(buffer: &TrunkBuffer, backend: &mut dyn Backend) -> Result<(), ModelError> {
    let TrunkBuffer { buffer, slab } = buffer;
    if slab.len() > backend.max_buffer_len() {
        return refuse(format!("the trunk's {} bytes do not fit in one buffer of this GPU", slab.len()));
    }
    let adopted = backend.adopt_as(*buffer, slab)?;
    Ok(backend.mark_loaded(adopted, 0)?)
}

/// Checks that the backend supports each part of the model.
pub fn check_supported(net: &Network, kv_shape: &AttentionShape, backend: &dyn Backend) -> Result<(), ModelError> {
    let matrices = |weights: &[_]| weights.iter().try_for_each(|weight| backend.accept(ModelPart::Weight(weight)));
    matrices(&[net.embed, *net.head()])?;
    matrices(&net.before_head.matrices())?;
    for layer in &net.layers {
        matrices(&layer.mixer.matrices())?;
        matrices(&layer.before_mixer.matrices())?;
        matrices(&layer.before_ffn.matrices())?;
        layer.ngram.iter().try_for_each(|ngram| matrices(&ngram.proj))?;
        match &layer.mixer {
            Mixer::Attention(attention) => {
                backend.accept(ModelPart::Attention(kv_shape))?;
                attention.indexer.iter().try_for_each(|indexer| backend.accept(ModelPart::Indexer(&indexer.shape)))?;
            }
            Mixer::DeltaNet(delta) => backend.accept(ModelPart::Delta(&delta.shape))?,
        }
        match &layer.ffn {
            Ffn::Dense(dense) => matrices(&[&dense.gate_up[..], &[dense.down]].concat())?,
            Ffn::Moe(moe) => backend.accept(ModelPart::Moe(moe))?,
        }
    }
    Ok(())
}

/// Checks that the device's compiler gives the kernels of each part as many threads as they need.
pub fn check_threads(net: &Network, kv_shape: &AttentionShape, backend: &mut dyn Backend) -> Result<(), ModelError> {
    for layer in &net.layers {
        if let Mixer::Attention(attention) = &layer.mixer {
            backend.check_threads(ModelPart::Attention(kv_shape))?;
            let mut indexers = attention.indexer.iter();
            indexers.try_for_each(|indexer| backend.check_threads(ModelPart::Indexer(&indexer.shape)))?;
        }
        if let Ffn::Moe(moe) = &layer.ffn {
            backend.check_threads(ModelPart::Moe(moe))?;
        }
    }
    Ok(())
}

/// Lets the device choose the kernels of the products of a decoded row. Slots of experts have `stride` bytes.
pub fn choose_variants(net: &Network, stride: usize, backend: &mut dyn Backend) {
    let mut products = Vec::new();
    let mut add = |before: Option<&Residual>, matrices: &[Weight]| {
        let has_norm = before.is_some_and(|before| matches!(before, Residual::Norm(_)));
        products.push(DecodedProduct::Matrices { matrices: matrices.to_vec(), has_norm });
    };
    for layer in &net.layers {
        match &layer.mixer {
            Mixer::Attention(attention) => {
                add(Some(&layer.before_mixer), &attention.qkv);
                add(None, &[attention.out]);
            }
            Mixer::DeltaNet(delta) => {
                add(Some(&layer.before_mixer), &delta.in_proj);
                add(None, &[delta.out]);
            }
        }
        match &layer.ffn {
            Ffn::Dense(dense) => {
                add(Some(&layer.before_ffn), &dense.gate_up);
                add(None, &[dense.down]);
            }
            Ffn::Moe(moe) => {
                add(Some(&layer.before_ffn), &backend.score_matrices(moe));
            }
        }
    }
    add(Some(&net.before_head), &[*net.head()]);
    let experts = net.layers.iter().filter_map(|layer| layer.ffn.moe());
    products.extend(experts.map(|layer| DecodedProduct::Experts { layer, stride }));
    backend.choose_variants(&products);
}

/// Lets the backend adopt the segments of the expert slots.
pub fn adopt_slots(
    store: &ExpertStore,
    table: ReservedBuffer,
    backend: &mut dyn Backend,
) -> Result<ExpertSlots, ModelError> {
    let layout = store.layout();
    let ranges: Vec<_> = layout.segments().collect();
    if let Some(long) = ranges.iter().map(Range::len).find(|len| *len > backend.max_buffer_len()) {
        return refuse(format!("a segment of {long} bytes of expert slots does not fit in one buffer of this GPU"));
    }
    let (segments, table) = backend.adopt_segments(table, store.slab(), &ranges)?;
    if store.is_resident() {
        segments.iter().try_for_each(|segment| backend.mark_loaded(*segment, 0))?;
    }
    Ok(ExpertSlots { segments, table, per_segment: layout.per_segment, stride: layout.slot_bytes })
}

/// The expert slots on a device, through which the store releases segments.
pub struct PlacedSlots<'a> {
    pub backend: &'a mut dyn Backend,
    pub slots: &'a ExpertSlots,
    pub ahead: &'a mut Vec<Arc<PassAhead>>,
}

impl Timeline for PlacedSlots<'_> {
    fn sync_point(&mut self) -> SyncPoint {
        self.backend.sync_point()
    }

    fn completed(&mut self) -> SyncPoint {
        self.backend.completed()
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        self.backend.wait_for(point)
    }
}

impl SlotDevice for PlacedSlots<'_> {
    fn finish_passes(&mut self) {
        collect(self.ahead, self.backend);
    }

    fn release_segment(&mut self, segment: usize) -> Result<(), DeviceError> {
        self.backend.release_segment(self.slots.segments[segment])
    }

    fn restore_segment(&mut self, segment: usize) -> Result<(), DeviceError> {
        self.backend.restore_segment(self.slots.segments[segment])
    }
}

/// The slot of each expert, `[layers, experts]`.
pub fn slot_tables(net: &Network, store: &ExpertStore) -> Vec<u32> {
    let mut words = Vec::new();
    for (index, layer) in net.layers.iter().enumerate() {
        let Ffn::Moe(moe) = &layer.ffn else { continue };
        let slot = |expert: usize| store.slot_of(index, expert as u32).map_or(NO_SLOT, |slot| slot.index() as u32);
        words.extend((0..moe.router.rows).map(slot));
    }
    words
}
