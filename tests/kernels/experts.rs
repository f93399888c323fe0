use crate::{check::*, host::Host};
use moestro_compute::{
    device::Region,
    ops::{
        CombineExperts, ExpertSet, ExpertSlots, ExpertStack, Experts, Float, MoeBuffers, MoeWeights, NO_SLOT, Router,
        SharedExpert, Weight, WeightFormat, experts::Jobs,
    },
};

/// A layer of experts in slots of several segments, with a gap before the last piece, and the values of its matrices.
pub struct Layer {
    pub stacks: [ExpertStack; 3],
    pub slots: ExpertSlots,
    /// The values, indexed by `[slot][projection]`.
    pub values: Vec<[Vec<f64>; 3]>,
}

pub fn layer(
    host: &mut Host,
    random: &mut Dice,
    codes: [WeightFormat; 3],
    hidden: usize,
    inner: usize,
    slots: usize,
) -> Layer {
    let mut at = 0;
    let mut place = |len: usize| {
        let start = at;
        at = (at + len).next_multiple_of(16) + 16;
        start
    };
    let stacks = [0, 1, 2].map(|i| {
        let (rows, cols) = if i < 2 { (inner, hidden) } else { (hidden, inner) };
        let at = codes[i].part_bytes(rows, cols).map(&mut place);
        ExpertStack { codes: codes[i], rows, cols, global_scales: vec![1.0], at: vec![at] }
    });
    let (stride, per_segment) = (at, 1 << slots.div_ceil(2).ilog2());
    let mut memory = vec![0u8; slots * stride];
    let mut all = Vec::new();
    for slot in memory.chunks_mut(stride) {
        all.push(stacks.each_ref().map(|piece| {
            let parts = parts(random, piece.codes, piece.rows, piece.cols);
            for (part, at) in parts.iter().zip(piece.at[0]) {
                slot[at..at + part.len()].copy_from_slice(part);
            }
            values(piece.codes, piece.rows, piece.cols, 1.0, &parts)
        }));
    }
    let segments: Vec<Region> = memory.chunks(per_segment * stride).map(|bytes| host.bytes(bytes)).collect();
    let table: Vec<u8> = segments.iter().flat_map(|segment| host.address(segment.buffer).to_le_bytes()).collect();
    let table = host.bytes(&table);
    Layer { stacks, slots: ExpertSlots { segments, table, per_segment, stride }, values: all }
}

/// Runs a layer on random rows in three ways: in one launch, in two launches (first resident experts, then loaded
/// experts), and grouped by expert.
fn case(codes: [WeightFormat; 3], hidden: usize, inner: usize, shared_inner: usize, k: usize, tokens: usize) {
    let (mut host, slots) = (Host::start(), if k > 1 { k + 3 } else { 2 });
    let mut random = Dice((hidden + inner + k) as u64);
    let layer = layer(&mut host, &mut random, codes, hidden, inner, slots);
    let shared_down = matrix(&mut host, &mut random, codes[2], hidden, shared_inner.max(64));
    let width = 5 + if shared_inner > 0 { 2 * shared_inner + 1 } else { 0 };
    let none = shared_down.matrix;
    let x = random.normals(tokens * hidden);
    let scores = random.normals(tokens * width);
    let weights: Vec<f32> = (0..tokens * (k + 1)).map(|_| random.normal().abs()).collect();
    let before = random.normals(tokens * hidden);
    let chosen: Vec<u32> = (0..tokens).flat_map(|t| (0..k).map(move |r| ((t + r) % slots) as u32)).collect();
    let row = inner.max(shared_inner);
    let router = Weight { rows: 5, cols: hidden, ..none };
    let gate_up = [Weight { rows: shared_inner, ..router }; 2];
    let shared = SharedExpert { gate_up, down: shared_down.matrix, result: router };
    let shared = (shared_inner > 0).then_some(shared);
    let mixture = &MoeWeights { k, renormalise: true, router, shared, stacks: layer.stacks };
    assert_eq!(mixture.width(), width);
    let act = (tokens * k + tokens) * row * 4;
    let out = (tokens * k + tokens) * hidden * 4;
    let (x_at, none) = (host.floats(&x), host.words(&[]));
    let buffers = MoeBuffers {
        scores: host.floats(&scores),
        weights: host.floats(&weights),
        act: host.empty(act),
        out: host.empty(out),
        jobs: none,
        order: none,
    };
    let op = |buffers| {
        let set = ExpertSet::Table { ids: none, slots: none };
        Experts { layer: mixture, slots: &layer.slots, tokens, x: x_at, buffers, experts: set }
    };
    let combine =
        |buffers, h| CombineExperts { layer: mixture, slots: &layer.slots, tokens, buffers, per_assignment: None, h };

    let x = wide(&x);
    let mut expected = wide(&before);
    for t in 0..tokens {
        let mut add = |act: &[f64], down: &[f64], weight: f32| {
            let y = product(act, down, act.len());
            expected[t * hidden..(t + 1) * hidden].iter_mut().zip(y).for_each(|(e, y)| *e += f64::from(weight) * y);
        };
        for r in 0..k {
            let [gate, up, down] = &layer.values[chosen[t * k + r] as usize];
            let xt = &x[t * hidden..(t + 1) * hidden];
            let act: Vec<f64> =
                product(xt, gate, hidden).iter().zip(product(xt, up, hidden)).map(|(g, u)| silu(*g) * u).collect();
            add(&act, down, weights[t * (k + 1) + r]);
        }
        if shared_inner > 0 {
            let from = wide(&scores[t * width + 5..(t + 1) * width]);
            let act: Vec<f64> = (0..shared_inner).map(|i| silu(from[i]) * from[shared_inner + i]).collect();
            add(&act, &shared_down.values, weights[t * (k + 1) + k]);
        }
    }

    let slots_at = host.words(&chosen);
    let h = host.floats(&before);
    let up = op(buffers).up(slots_at, true);
    host.run(&up);
    if let Some(direct) = direct(&up) {
        let staged = host.read(buffers.act);
        host.write(buffers.act, &vec![0xff; staged.len()]);
        host.run(&direct);
        assert!(host.read(buffers.act) == staged, "{}", direct.kernel);
    }
    host.run(&combine(buffers, h).down(slots_at));
    let at_once = host.read_floats(h);
    close(&format!("experts {hidden} x {inner}, k {k}, {tokens} tokens"), &at_once, &expected);

    // Computing the resident experts first and then the other experts gives the same bytes.
    let part = |odd: bool| -> Vec<u32> {
        chosen.iter().enumerate().map(|(i, &s)| if (i % 3 == 1) == odd { s } else { NO_SLOT }).collect()
    };
    let (hits, misses) = (host.words(&part(false)), host.words(&part(true)));
    let buffers = MoeBuffers { act: host.empty(act), ..buffers };
    let h = host.floats(&before);
    host.run(&op(buffers).up(hits, true));
    host.run(&op(buffers).up(misses, false));
    host.run(&combine(buffers, h).down(slots_at));
    assert_eq!(host.read_floats(h), at_once, "hits first, then misses");

    // Group the rows by expert, as in a prompt chunk.
    let jobs = group(&mut host, &chosen, slots);
    let h = host.floats(&before);
    op(buffers).by_expert(jobs).iter().for_each(|launch| host.run(launch));
    combine(buffers, h).sum(None).iter().for_each(|launch| host.run(launch));
    assert_eq!(host.read_floats(h), at_once, "grouped by expert");
}

pub fn group(host: &mut Host, chosen: &[u32], slots: usize) -> Jobs {
    let (mut jobs, mut order) = (Vec::new(), Vec::new());
    for slot in 0..slots as u32 {
        let first = order.len() as u32;
        order.extend(chosen.iter().enumerate().filter(|(_, s)| **s == slot).map(|(place, _)| place as u32));
        if order.len() as u32 > first {
            jobs.extend([slot, first, order.len() as u32 - first]);
        }
    }
    Jobs { count: jobs.len() / 3, jobs: host.words(&jobs), order: host.words(&order) }
}

fn affine(bits: u8, group: u16) -> WeightFormat {
    WeightFormat::Affine { bits, group, scale: Float::Bf16 }
}

#[test]
fn experts_of_real_sizes_match_reference() {
    case([AFFINE4; 3], 2048, 512, 512, 2, 1);
    case([AFFINE4; 3], 3072, 1024, 1024, 1, 1);
    case([AFFINE4; 3], 4096, 1024, 0, 1, 1);
}

#[test]
fn experts_of_several_rows_match_reference() {
    case([AFFINE4; 3], 192, 128, 64, 8, 6);
    case([AFFINE4; 3], 64, 64, 0, 10, 3);
}

#[test]
fn experts_of_other_formats_match_reference() {
    case([affine(3, 32), affine(5, 32), affine(6, 32)], 96, 32, 64, 4, 2);
    case([affine(8, 64), affine(2, 64), affine(8, 128)], 128, 128, 128, 1, 1);
    case([WeightFormat::Mxfp4; 3], 160, 96, 64, 5, 5);
    case([WeightFormat::Dense(Float::Bf16); 3], 64, 48, 64, 2, 2);
    case([WeightFormat::Fp8(Some(Float::Bf16)); 3], 272, 144, 128, 2, 5);
}

#[test]
fn router_selects_experts_and_slots() {
    let mut host = Host::start();
    let mut random = Dice(99);
    for (experts, k, tokens, renormalise) in
        [(256, 8, 1, true), (512, 10, 3, true), (5, 5, 2, true), (33, 1, 4, true), (64, 4, 2, false)]
    {
        let inner = 3;
        let none = host.words(&[]);
        let codes = WeightFormat::Dense(Float::F32);
        let router = Weight { codes, rows: experts, cols: 1, global_scale: 1.0, parts: [none; 3] };
        let gate_up = [Weight { rows: inner, ..router }; 2];
        let shared = SharedExpert { gate_up, down: Weight { rows: 1, cols: inner, ..router }, result: router };
        let layer = &MoeWeights { k, renormalise, router, shared: Some(shared), stacks: Default::default() };
        let width = layer.width();
        let mut scores = random.normals(tokens * width);
        scores[1] = scores[0]; // a tie
        let table: Vec<u32> = (0..experts as u32).map(|e| 1000 + e).collect();
        let place = |host: &mut Host, n: usize| -> Region { host.empty(n * 4) };
        let (scores_at, table) = (host.floats(&scores), host.words(&table));
        let to = Router {
            layer,
            tokens,
            x: none,
            norm: None,
            skip_shared: false,
            table,
            scores: scores_at,
            ids: place(&mut host, tokens * k),
            slots: place(&mut host, tokens * k),
            weights: place(&mut host, tokens * (k + 1)),
        };
        host.run(&to.choice(width - 1));
        let ids = host.read_words(to.ids);
        let mut expected = Vec::new();
        for t in 0..tokens {
            let row = &scores[t * width..(t + 1) * width];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            let found: Vec<usize> = ids[t * k..(t + 1) * k].iter().map(|&i| i as usize).collect();
            assert_eq!(found, order[..k]);
            let among = if renormalise { &order[..k] } else { &order[..] };
            let sum: f64 = among.iter().map(|&e| f64::from(row[e]).exp()).sum();
            expected.extend(order[..k].iter().map(|&e| f64::from(row[e]).exp() / sum));
            expected.push(1.0 / (1.0 + (-f64::from(row[width - 1])).exp()));
        }
        close("router weights", &host.read_floats(to.weights), &expected);
        assert!(host.read_words(to.slots).iter().zip(&ids).all(|(slot, id)| *slot == 1000 + id));
    }
}
