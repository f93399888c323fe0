//! Compares rows of two sequences that one operation computes with the same rows computed alone.

use super::{AFFINE, TestCpu, delta::delta_shape};
use crate::{
    device::Region,
    ops::{
        Attention, AttentionRows, AttentionShape, Conv, Decay, DeltaNet, DeltaNetRows, DeltaRule, KvCache, KvFormat,
        KvWrite, Linear, Norm, QkNormRope, RecentRing, Replay, SequenceRows,
    },
};
use test_support::mutate::Dice;

/// Row 0 belongs to sequence 1 and row 1 to sequence 0, at these positions.
const STARTS: [usize; 2] = [261, 40];

fn table(lab: &mut TestCpu) -> SequenceRows {
    let words: [u32; 4] = [1, STARTS[0] as u32, 0, STARTS[1] as u32];
    SequenceRows { starts: [STARTS[1], STARTS[0]], table: lab.bytes(bytemuck::cast_slice(&words)) }
}

/// Two buffers with the same values.
fn twice(lab: &mut TestCpu, dice: &mut Dice, count: usize) -> [Region; 2] {
    let values: Vec<f32> = (0..count).map(|_| dice.unit()).collect();
    [lab.floats(&values), lab.floats(&values)]
}

#[test]
fn attention_rows_match_each_sequence_alone() {
    let ring = Some(RecentRing { capacity: 256, format: KvFormat::I16 });
    for (format, recent) in [(KvFormat::F32, None), (KvFormat::I16, None), (KvFormat::Eight, ring)] {
        let mut dice = Dice(21);
        let mut lab = TestCpu::new();
        let shape =
            &AttentionShape { heads: 4, kv_heads: 2, dim: 64, rope_dim: 32, eps: 1e-6, context: 264, format, recent };
        let of = |region: Region, row, width| region.rows(row, 1, width);
        let values = shape.heads * shape.dim;
        let [proj, rope] = [shape.width(), shape.rope_dim].map(|width| lab.random(&mut dice, 2 * width));
        let [q_norm, k_norm] = [(); 2].map(|()| lab.random(&mut dice, shape.dim));
        let norm_rope = |rope_table| QkNormRope { q_norm, k_norm, rope_table };
        let pages = lab.table(2 * shape.pages());
        let mut run = |together: bool| {
            let mut zeros = |bytes: usize| lab.buffer(bytes.div_ceil(4)).first(bytes);
            let caches = [0, 1].map(|_| zeros(2 * shape.cache_bytes()));
            let recent = [0, 1].map(|_| zeros(2 * shape.recent_bytes()));
            let q = lab.buffer(2 * values);
            let y = lab.buffer(2 * values);
            let cache = KvCache { keys: caches[0], values: caches[1], table: pages, recent };
            let start = 0;
            let partials = Region::default();
            let write = KvWrite { shape, start, tokens: 2, proj, norm_rope: norm_rope(rope), q, cache };
            let attention = Attention { shape, start, tokens: 2, q, cache, proj, partials, y };
            if together {
                let rows = table(&mut lab);
                lab.run(&AttentionRows { write, attention, rows });
            }
            for (row, start) in STARTS.into_iter().enumerate().filter(|_| !together) {
                let number = 1 - row;
                let recent = recent.map(|ring| ring.part(number * shape.recent_bytes(), shape.recent_bytes()));
                let cache = KvCache { table: of(pages, number, shape.pages()), recent, ..cache };
                let proj = of(proj, row, shape.width());
                let q = of(q, row, values);
                let y = of(y, row, values);
                let norm_rope = norm_rope(of(rope, row, shape.rope_dim));
                lab.run(KvWrite { start, tokens: 1, proj, norm_rope, q, cache, ..write });
                lab.run(Attention { start, tokens: 1, q, cache, proj, y, ..attention });
            }
            [caches[0], caches[1], recent[0], recent[1], q, y].map(|region| lab.bits(region))
        };
        assert!(run(true) == run(false), "{format:?}");
    }
}

#[test]
fn delta_net_rows_match_each_sequence_alone() {
    let mut dice = Dice(22);
    let mut lab = TestCpu::new();
    let shape = &delta_shape(2, 4, 32, 32);
    let hidden = 128;
    let channels = shape.channels();
    let values = shape.values();
    let heads = shape.value_heads;
    let in_rows = [channels, values, heads, heads];
    let matrices = in_rows.map(|rows| lab.weight(&mut dice, AFFINE, rows, hidden));
    let last = [lab.weight(&mut dice, AFFINE, hidden, values)];
    let norm = Some(Norm { weight: lab.random(&mut dice, hidden), eps: 1e-6, keep: None });
    let weight = lab.random(&mut dice, 4 * channels);
    let decay = Decay { rate: lab.floats(&vec![-0.5; heads]), dt_bias: lab.random(&mut dice, heads) };
    let gated = lab.random(&mut dice, shape.value_dim);
    let [sample, matrix] = [3 * channels, values * shape.key_dim];
    let [h, samples, states] = [hidden, sample, matrix].map(|width| twice(&mut lab, &mut dice, 2 * width));
    let proj = lab.buffer(2 * shape.width());
    let mixed = lab.buffer(2 * channels);
    let out = lab.buffer(2 * values);
    // The forward pass's buffers share memory, too.
    let y = mixed.floats(2 * values);
    let net = |tokens, h, samples, state| {
        let replay = Replay::default();
        let committed = tokens;
        let conv = Conv { shape, tokens, proj, weight, replay, committed, state: samples, out: mixed };
        DeltaNet {
            in_proj: Linear { x: h, tokens, norm, matrices: &matrices, y: proj, add: false },
            conv,
            rule: DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm: gated, out, y },
            out_proj: Linear { x: y, tokens, norm: None, matrices: &last, y: h, add: true },
        }
    };
    let rows = table(&mut lab);
    lab.run(&DeltaNetRows { net: net(2, h[0], samples[0], states[0]), rows });
    for row in 0..2 {
        let number = 1 - row;
        let sample = samples[1].rows(number, 1, sample);
        let state = states[1].rows(number, 1, matrix);
        lab.run(&net(1, h[1].rows(row, 1, hidden), sample, state));
    }
    for [together, alone] in [h, samples, states] {
        assert!(lab.bits(together) == lab.bits(alone));
    }
}
