//! Checks of `experts`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver, Region, Slab},
    ops::{
        Backend, Float, Linear, ReservedBuffer, Weight, WeightFormat,
        check::{CLOSE, HALF, KernelCheck},
        experts::{
            CombineExperts, ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, MoeBuffers, MoeWeights,
            SharedExpert, swiglu,
        },
        simd::math::silu,
    },
};
use std::sync::Arc;

const HIDDEN: usize = 256;
const INNER: usize = 128;
const SLOTS: usize = 3;
const PER_SEGMENT: usize = 2;
/// The largest page size of the supported systems.
const PAGE: usize = 64 << 10;
const K: usize = 2;

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let affine = |bits, group| WeightFormat::Affine { bits, group, scale: Float::Bf16 };
    case(b, [affine(4, 64); 3], 64, 3)?;
    case(b, [affine(3, 32), affine(6, 64), affine(8, 128)], 128, 3)?;
    case(b, [WeightFormat::Mxfp4; 3], 64, 3)?;
    case(b, [WeightFormat::Fp8(Some(Float::Bf16)); 3], 64, 3)?;
    b.gpu.set_direct(true);
    case(b, [affine(4, 64); 3], 64, 2)?;
    b.gpu.set_direct(false);
    if b.gpu.tile_all_rows(true) {
        // The number of jobs selects the kernel.
        for tokens in [1, 3, 8, 13] {
            case(b, [affine(4, 64); 3], 128, tokens)?;
        }
        b.gpu.tile_all_rows(false);
    }
    Ok(())
}

/// Slots with random experts. The parts of an expert start at multiples of 16 bytes.
fn slots(
    b: &mut KernelCheck<'_, impl Driver>,
    codes: [WeightFormat; 3],
) -> Result<([ExpertStack; 3], ExpertSlots), DeviceError> {
    let shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)];
    let mut stride = 0;
    let stacks = [0, 1, 2].map(|i| {
        let (rows, cols) = shapes[i];
        let at = codes[i].part_bytes(rows, cols).map(|bytes| {
            let start = stride;
            stride = (start + bytes).next_multiple_of(16);
            start
        });
        ExpertStack { codes: codes[i], rows, cols, global_scales: vec![1.0; SLOTS], at: vec![at; SLOTS] }
    });
    // Two segments, each in its own pages.
    let segment = (PER_SEGMENT * stride).next_multiple_of(PAGE);
    let starts = (0..SLOTS).map(|slot| slot / PER_SEGMENT * segment + slot % PER_SEGMENT * stride);
    let len = segment + (SLOTS - PER_SEGMENT) * stride;
    let mut slab = Slab::new(len).map_err(|error| DeviceError::Failed(error.to_string()))?;
    for start in starts {
        for stack in &stacks {
            for (part, at) in b.random.parts(stack.codes, stack.rows, stack.cols).iter().zip(stack.at[0]) {
                slab.as_mut_slice()[start + at..][..part.len()].copy_from_slice(part);
            }
        }
    }
    let slab = Arc::new(slab);
    let ranges = [0..PER_SEGMENT * stride, segment..len];
    let table = ReservedBuffer::ExpertTable;
    b.cpu.adopt_segments(table, &slab, &ranges)?;
    // Both devices assign the same buffer numbers, so the GPU's regions of the segments are also valid on the CPU. The
    // CPU needs no address table, so the GPU's table is used.
    let (segments, table) = b.gpu.adopt_segments(table, &slab, &ranges)?;
    segments.iter().try_for_each(|segment| b.gpu.mark_loaded(*segment, 0))?;
    Ok((stacks, ExpertSlots { segments, table, per_segment: PER_SEGMENT, stride }))
}

/// Checks a layer's experts for a few rows, by slot number and grouped by expert.
fn case(
    b: &mut KernelCheck<'_, impl Driver>,
    codes: [WeightFormat; 3],
    inner: usize,
    tokens: usize,
) -> Result<(), DeviceError> {
    let (stacks, slots) = &slots(b, codes)?;
    let any = WeightFormat::Affine { bits: 4, group: 32, scale: Float::Bf16 };
    let gate_up = [b.weight(codes[0], inner, HIDDEN)?, b.weight(codes[1], inner, HIDDEN)?];
    let shared = SharedExpert { gate_up, down: b.weight(codes[2], HIDDEN, inner)?, result: b.weight(any, 1, HIDDEN)? };
    let router = b.weight(any, SLOTS, HIDDEN)?;
    let layer = &MoeWeights { k: K, renormalise: true, router, shared: Some(shared), stacks: stacks.clone() };

    let x = b.random(tokens * HIDDEN)?;
    let weights = b.random(tokens * (K + 1))?;
    let scores = b.buffer(tokens * layer.width())?;
    let matrices = [router, gate_up[0], gate_up[1], shared.result];
    let op = Linear { x, tokens, norm: None, matrices: &matrices, y: scores, add: false };
    b.run(op)?;
    // Both devices continue with the same values.
    let values = b.on_cpu(scores)?;
    b.write(scores, bytemuck::cast_slice(&values))?;
    let acts = activations(b, layer, slots, x, &values)?;

    let chosen: Vec<u32> = (0..tokens).flat_map(|t| (0..K).map(move |r| ((t + r) % SLOTS) as u32)).collect();
    let ids = b.words(&chosen)?;
    let assignments = tokens * (K + 1);
    let before = b.random.floats(tokens * HIDDEN);
    let mut groups = Vec::new();
    let mut order = Vec::new();
    for slot in 0..SLOTS as u32 {
        let first = order.len() as u32;
        order.extend((0..chosen.len() as u32).filter(|assignment| chosen[*assignment as usize] == slot));
        groups.push(ExpertGroup { expert: slot, slot, first, count: order.len() as u32 - first });
    }
    let loaded = ExpertSet::Loaded { groups: &groups, assignments: &order, shared: true, per_assignment: None };
    let halves = b.half_buffers(assignments, HIDDEN)?;
    let ways =
        [(ExpertSet::Table { ids, slots: ids }, Some(ids), None), (loaded, None, None), (loaded, None, Some(halves))];
    let halved = b.gpu.limits().uses_half_precision;
    for (experts, per_assignment, half) in ways.into_iter().filter(|way| way.2.is_none() || halved) {
        let allowed = if half.is_some() { HALF } else { CLOSE };
        b.gpu.set_half_buffers(half);
        let buffers = MoeBuffers {
            scores,
            weights,
            act: b.buffer(assignments * layer.row())?,
            out: b.buffer(assignments * HIDDEN)?,
            jobs: b.buffer(tokens * K * 3)?,
            order: b.buffer(tokens * K)?,
        };
        let h = b.floats(&before)?;
        let ran = b.run(Experts { layer, slots, tokens, x, buffers, experts })?;
        for (assignment, slot) in chosen.iter().enumerate() {
            let act = buffers.act.rows(assignment, 1, layer.row());
            b.expect(allowed, &ran, act, &acts[*slot as usize][assignment / K * INNER..][..INNER])?;
        }
        if per_assignment.is_some() {
            for token in 0..tokens {
                let act = buffers.act.rows(tokens * K + token, 1, layer.row());
                b.expect(allowed, &ran, act, &acts[SLOTS][token * inner..][..inner])?;
            }
        } else {
            let results = buffers.out.floats(tokens * K * HIDDEN);
            let expected = b.on_cpu(results)?;
            b.expect(allowed, &ran, results, &expected)?;
        }
        b.check_within(allowed, CombineExperts { layer, slots, tokens, buffers, per_assignment, h }, &[h], &[])?;
    }
    b.gpu.set_half_buffers(None);
    let act = b.buffer(tokens * inner)?;
    let ran = b.launch(swiglu(tokens, inner, scores, layer.width(), SLOTS, act));
    b.expect(CLOSE, &ran, act, &acts[SLOTS])
}

/// Computes `silu(gate) * up` of every row, first for the expert in each slot, then for the shared expert.
fn activations(
    b: &mut KernelCheck<'_, impl Driver>,
    layer: &MoeWeights,
    slots: &ExpertSlots,
    x: Region,
    scores: &[f32],
) -> Result<Vec<Vec<f32>>, DeviceError> {
    let product = |gate: &[f32], up: &[f32]| gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect::<Vec<f32>>();
    let mut all = Vec::new();
    let tokens = x.len / (4 * HIDDEN);
    let y = b.buffer(tokens * INNER * 2)?;
    for slot in 0..SLOTS as u32 {
        let matrices = [0, 1].map(|index| {
            let ExpertStack { codes, rows, cols, .. } = layer.stacks[index];
            let lens = codes.part_bytes(rows, cols);
            let part = |part: usize| slots.part(slot, layer.stacks[index].at[0][part], lens[part]);
            Weight {
                codes,
                rows,
                cols,
                global_scale: 1.0,
                parts: [0, 1, 2].map(|index| part(index).unwrap_or_default()),
            }
        });
        let op = Linear { x, tokens, norm: None, matrices: &matrices, y, add: false };
        b.cpu.execute(&op.into())?;
        let rows = b.on_cpu(y)?;
        all.push(rows.chunks_exact(2 * INNER).flat_map(|row| product(&row[..INNER], &row[INNER..])).collect());
    }
    let inner = layer.shared_inner();
    let own = |row: &[f32]| product(&row[SLOTS..][..inner], &row[SLOTS + inner..][..inner]);
    all.push(scores.chunks_exact(layer.width()).flat_map(own).collect());
    Ok(all)
}
