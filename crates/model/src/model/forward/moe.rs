//! The mixture of experts.
//!
//! ```text
//! h --rms_norm--> x --+-- router --> ids --> fetch --> hits ----------> experts --+
//!                     |                        |                                  |
//!                     |                        +-- reads --> as they complete ----+--> sum in rank order --> h
//!                     +-- shared expert, while the disk reads --------------------+
//! ```
//!
//! An *assignment* is one chosen expert of one token. Each assignment has its own result buffer. Once all assignments
//! are computed, the results of each token are summed in the router's order. So the bytes do not depend on the order in
//! which experts are read.

use super::{
    buffers::{MoeScratch, RouteBuffers},
    pass::{PartInput, Pass},
};
use crate::error::ModelError;
use moestro_compute::{
    device::Region,
    experts::{ExpertChoice, ExpertFetch, ExpertStore},
    ops::{CombineExperts, ExpertGroup, ExpertSet, Experts, MoeBuffers, MoeWeights, NO_SLOT, Norm, Router},
};

/// Maximum number of prompt rows that predict the next layer's experts. The limit bounds the time of the prediction. A
/// wrong prediction costs only a useless read.
const PREDICTING_ROWS: usize = 64;

/// `h += sum(weight * expert(x)) + sigmoid(w_sg x) * shared(x)`, `x = rms_norm(h)`. Predicts the experts of `next`, the
/// following layer, and starts reading them.
pub fn forward(
    index: usize,
    input: PartInput,
    layer: &MoeWeights,
    next: Option<&MoeWeights>,
    pass: &mut Pass<'_>,
) -> Result<(), ModelError> {
    let Some(experts) = pass.experts else {
        return Err(ModelError::Config("the experts are not loaded".into()));
    };
    let b = pass.buffers;
    let limits = pass.limits;
    let routed =
        RouteBuffers { ids: b.expert_ids, slots: b.expert_slots, weights: b.moe.weights, scores: b.moe.scores };
    route(index, input, layer, routed, pass)?;

    // With few rows and all experts resident, the router's choice stays on the device.
    if experts.is_resident() && pass.rows() <= limits.max_slot_table_rows && !pass.chunk.half {
        return from_table(layer, routed, pass);
    }

    let size = pass.chunk.size;
    let next = next.filter(|_| experts.wants_prefetch(size));
    let mut scratch = std::mem::take(&mut pass.scratch.moe);
    if let Some(next) = next.filter(|_| limits.is_async) {
        // The prediction is encoded after the router. Reading the prediction waits for both, so reading the router's
        // choice does not wait again.
        predict(index + 1, next, pass, &mut scratch.predicted)?;
    }

    // Wait for the router's choice: the only wait of a layer.
    experts.metrics.gpu_router_waits.inc_by(u64::from(limits.is_async && !experts.is_resident()));
    read_choice(layer, !experts.is_resident(), pass, &mut scratch)?;
    fetch_and_run(index, next, combine(layer, routed, pass), experts, pass, scratch)
}

/// `scores = W_router x; ids, weights = top_k(softmax(scores))`. A GPU also looks up the slots in the layer's table.
pub fn route(
    index: usize,
    input: PartInput,
    layer: &MoeWeights,
    into: RouteBuffers,
    pass: &mut Pass<'_>,
) -> Result<(), ModelError> {
    let tokens = pass.rows();
    let norm = input.norm.map(|norm| Norm { keep: Some(pass.buffers.normed), ..norm });
    let table = pass.buffers.slot_tables.rows(index, 1, layer.router.rows);
    let (x, RouteBuffers { ids, slots, weights, scores }) = (input.rows(&(0..tokens)), into);
    pass.execute(Router { layer, tokens, x, norm, skip_shared: false, table, scores, ids, slots, weights })
}

/// Computes the experts in the slots that the router found in the table, and adds their results to the residual. The
/// router's choice stays on the device.
pub fn from_table(layer: &MoeWeights, routed: RouteBuffers, pass: &mut Pass<'_>) -> Result<(), ModelError> {
    let combine = combine(layer, routed, pass);
    let (slots, tokens, x, RouteBuffers { ids, slots: id_slots, .. }) =
        (pass.slots, pass.rows(), pass.buffers.normed, routed);
    let experts = ExpertSet::Table { ids, slots: id_slots };
    pass.execute(Experts { layer, slots, tokens, x, buffers: combine.buffers, experts })?;
    pass.execute(CombineExperts { per_assignment: Some(id_slots), ..combine })
}

/// Fetches the experts in `scratch` and adds their results to the residual. Starts to prefetch the experts of `next`.
pub fn fetch_and_run(
    index: usize,
    next: Option<&MoeWeights>,
    combine: CombineExperts<'_>,
    experts: &ExpertStore,
    pass: &mut Pass<'_>,
    mut scratch: MoeScratch,
) -> Result<(), ModelError> {
    let layer = combine.layer;
    let size = pass.chunk.size;
    let limits = pass.limits;
    let choice = ExpertChoice { ids: &scratch.ids, k: layer.k, logits: &scratch.logits };
    let mut fetch = experts.fetch(index, &choice, size, &mut *pass.backend)?;

    // Prefetched reads queue after this layer's own reads, and run while this layer's experts and the next mixer
    // compute.
    if let Some(next) = next {
        if !limits.is_async {
            predict(index + 1, next, pass, &mut scratch.predicted)?;
        }
        experts.prefetch(index + 1, &scratch.predicted, size);
    }

    // Compute each expert when its read completes, then sum the results. Slots that were not released after their batch
    // stay pinned until the device has passed `end`.
    let done = run_experts(index, &mut fetch, combine, experts, pass, &mut scratch);
    let end = pass.backend.sync_point();
    if done.is_err() {
        // Wait until the device has finished, because the slots that it reads are released below.
        let _ = pass.backend.wait_for(end);
    }
    fetch.release_after(end);
    pass.scratch.moe = scratch;
    done
}

/// The sum of the experts' results.
pub fn combine<'a, 'p: 'a>(layer: &'a MoeWeights, routed: RouteBuffers, pass: &Pass<'p>) -> CombineExperts<'a> {
    let buffers = MoeBuffers { scores: routed.scores, weights: routed.weights, ..pass.buffers.moe };
    CombineExperts { layer, slots: pass.slots, tokens: pass.rows(), buffers, per_assignment: None, h: pass.buffers.h }
}

/// Computes each batch of experts whose reads have completed, then adds the results of all experts.
fn run_experts(
    index: usize,
    fetch: &mut ExpertFetch<'_>,
    combine: CombineExperts<'_>,
    experts: &ExpertStore,
    pass: &mut Pass<'_>,
    scratch: &mut MoeScratch,
) -> Result<(), ModelError> {
    let b = pass.buffers;
    let limits = pass.limits;
    let resident = experts.is_resident();
    let CombineExperts { layer, slots, tokens, mut buffers, .. } = combine;
    let MoeScratch { groups, assignments, slots: known, .. } = scratch;
    let x = b.normed;
    let row = tokens * layer.k;
    // For few rows, each assignment is computed separately, and each call has its own list of slots. One more list has
    // the slots of all calls, for the final sum.
    let one_by_one = tokens <= limits.max_per_assignment_rows && !pass.chunk.half;
    let slot_list = |call: usize| one_by_one.then(|| b.per_assignment.rows(call.min(layer.k + 1), 1, row));

    let mut shared = layer.shared.is_some();
    if shared && !resident && !limits.is_async {
        // Compute the shared expert while the disk reads.
        let set = ExpertSet::Loaded { groups: &[], assignments: &[], shared, per_assignment: slot_list(0) };
        pass.execute(Experts { layer, slots, tokens, x, buffers, experts: set })?;
        shared = false;
    }
    known.clear();
    known.resize(row, NO_SLOT);
    let mut call = 0;
    while let Some(batch) = fetch.next(&mut *pass.backend)? {
        groups.clear();
        assignments.clear();
        for loaded in batch.iter() {
            let first = assignments.len() as u32;
            let count = loaded.assignments.len() as u32;
            if !resident {
                // Identifies the bytes: the same expert has the same bytes whenever it is read.
                let content = (index as u64) << 32 | u64::from(loaded.expert);
                pass.backend.mark_loaded(slots.region(loaded.slot.0), content)?;
                experts.mark_on_device(loaded.slot);
            }
            groups.push(ExpertGroup { expert: loaded.expert, slot: loaded.slot.0, first, count });
            assignments.extend(loaded.assignments);
            for assignment in loaded.assignments {
                known[*assignment as usize] = loaded.slot.0;
            }
        }
        if buffers.jobs.len < groups.len() * 12 || buffers.order.len < assignments.len() * 4 {
            // Some experts were read again because of a wrong checksum, so the lists are full. Reuse them from the
            // start.
            let end = pass.backend.sync_point();
            pass.backend.wait_for(end)?;
            buffers = combine.buffers;
        }
        let set = ExpertSet::Loaded { groups, assignments, shared, per_assignment: slot_list(call) };
        pass.execute(Experts { layer, slots, tokens, x, buffers, experts: set })?;
        shared = false;
        call += 1;
        // The device may still read the lists of this batch, so the next batch uses the space after them. A job has at
        // least one assignment, so there are at most as many jobs as assignments.
        let rest = |list: Region, words: usize| list.part(words * 4, list.len - words * 4);
        (buffers.jobs, buffers.order) =
            (rest(buffers.jobs, assignments.len() * 3), rest(buffers.order, assignments.len()));
        if !one_by_one {
            // If assignments are computed one at a time, the final sum also reads the slots, so the slots stay pinned.
            // Otherwise the slots are released after this batch.
            batch.release_after(pass.backend.sync_point());
        }
        if !fetch.is_empty() {
            pass.backend.flush()?;
        }
    }
    let per_assignment = slot_list(layer.k + 1);
    if let Some(at) = per_assignment {
        pass.backend.write_words(at, known)?;
    }
    pass.execute(CombineExperts { per_assignment, ..combine })
}

/// Predicts the next layer's experts by running its router on this layer's input. Uses the experts' buffers, which are
/// free until the experts run.
fn predict(index: usize, layer: &MoeWeights, pass: &mut Pass<'_>, out: &mut Vec<u32>) -> Result<(), ModelError> {
    let b = pass.buffers;
    let tokens = pass.rows().min(PREDICTING_ROWS);
    let x = pass.buffers.normed;
    let scores = b.moe.out;
    let act = b.moe.act;
    let list = tokens * layer.k * 4;
    out.clear();
    if scores.len < tokens * layer.router.rows * 4 || act.len < 4 * list {
        return Ok(());
    }
    let [ids, slots, weights] = [(0, 1), (1, 1), (2, 2)].map(|(at, len)| act.part(at * list, len * list));
    let table = b.slot_tables.rows(index, 1, layer.router.rows);
    pass.execute(Router { layer, tokens, x, norm: None, skip_shared: true, table, scores, ids, slots, weights })?;
    out.resize(tokens * layer.k, 0);
    Ok(pass.backend.read_words(ids, out)?)
}

/// Reads the router's choice from the device: the ids, and the logits on request.
fn read_choice(
    layer: &MoeWeights,
    logits: bool,
    pass: &mut Pass<'_>,
    scratch: &mut MoeScratch,
) -> Result<(), ModelError> {
    let b = pass.buffers;
    let tokens = pass.rows();
    let k = layer.k;
    scratch.ids.resize(tokens * k, 0);
    pass.backend.read_words(b.expert_ids, &mut scratch.ids)?;
    let experts = layer.router.rows;
    let width = layer.width();
    scratch.logits.resize(if logits { tokens * experts } else { 0 }, 0.0);
    for (token, row) in scratch.logits.chunks_exact_mut(experts).enumerate() {
        pass.backend.read_floats(b.moe.scores.rows(token, 1, width), row)?;
    }
    Ok(())
}
