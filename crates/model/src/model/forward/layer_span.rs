//! A span: several layers that a GPU computes before the CPU reads their routers' choices, while experts are streamed.
//!
//! ```text
//! submitted at once:  layer 3 | layer 4 | layer 5 | layer 6     kernels find experts in the table of slots
//!                                    ^ router 5 selects an expert without a slot and sets the skip flag:
//!                                      the rest of layer 5 and layer 6 change nothing
//! one wait:           the choices of layers 3, 4 and 5
//! then:               layer 5 waits for its experts as usual, and the pass continues with layer 6
//! ```
//! Skipped attention may still write keys and values. Its layers are submitted again and then write the same positions.
//! The residual and the states of the delta nets stay as they are.
//!
//! Experts need no pins while a span runs: only this thread assigns slots, in a fetch or a prefetch, and it does
//! neither before it has reported the choices of these layers to the store. The report releases their slots after a
//! sync point.

use super::{
    buffers::{MoeScratch, split_route},
    moe,
    pass::{LayerHooks, Pass},
};
use crate::{
    error::ModelError,
    model::{state::sequence::LayerState, weights::Network},
};
use moestro_compute::{
    experts::{ExpertChoice, ExpertStore, PassSize},
    ops::{MoeWeights, NO_SLOT},
};
use std::ops::Range;

/// Forgets the layers of an earlier pass that failed.
pub fn reset(pass: &mut Pass<'_>) {
    pass.scratch.span.layers = 0..0;
    // A panic may have left it.
    pass.backend.set_skip_flag(None);
}

/// Number of layers from `index` on that can be computed with one wait. 1 means that layer `index` runs alone.
pub fn layer_count(index: usize, pass: &Pass<'_>, hooks: &LayerHooks<'_>) -> usize {
    let chunk = &pass.chunk;
    let config = pass.config;
    let Some(experts) = pass.experts.filter(|experts| !experts.is_resident()) else { return 1 };
    // Other residual streams, tables and caches would need kernels with a skip flag.
    let is_simple = config.streams.is_none() && config.ngrams.is_empty() && config.indexer.is_none();
    let is_short = pass.rows() <= pass.limits.max_slot_table_rows && !chunk.half && hooks.marks.rows.is_empty();
    match chunk.size {
        PassSize::Small if is_simple && is_short => experts.layers_to_submit(index, chunk.size),
        _ => 1,
    }
}

/// Computes `layers` with one wait. Returns the first layer that is not computed yet.
pub fn run(
    net: &Network,
    layers: Range<usize>,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
) -> Result<usize, ModelError> {
    let Some(experts) = pass.experts else { return Ok(layers.start) };
    let before = state[layers.clone()].to_vec();
    submit(net, layers.clone(), state, experts, pass, hooks)?;
    // The GPU works on these layers while the CPU reports the choices of the previous ones.
    report_choices(net, pass)?;

    let Some(missed) = wait_for_choices(net, layers.clone(), experts, pass)? else { return Ok(layers.end) };
    report_choices(net, pass)?;
    state[missed + 1..layers.end].copy_from_slice(&before[missed + 1 - layers.start..]);
    let weights = moe_weights(net, missed)?;
    let combine = moe::combine(weights, pass.buffers.route(missed, pass.rows(), weights), pass);
    let scratch = read_route(missed, weights, pass);
    moe::fetch_and_run(missed, None, combine, experts, pass, scratch)?;
    net.layers[missed].end(missed, pass, hooks)?;
    Ok(missed + 1)
}

/// Submits the kernels of `layers`, which find experts in the table of slots, with the skip flag.
fn submit(
    net: &Network,
    layers: Range<usize>,
    state: &mut [LayerState],
    experts: &ExpertStore,
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
) -> Result<(), ModelError> {
    let b = pass.buffers;
    pass.backend.flush()?;
    for layer in layers.clone() {
        if let Some(slots) = experts.take_device_slots(layer) {
            pass.backend.write_words(b.slot_tables.rows(layer, 1, slots.len()), &slots)?;
        }
    }
    if std::mem::replace(&mut pass.scratch.span.may_skip, true) {
        pass.backend.write_words(b.skip_flag, &[0])?;
    }
    pass.scratch.span.launches.clear();
    pass.backend.set_skip_flag(Some(b.skip_flag));
    let submitted = layers.clone().try_for_each(|index| {
        encode_layer(net, index, state, pass, hooks)?;
        let is_last = index + 1 == layers.end;
        if is_last || ends_submission(index - layers.start, pass.limits.layers_per_submission) {
            pass.backend.flush()?;
        }
        Ok(())
    });
    pass.backend.set_skip_flag(None);
    submitted
}

/// True if a submission ends after the layer with this index of a span. The first submission has
/// one layer, so that the device starts early.
fn ends_submission(index: usize, layers_per_submission: usize) -> bool {
    index.is_multiple_of(layers_per_submission.max(1))
}

/// Encodes the kernels of one layer.
fn encode_layer(
    net: &Network,
    index: usize,
    state: &mut [LayerState],
    pass: &mut Pass<'_>,
    hooks: &mut LayerHooks<'_>,
) -> Result<(), ModelError> {
    let layer = &net.layers[index];
    let weights = moe_weights(net, index)?;
    let x = layer.forward_mixer(index, state, pass, hooks)?;
    let routed = pass.buffers.route(index, pass.rows(), weights);
    moe::route(index, x, weights, routed, pass)?;
    let launches = pass.backend.launches();
    pass.scratch.span.launches.push(launches);
    moe::from_table(weights, routed, pass)?;
    layer.end(index, pass, hooks)
}

/// Waits for the choices of `layers`. Returns the first layer with an expert without a slot. The layers before it are
/// ready for [`report_choices`].
fn wait_for_choices(
    net: &Network,
    layers: Range<usize>,
    experts: &ExpertStore,
    pass: &mut Pass<'_>,
) -> Result<Option<usize>, ModelError> {
    let rows = pass.rows();
    let span = &mut pass.scratch.span;
    let routes = pass.buffers.routes(layers.clone(), rows, moe_weights(net, layers.start)?);
    span.routes.resize(routes.len / 4, 0);
    span.first = layers.start;
    span.layers = layers.clone();
    experts.metrics.gpu_router_waits.inc();
    pass.backend.read_words(routes, &mut span.routes)?;
    let missed = layers.clone().find(|index| {
        let weights = net.layers[*index].ffn.moe();
        let slots = weights.map(|weights| split_route(&span.routes, index - span.first, rows, weights)[1]);
        slots.is_some_and(|slots| slots.contains(&NO_SLOT))
    });
    match missed {
        None => span.may_skip = false,
        Some(missed) => {
            let submitted = span.launches.get(missed - layers.start).copied().unwrap_or(0);
            experts.metrics.gpu_skipped_launches.inc_by(pass.backend.launches() - submitted);
            span.layers.end = missed;
        }
    }
    Ok(missed)
}

/// Reports the choices of the layers of a span to the expert store, in the order of layers.
pub fn report_choices(net: &Network, pass: &mut Pass<'_>) -> Result<(), ModelError> {
    let Some(experts) = pass.experts else { return Ok(()) };
    for index in std::mem::take(&mut pass.scratch.span.layers) {
        let weights = moe_weights(net, index)?;
        let scratch = read_route(index, weights, pass);
        let choice = ExpertChoice { ids: &scratch.ids, k: weights.k, logits: &scratch.logits };
        let mut fetch = experts.fetch(index, &choice, pass.chunk.size, &mut *pass.backend)?;
        while fetch.next(&mut *pass.backend)?.is_some() {}
        fetch.release_after(pass.backend.sync_point());
        pass.scratch.moe = scratch;
    }
    Ok(())
}

/// The choice of a layer of a span, in the lists of the mixture of experts.
fn read_route(index: usize, weights: &MoeWeights, pass: &mut Pass<'_>) -> MoeScratch {
    let rows = pass.rows();
    let span = &pass.scratch.span;
    let mut scratch = std::mem::take(&mut pass.scratch.moe);
    let [ids, _, _, scores] = split_route(&span.routes, index - span.first, rows, weights);
    scratch.ids.clear();
    scratch.ids.extend(ids);
    scratch.logits.clear();
    for row in scores.chunks_exact(weights.width()).take(rows) {
        scratch.logits.extend_from_slice(bytemuck::cast_slice(&row[..weights.router.rows]));
    }
    scratch
}

fn moe_weights(net: &Network, index: usize) -> Result<&MoeWeights, ModelError> {
    let weights = net.layers.get(index).and_then(|layer| layer.ffn.moe());
    weights.ok_or_else(|| ModelError::Config(format!("layer {index} has no experts")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_have_at_most_so_many_layers() {
        let ends =
            |layers: usize, each: usize| (0..layers).filter(|index| ends_submission(*index, each)).collect::<Vec<_>>();
        assert_eq!(ends(5, 1), [0, 1, 2, 3, 4]);
        assert_eq!(ends(20, 8), [0, 8, 16]);
        // A queue of Metal blocks with more than 64 command buffers.
        assert!(ends(94, 8).len() < 20);
    }
}
