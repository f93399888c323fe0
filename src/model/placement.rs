//! Showing a network's weights and expert slots to a backend.

use super::weights::{Ffn, Mixer, Network, Residual};
use crate::{
    checkpoint::TrunkBuffer,
    error::ModelError,
    experts::ExpertStore,
    ops::{AttentionShape, Backend, ExpertSlots, ModelPart, NO_SLOT},
};

/// Adopted ranges start at multiples of this: the largest page size of any Mac.
const PAGE_SIZE: usize = 16384;
/// Maximum number of buffers for the experts' slots.
const MAX_SLOT_SLABS: usize = 4;

fn refuse<T>(why: String) -> Result<T, ModelError> {
    Err(ModelError::Config(why))
}

/// Adopts a buffer of weights under the number that the weights' regions have.
pub fn adopt_weights(buffer: &TrunkBuffer, backend: &mut dyn Backend) -> Result<(), ModelError> {
    let TrunkBuffer { number, slab } = buffer;
    if slab.len() > backend.longest() {
        return refuse(format!("the trunk's {} bytes do not fit in one buffer of this GPU", slab.len()));
    }
    let adopted = backend.adopt(slab, 0..slab.len())?;
    if adopted.buffer != *number {
        return refuse(format!("the weights' buffer has number {} on the device, not {number}", adopted.buffer));
    }
    Ok(backend.landed(adopted, 0)?)
}

/// Asks the backend about each part of the model.
pub fn check_supported(net: &Network, kv_shape: &AttentionShape, backend: &dyn Backend) -> Result<(), ModelError> {
    let matrices = |weights: &[_]| weights.iter().try_for_each(|weight| backend.accept(ModelPart::Weight(weight)));
    matrices(&[net.embed, *net.head()])?;
    matrices(&net.last.matrices())?;
    if let Residual::Streams(mix) = &net.last {
        backend.accept(ModelPart::Streams(mix))?;
    }
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

/// Adopts the slab of expert slots, in as few buffers as the device takes. Each is a whole number of slots and of pages.
pub fn adopt_slots(store: &ExpertStore, backend: &mut dyn Backend) -> Result<ExpertSlots, ModelError> {
    let (stride, count) = (store.slot_bytes(), store.slots());
    let whole = (1..=PAGE_SIZE).find(|n| n * stride % PAGE_SIZE == 0).unwrap_or(PAGE_SIZE);
    let longest = backend.longest() / stride.max(1);
    let per_slab = if count <= longest { count } else { longest / whole * whole };
    if per_slab == 0 || count.div_ceil(per_slab) > MAX_SLOT_SLABS {
        let total = count * stride;
        return refuse(format!("{total} bytes of expert slots do not fit in {MAX_SLOT_SLABS} buffers of this GPU"));
    }
    let ranges = (0..count).step_by(per_slab).map(|first| first * stride..count.min(first + per_slab) * stride);
    let slabs: Vec<_> =
        ranges.map(|range| Ok(backend.adopt(store.slab(), range)?)).collect::<Result<_, ModelError>>()?;
    if store.is_resident() {
        slabs.iter().try_for_each(|slab| backend.landed(*slab, 0))?;
    }
    Ok(ExpertSlots { slabs, per_slab, stride })
}

/// Each expert's slot, `[layers, experts]`.
pub fn slot_tables(net: &Network, store: &ExpertStore) -> Vec<u32> {
    let mut words = Vec::new();
    for (index, layer) in net.layers.iter().enumerate() {
        let Ffn::Moe(moe) = &layer.ffn else { continue };
        let slot = |expert: usize| store.slot_of(index, expert as u32).map_or(NO_SLOT, |slot| slot.index() as u32);
        words.extend((0..moe.router.rows).map(slot));
    }
    words
}
