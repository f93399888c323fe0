//! The router and the experts in their slots.

use super::{Bench, CLOSE, Trouble, rows, values};
use crate::{
    device::Gpu,
    ops::{
        self, Assignment, Codes, ExpertView, Float, Job, Weight,
        math::{sigmoid, silu},
        plan::{self, Chosen, Experts, Jobs, Linear, Piece, Route, Slots},
    },
};
use candle_core::{DType, Device, Tensor};

const HIDDEN: usize = 192;
const INNER: usize = 128;
const SHARED: usize = 64;
const SLOTS: usize = 3;
const TOKENS: usize = 3;
const K: usize = 2;

pub fn all<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    route(b)?;
    let affine = |bits, group| Codes::Affine { bits, group, scale: Float::Bf16 };
    mixture(b, [affine(4, 64); 3])?;
    mixture(b, [affine(3, 32), affine(6, 64), affine(8, 128)])?;
    mixture(b, [Codes::Mxfp4; 3])
}

fn route<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    let (experts, k, width, gate_at) = (256, 8, 300, 290);
    let scores = b.random.floats(TOKENS * width);
    let table: Vec<u32> = (0..experts as u32).map(|expert| 7 * expert + 1).collect();
    let routes = ops::route(&rows(&scores, width)?.narrow(1, 0, experts)?, k, true)?;
    let mut weights = Vec::new();
    for (row, chosen) in scores.chunks(width).zip(routes.weights.chunks(k)) {
        weights.extend(chosen);
        weights.push(sigmoid(row[gate_at]));
    }
    let (scores_at, table_at) = (b.floats(&scores)?, b.words(&table)?);
    let to = Chosen { ids: b.room(TOKENS * k)?, slots: b.room(TOKENS * k)?, weights: b.room(TOKENS * (k + 1))? };
    let op = Route { experts, k, width, gate_at: Some(gate_at), renormalise: true };
    let dispatch = plan::route(&op, TOKENS, scores_at, table_at, to);
    b.check(&dispatch, &[(to.weights, &weights)])?;
    let slots: Vec<u32> = routes.ids.iter().map(|id| table[*id as usize]).collect();
    if b.gpu.read_words(to.ids)? != routes.ids || b.gpu.read_words(to.slots)? != slots {
        b.enter(dispatch.kernel, f64::INFINITY, CLOSE);
    }
    Ok(())
}

/// One layer's experts for a few rows: by slot number, and grouped by expert.
fn mixture<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, codes: [Codes; 3]) -> Result<(), Trouble> {
    // Slots as the store lays them out: pieces side by side, each at a multiple of 16 bytes.
    let mut end = 0;
    let pieces = [0, 1, 2].map(|i| {
        let (rows, cols) = if i < 2 { (INNER, HIDDEN) } else { (HIDDEN, INNER) };
        let at = codes[i].row_bytes(cols).map(|bytes| {
            let start = end;
            end = (start + bytes * rows).next_multiple_of(16);
            start
        });
        Piece { codes: codes[i], rows, cols, gain: 1.0, at }
    });
    let mut slab = vec![0; SLOTS * end];
    let mut experts = Vec::new();
    for slot in slab.chunks_mut(end) {
        let mut weights = Vec::new();
        for piece in &pieces {
            let (weight, _) = b.matrix(piece.codes, piece.rows, piece.cols)?;
            for (part, at) in weight.parts.iter().zip(piece.at) {
                slot[at..at + part.bytes().len()].copy_from_slice(part.bytes());
            }
            weights.push(weight);
        }
        experts.push(weights);
    }
    let slots = Slots { slabs: vec![b.bytes(&slab)?], per_slab: SLOTS, stride: end };
    let (shared, shared_at) =
        b.matrix(codes[2], HIDDEN, if SHARED.is_multiple_of(codes[2].group()) { SHARED } else { 2 * SHARED })?;
    let (inner, width) = (shared.cols, 5 + 2 * shared.cols);

    let (x, before) = (b.random.floats(TOKENS * HIDDEN), b.random.floats(TOKENS * HIDDEN));
    let (scores, weights) = (b.random.floats(TOKENS * width), b.random.floats(TOKENS * (K + 1)));
    let chosen: Vec<u32> = (0..TOKENS).flat_map(|t| (0..K).map(move |r| ((t + r) % SLOTS) as u32)).collect();
    let expected = expected(b, &experts, &shared, &chosen, [&x, &before, &scores, &weights])?;

    let row = INNER.max(inner);
    let act = b.room((TOKENS * K + TOKENS) * row)?;
    let op = Experts {
        tokens: TOKENS,
        k: K,
        gate: pieces[0],
        up: pieces[1],
        down: pieces[2],
        slots: &slots,
        shared: Some(shared_at),
        scores: b.floats(&scores)?,
        width,
        shared_at: 5,
        act,
        weights: b.floats(&weights)?,
    };
    let (x_at, slots_at, h) = (b.floats(&x)?, b.words(&chosen)?, b.floats(&before)?);
    let routed = &expected.act[..TOKENS * K * row];
    let mut results = vec![(act, routed)];
    results.extend(
        expected
            .shared_act
            .chunks(inner)
            .enumerate()
            .map(|(token, values)| (act.part((TOKENS * K + token) * row * 4, inner * 4), values)),
    );
    b.check(&plan::experts_up(&op, x_at, slots_at, true), &results)?;
    b.check(&plan::experts_down(&op, slots_at, h), &[(h, &expected.h)])?;

    let mut words = (Vec::new(), Vec::new());
    for slot in 0..SLOTS as u32 {
        let first = words.1.len();
        words.1.extend((0..chosen.len() as u32).filter(|place| chosen[*place as usize] == slot));
        words.0.extend([slot, first as u32, (words.1.len() - first) as u32]);
    }
    let jobs = Jobs { count: SLOTS, jobs: b.words(&words.0)?, order: b.words(&words.1)? };
    let (act, out) = (b.room((TOKENS * K + TOKENS) * row)?, b.room(TOKENS * K * HIDDEN)?);
    let op = Experts { act, ..op };
    b.check(&plan::experts_up_rows(&op, x_at, jobs), &[(act, routed)])?;
    b.check(&plan::experts_down_rows(&op, jobs, out), &[(out, &expected.out)])?;
    let (shared_act, shared_out, h) = (b.room(TOKENS * inner)?, b.room(TOKENS * HIDDEN)?, b.floats(&before)?);
    let swiglu = plan::swiglu(TOKENS, inner, op.scores, width, 5, shared_act);
    b.check(&swiglu, &[(shared_act, &expected.shared_act)])?;
    let matrices = [shared_at];
    if b.run(&plan::linear(&Linear {
        x: shared_act,
        tokens: TOKENS,
        norm: None,
        matrices: &matrices,
        y: shared_out,
        add: false,
    })) {
        b.check(&plan::experts_combine(&op, out, shared_out, h), &[(h, &expected.h)])?;
    }
    Ok(())
}

/// What the kernels should leave behind.
struct Expected {
    /// `[TOKENS * K, row of act]`.
    act: Vec<f32>,
    shared_act: Vec<f32>,
    out: Vec<f32>,
    h: Vec<f32>,
}

fn expected<G: Gpu + ?Sized>(
    b: &Bench<'_, G>,
    experts: &[Vec<Weight>],
    shared: &Weight,
    chosen: &[u32],
    [x, before, scores, weights]: [&[f32]; 4],
) -> Result<Expected, Trouble> {
    let (inner, compute) = (shared.cols, &b.compute);
    let row = INNER.max(inner);
    let tensor = rows(x, HIDDEN)?;
    let mut act = vec![0.0; TOKENS * K * row];
    for (place, slot) in chosen.iter().enumerate() {
        let expert = &experts[*slot as usize];
        let both = values(&ops::linear(compute, &tensor.narrow(0, place / K, 1)?, &[&expert[0], &expert[1]])?)?;
        let (gate, up) = both.split_at(INNER);
        act[place * row..].iter_mut().zip(gate.iter().zip(up)).for_each(|(a, (g, u))| *a = silu(*g) * u);
    }
    let mut shared_act = Vec::new();
    for scores in scores.chunks(5 + 2 * inner) {
        let (gate, up) = scores[5..].split_at(inner);
        shared_act.extend(gate.iter().zip(up).map(|(g, u)| silu(*g) * u));
    }
    let assigned: Vec<Vec<Assignment>> = (0..SLOTS as u32)
        .map(|slot| {
            let places = (0..chosen.len() as u32).filter(|place| chosen[*place as usize] == slot);
            places.map(|place| Assignment { token: place / K as u32, place }).collect()
        })
        .collect();
    let jobs: Vec<Job<'_>> = experts
        .iter()
        .zip(&assigned)
        .map(|(expert, rows)| {
            let expert = ExpertView { gate: expert[0].view(), up: expert[1].view(), down: expert[2].view() };
            Job { expert, rows }
        })
        .collect();
    let out = Tensor::zeros((TOKENS * K, HIDDEN), DType::F32, &Device::Cpu)?;
    ops::experts(compute, &tensor, &jobs, &out)?;
    let shared_rows = ops::linear(compute, &rows(&shared_act, inner)?, &[shared])?;
    let (routed, gates): (Vec<&[f32]>, Vec<f32>) = weights.chunks(K + 1).map(|w| (&w[..K], w[K])).unzip();
    let gates = Tensor::from_slice(&gates, TOKENS, &Device::Cpu)?;
    let sum = ops::combine(compute, &out, &routed.concat(), K, Some((&shared_rows, &gates)))?;
    let h = values(&sum)?.iter().zip(before).map(|(sum, before)| sum + before).collect();
    Ok(Expected { act, shared_act, out: values(&out)?, h })
}
