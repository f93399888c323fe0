//! Experts of decoded rows on matrix units, against plain loops and against themselves with other rows.

use crate::{
    check::*,
    experts::{Layer, group, layer},
    host::Host,
};
use moestro_compute::{
    device::Region,
    ops::{CombineExperts, ExpertSet, Experts, MoeBuffers, MoeWeights, NO_SLOT, SharedExpert, Weight, experts::Jobs},
};
use std::ops::Range;

/// How the assignments of a pass are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// All at once, with the slots of all assignments.
    Table,
    /// Some assignments first, then the others.
    Parts,
    /// Grouped by expert on the CPU.
    Lists,
}

/// A layer in the memory of the kernel program, and rows for it. One value of each row is 10,000 times the others.
struct Case {
    host: Host,
    layer: Layer,
    mixture: MoeWeights,
    /// Gate, up and down of the shared expert.
    shared: [Sample; 3],
    x: Vec<f32>,
    weights: Vec<f32>,
    before: Vec<f32>,
    /// The slot of each assignment.
    chosen: Vec<u32>,
    slots: usize,
}

impl Case {
    fn new([hidden, inner, shared_inner]: [usize; 3], k: usize, tokens: usize, slots: usize) -> Self {
        let (mut host, mut random) = (Host::start(), Dice((hidden + inner + k * tokens) as u64));
        let layer = layer(&mut host, &mut random, [AFFINE4; 3], hidden, inner, slots);
        let inner = shared_inner.max(128);
        let shared = [(inner, hidden), (inner, hidden), (hidden, inner)]
            .map(|(rows, cols)| matrix(&mut host, &mut random, AFFINE4, rows, cols));
        let [gate, up, down] = [0, 1, 2].map(|i| shared[i].matrix);
        let router = Weight { rows: 5, ..gate };
        let expert = SharedExpert { gate_up: [gate, up], down, result: router };
        let expert = (shared_inner > 0).then_some(expert);
        let mixture = MoeWeights { k, renormalise: true, router, shared: expert, stacks: layer.stacks.clone() };
        assert!(mixture.fits_tiles());
        let mut x = random.normals(tokens * hidden);
        for row in x.chunks_mut(hidden) {
            row[random.below(hidden)] *= 10_000.0;
        }
        let weights = (0..tokens * (k + 1)).map(|_| random.normal().abs()).collect();
        let before = random.normals(tokens * hidden);
        // Different experts for each token, with one that all tokens use and others that few use.
        let mut chosen = Vec::new();
        for _ in 0..tokens {
            let mut all: Vec<u32> = (1..slots as u32).collect();
            chosen.push(0);
            chosen.extend((1..k).map(|_| all.swap_remove(random.below(all.len()))));
        }
        Self { host, layer, mixture, shared, x, weights, before, chosen, slots }
    }

    fn run(&mut self, rows: Range<usize>, way: Way) -> Vec<f32> {
        let (tokens, mixture) = (rows.len(), &self.mixture);
        let (k, hidden) = (mixture.k, mixture.hidden());
        let host = &mut self.host;
        let part = |values: &[f32], width: usize| values[rows.start * width..rows.end * width].to_vec();
        let chosen = &self.chosen[rows.start * k..rows.end * k];
        let none = host.words(&[]);
        let buffers = MoeBuffers {
            scores: host.empty(tokens * mixture.width() * 4),
            weights: host.floats(&part(&self.weights, k + 1)),
            act: host.empty(tokens * (k + 1) * mixture.row() * 4),
            out: host.empty(tokens * (k + 1) * hidden * 4),
            jobs: none,
            order: none,
        };
        let (x, h) = (host.floats(&part(&self.x, hidden)), host.floats(&part(&self.before, hidden)));
        let (slots, experts) = (&self.layer.slots, ExpertSet::Table { ids: none, slots: none });
        let op = Experts { layer: mixture, slots, tokens, x, buffers, experts };
        let combine = CombineExperts { layer: mixture, slots, tokens, buffers, per_assignment: None, h };
        let mut launches = Vec::new();
        let all = host.words(chosen);
        match way {
            Way::Table => launches.push(op.up_tiles(all, true)),
            Way::Parts => {
                for odd in [false, true] {
                    let some = |(i, slot): (usize, &u32)| if (i % 3 == 1) == odd { *slot } else { NO_SLOT };
                    let some: Vec<u32> = chosen.iter().enumerate().map(some).collect();
                    launches.push(op.up_tiles(host.words(&some), !odd));
                }
            }
            Way::Lists => {
                let Jobs { jobs, order, .. } = group(host, chosen, self.slots);
                let words = host.read_words(jobs);
                let jobs: Vec<u32> =
                    words.chunks(3).flat_map(|job| Experts::jobs(job[0], job[1], job[2])).flatten().collect();
                let jobs = Jobs { count: jobs.len() / 3, jobs: host.words(&jobs), order };
                launches.extend(op.by_expert_tiles(jobs, true));
            }
        }
        launches.extend(if way == Way::Lists { combine.sum_tiles() } else { combine.down_tiles(all) });
        launches.iter().for_each(|launch| host.run(launch));
        let found = host.read_floats(h);
        let used = [x, h, all, buffers.scores, buffers.weights, buffers.act, buffers.out];
        used.iter().for_each(|region: &Region| host.drop_buffer(region.buffer));
        found
    }

    fn expected(&self, token: usize) -> Vec<f64> {
        let MoeWeights { k, .. } = self.mixture;
        let hidden = self.mixture.hidden();
        let mut expected = wide(&self.before[token * hidden..][..hidden]);
        let x = wide(&self.x[token * hidden..][..hidden]);
        let mut add = |[gate, up, down]: [&[f64]; 3], weight: f32| {
            let gates = product(&x, gate, hidden);
            let act: Vec<f64> = gates.iter().zip(product(&x, up, hidden)).map(|(g, u)| silu(*g) * u).collect();
            let y = product(&act, down, act.len());
            expected.iter_mut().zip(y).for_each(|(e, y)| *e += f64::from(weight) * y);
        };
        for rank in 0..k {
            let [gate, up, down] = &self.layer.values[self.chosen[token * k + rank] as usize];
            add([gate, up, down], self.weights[token * (k + 1) + rank]);
        }
        if self.mixture.shared.is_some() {
            add([0, 1, 2].map(|i| &self.shared[i].values[..]), self.weights[token * (k + 1) + k]);
        }
        expected
    }
}

#[test]
fn tiled_experts_are_exact() {
    for (sizes, k, tokens, slots) in [
        ([2048, 512, 512], 2, 1, 3),
        ([2048, 512, 512], 2, 5, 4),
        // More columns than threadgroup memory has, and rows that fill no block.
        ([2176, 640, 128], 3, 2, 4),
        ([128, 640, 1152], 3, 1, 4),
        ([256, 128, 0], 8, 16, 20),
        ([128, 128, 256], 1, 37, 2),
        ([128, 128, 128], 17, 1, 18),
    ] {
        let mut case = Case::new(sizes, k, tokens, slots);
        for way in [Way::Table, Way::Lists] {
            // A table has no more than 32 rows.
            if way == Way::Table && tokens > 32 {
                continue;
            }
            let found = case.run(0..tokens, way);
            for (token, found) in found.chunks(sizes[0]).enumerate() {
                let off = difference(found, &case.expected(token));
                assert!(off <= 2e-6, "{sizes:?}, k {k}, row {token} of {tokens}, {way:?}: {off:.1e}");
            }
        }
    }
}

#[test]
fn tiled_experts_ignore_their_neighbours() {
    const TOKENS: usize = 16;
    for (sizes, k, slots) in [([256, 128, 128], 4, 7), ([128, 256, 0], 3, 12)] {
        let mut case = Case::new(sizes, k, TOKENS, slots);
        let hidden = sizes[0];
        case.x[5 * hidden + 3] = f32::NAN;
        case.x[6 * hidden + 70] = f32::INFINITY;
        case.x[13 * hidden] = -f32::INFINITY;
        // `tiled_experts_are_exact` compares the orders of threads of the other ways.
        case.host.twice = false;
        let bits = |rows: Vec<f32>| rows.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let alone: Vec<Vec<u32>> = (0..TOKENS).map(|row| bits(case.run(row..row + 1, Way::Table))).collect();
        let mut random = Dice(3);
        for count in 1..=TOKENS {
            let first = random.below(TOKENS + 1 - count);
            for way in [Way::Table, Way::Parts, Way::Lists] {
                case.host.twice = way == Way::Parts;
                let together = bits(case.run(first..first + count, way));
                for (row, (found, expected)) in together.chunks(hidden).zip(&alone[first..]).enumerate() {
                    assert!(found == expected, "row {row} of {count} from {first}, {way:?}");
                }
            }
        }
        for row in (0..TOKENS).filter(|row| ![5, 6, 13].contains(row)) {
            assert!(alone[row].iter().all(|bits| f32::from_bits(*bits).is_finite()), "row {row}");
        }
    }
}

/// Four rows of an expert take as many products as one row, and five rows twice as many.
#[test]
fn rows_of_an_expert_share_its_products() {
    let mut case = Case::new([128, 128, 0], 1, 5, 2);
    let mut products = |rows: usize| {
        let (mixture, host) = (&case.mixture, &mut case.host);
        let x = host.floats(&case.x[..rows * 128]);
        let none = host.words(&[]);
        let [act, out] = [0, 1].map(|_| host.empty(rows * 256 * 4));
        let scores = host.empty(rows * 5 * 4);
        let buffers = MoeBuffers { scores, weights: none, act, out, jobs: none, order: none };
        let experts = ExpertSet::Table { ids: none, slots: none };
        let op = Experts { layer: mixture, slots: &case.layer.slots, tokens: rows, x, buffers, experts };
        let slots = host.words(&vec![0; rows]);
        host.run(&op.up_tiles(slots, false));
        host.products()
    };
    let one = products(1);
    assert!(one > 0);
    assert_eq!([4, 5].map(products), [one, 2 * one]);
}
