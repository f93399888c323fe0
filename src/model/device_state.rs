//! A model on a device: the device, which has adopted the weights, and the memory that the model takes there.

use crate::model::{
    drafts::hidden_taps::Tapped,
    drafts::mtp::HeadPlace,
    forward::Lists,
    forward::buffers::Buffers,
    load::ModelParts,
    state::kv_pages::{PagePool, SharedBackend},
    state::sequence::{Arenas, heads},
    weights::{Ffn, Mixer, Network},
};
use crate::{
    checkpoint::{BUFFERS, DRAFT_BUFFERS},
    error::ModelError,
    experts::ExpertStore,
    ops::{AttentionShape, Backend, BackendLimits, ExpertSlots, KvFormat, ModelPart, NO_SLOT},
};
use std::sync::Arc;

/// Adopted ranges start at multiples of this: the largest page of any Mac.
const PAGE: usize = 16384;
/// Slabs of slots at most.
const SLABS: usize = 4;

pub(in crate::model) struct DeviceState {
    pub run: Box<dyn Backend>,
    /// The same, for whoever keeps others away from it.
    pub shared: SharedBackend,
    pub limits: BackendLimits,
    pub slots: ExpertSlots,
    pub buffers: Buffers,
    /// The form of keys and values.
    pub heads: AttentionShape,
    pub arenas: Arenas,
    pub pool: Arc<PagePool>,
    /// The pages of other forms, which there may be sequences of.
    pub pools: Vec<(AttentionShape, Arc<PagePool>)>,
    pub lists: Lists,
    pub tapped: Tapped,
    pub head: Option<HeadPlace>,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, ModelError> {
    Err(ModelError::Config(why.into()))
}

impl DeviceState {
    /// Refuses what the device cannot do; then `parts` are as they were. Keys and values are `kept` in the form that another
    /// device had, and which was that device's own.
    pub fn new(
        parts: &mut ModelParts,
        run: Box<dyn Backend>,
        kept: Option<(AttentionShape, KvFormat)>,
    ) -> Result<Self, ModelError> {
        let shared = SharedBackend::new(run);
        let mut run: Box<dyn Backend> = Box::new(shared.clone());
        let mut limits = run.limits();
        let drafts = parts.head.iter().flat_map(|head| &head.slabs).zip(DRAFT_BUFFERS);
        for (slab, number) in parts.weights.iter().zip(BUFFERS).chain(drafts) {
            if slab.len() > run.longest() {
                return refuse(format!("the trunk's {} bytes are more than one buffer of this GPU holds", slab.len()));
            }
            let shown = run.adopt(slab, 0..slab.len())?;
            if shown.buffer != number {
                return refuse(format!("weights are buffer {number}, not {}", shown.buffer));
            }
            run.landed(shown, 0)?;
        }
        // As many rows as a chunk of a prompt has: so each expert is read once a chunk.
        let (rows, context) = (parts.plan.chunk.min(parts.plan.context).max(1), parts.plan.context);
        let own = || heads(&parts.config, limits.cache, parts.kv_bits, context, rows);
        let heads = kept.map_or_else(own, |(heads, _)| heads);
        accept(&parts.net, &heads, &*run)?;
        let slots = parts.store.as_ref().map(|store| slots(store, &mut *run)).transpose()?.unwrap_or_default();
        let buffers = Buffers::new(&parts.config, &limits, rows, context, |bytes| run.allocate(bytes))?;
        if let Some(store) = &parts.store {
            run.write_words(buffers.tables, &tables(&parts.net, store))?;
        }
        limits.cache = kept.map_or(limits.cache, |(_, format)| format);
        let pool = PagePool::new(&parts.config, &heads, &parts.plan, &shared)?;
        parts.net.set_cache(heads);
        let norm = parts.net.norm;
        let head = parts.head.as_mut().map(|head| HeadPlace::new(head, norm, context, &mut *run)).transpose()?;
        // A copy that fails is an error of loading.
        let end = run.sync_point();
        run.wait_for(end)?;
        let (arenas, lists, tapped) = (Arenas::default(), Lists::default(), Tapped::default());
        let pools = Vec::new();
        Ok(Self { run, shared, limits, slots, buffers, heads, arenas, pool, pools, lists, tapped, head })
    }
}

/// Asks the device about each part of the model.
pub(in crate::model) fn accept(net: &Network, heads: &AttentionShape, run: &dyn Backend) -> Result<(), ModelError> {
    let weights = |weights: &[_]| weights.iter().try_for_each(|weight| run.accept(ModelPart::Weight(weight)));
    weights(&[net.embed, *net.head()])?;
    for layer in &net.layers {
        match &layer.mixer {
            Mixer::Attention(attention) => {
                weights(&attention.qkv)?;
                weights(&[attention.out])?;
                run.accept(ModelPart::Attention(heads))?;
            }
            Mixer::DeltaNet(delta) => {
                weights(&delta.project)?;
                weights(&[delta.out])?;
                run.accept(ModelPart::Delta(&delta.shape))?;
            }
        }
        match &layer.ffn {
            Ffn::Dense(dense) => {
                weights(&dense.gate_up)?;
                weights(&[dense.down])?;
            }
            Ffn::Moe(moe) => run.accept(ModelPart::Moe(moe))?,
        }
    }
    Ok(())
}

/// The experts' slab in as few pieces as the device takes, each a whole number of slots and of pages.
pub(in crate::model) fn slots(store: &ExpertStore, run: &mut dyn Backend) -> Result<ExpertSlots, ModelError> {
    let (stride, count) = (store.slot_bytes(), store.slots());
    let whole = (1..=PAGE).find(|n| n * stride % PAGE == 0).unwrap_or(PAGE);
    let longest = run.longest() / stride.max(1);
    let per_slab = if count <= longest { count } else { longest / whole * whole };
    if per_slab == 0 || count.div_ceil(per_slab) > SLABS {
        let total = count * stride;
        return refuse(format!("{total} bytes of slots are more than {SLABS} buffers of this GPU hold"));
    }
    let ranges = (0..count).step_by(per_slab).map(|first| first * stride..count.min(first + per_slab) * stride);
    let slabs: Vec<_> = ranges.map(|range| Ok(run.adopt(store.slab(), range)?)).collect::<Result<_, ModelError>>()?;
    if store.is_resident() {
        slabs.iter().try_for_each(|slab| run.landed(*slab, 0))?;
    }
    Ok(ExpertSlots { slabs, per_slab, stride })
}

/// Each layer's slots, `[layers, experts]`.
pub(in crate::model) fn tables(net: &Network, store: &ExpertStore) -> Vec<u32> {
    let mut words = Vec::new();
    for (index, layer) in net.layers.iter().enumerate() {
        let Ffn::Moe(moe) = &layer.ffn else { continue };
        let slot = |expert: usize| store.slot_of(index, expert as u32).map_or(NO_SLOT, |slot| slot.index() as u32);
        words.extend((0..moe.router.rows).map(slot));
    }
    words
}
