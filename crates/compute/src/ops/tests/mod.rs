//! Compares linear layers and experts with a naive reference, and with themselves for other batches and thread counts.

use super::{
    Backend, CombineExperts, Cpu, ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, Float, Linear, MoeBuffers,
    MoeWeights, Op, ReservedBuffer, SharedExpert, Weight, WeightFormat,
    linear::products::tests::OwnedWeight,
    quant::ActivationFormat,
    simd::{Isa, tests::with},
};
use crate::device::{CpuArithmetic, CpuDevice, DeviceError, Region, Slab};
use std::sync::Arc;
use test_support::mutate::Dice;

mod attention;
mod delta;
mod filled_cache;
mod kv_bits;
mod sequence_rows;

const AFFINE: WeightFormat = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };

#[test]
fn reserved_buffers_keep_numbers_in_any_order() {
    let slab = || Arc::new(Slab::new(64).unwrap());
    let mut cpu = Cpu::new(CpuDevice::new(1, CpuArithmetic::F32));
    let first = cpu.allocate(4).unwrap();
    assert_eq!(first.buffer as usize, ReservedBuffer::COUNT);
    let segments = |cpu: &mut Cpu| cpu.adopt_segments(ReservedBuffer::ExpertTable, &slab(), &[0..32, 32..64]).unwrap();
    let (one, table) = segments(&mut cpu);
    assert_eq!(table.buffer, ReservedBuffer::ExpertTable.number());
    // The table takes no other number.
    assert_eq!([one[0].buffer, one[1].buffer], [first.buffer + 1, first.buffer + 2]);
    for buffer in [ReservedBuffer::MtpVectors, ReservedBuffer::Matrices] {
        let region = cpu.adopt_as(buffer, &slab()).unwrap();
        assert_eq!(region, Region { buffer: buffer.number(), offset: 0, len: 64 });
        cpu.write(region, &[7; 64]).unwrap();
        assert!(cpu.adopt_as(buffer, &slab()).is_err(), "adopted twice");
    }
    // A reserved number without a buffer has no bytes.
    let missing = Region { buffer: ReservedBuffer::Vectors.number(), offset: 0, len: 4 };
    assert!(cpu.read(missing, &mut [0; 4]).is_err());
}

#[test]
fn failed_allocation_is_an_error_of_memory() {
    let mut cpu = Cpu::new(CpuDevice::new(1, CpuArithmetic::F32));
    for bytes in [1 << 60, usize::MAX / 2] {
        assert!(matches!(cpu.allocate(bytes), Err(DeviceError::Memory(_))), "{bytes} bytes");
    }
}

/// A CPU backend whose buffers the tests fill.
struct TestCpu {
    cpu: Cpu,
}

impl TestCpu {
    fn new() -> Self {
        Self { cpu: Cpu::new(CpuDevice::new(1, CpuArithmetic::Integer)) }
    }

    /// Changes the number of threads and the arithmetic, and drops quantized rows.
    fn with(&mut self, threads: usize, math: CpuArithmetic) -> &mut Self {
        self.cpu.compute = CpuDevice::new(threads, math);
        self.cpu.quantized = Default::default();
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> Region {
        let region = self.cpu.allocate(bytes.len()).unwrap();
        self.cpu.write(region, bytes).unwrap();
        region
    }

    fn floats(&mut self, values: &[f32]) -> Region {
        self.bytes(bytemuck::cast_slice(values))
    }

    fn random(&mut self, dice: &mut Dice, count: usize) -> Region {
        self.floats(&(0..count).map(|_| dice.unit()).collect::<Vec<_>>())
    }

    /// A page table whose pages are in descending order.
    fn table(&mut self, pages: usize) -> Region {
        self.bytes(bytemuck::cast_slice(&(0..pages as u32).rev().collect::<Vec<_>>()))
    }

    fn buffer(&mut self, count: usize) -> Region {
        self.cpu.allocate(count * 4).unwrap()
    }

    fn weight(&mut self, dice: &mut Dice, codes: WeightFormat, rows: usize, cols: usize) -> Weight {
        let owned = OwnedWeight::random(dice, codes, rows, cols);
        let parts = owned.view().parts.map(|part| self.bytes(part));
        Weight { codes, rows, cols, global_scale: 1.0, parts }
    }

    fn run<'o>(&mut self, op: impl Into<Op<'o>>) {
        self.cpu.execute(&op.into()).unwrap();
    }

    fn fails<'o>(&mut self, op: impl Into<Op<'o>>) -> bool {
        self.cpu.execute(&op.into()).is_err()
    }

    fn read(&mut self, region: Region) -> Vec<f32> {
        let mut values = vec![0.0; region.len / 4];
        self.cpu.read_floats(region, &mut values).unwrap();
        values
    }

    fn bits(&mut self, region: Region) -> Vec<u32> {
        self.read(region).into_iter().map(f32::to_bits).collect()
    }

    /// Asserts that the bytes of a row of `width` values do not depend on other rows, threads or the instruction
    /// set. `run` computes `len` rows, starting with row `from`.
    fn rows_stand_alone(&mut self, rows: usize, width: usize, run: impl Fn(&mut Self, usize, usize) -> Vec<f32>) {
        let mut run = |threads, from, len| to_bits(run(self.with(threads, CpuArithmetic::Integer), from, len));
        let expected = run(1, 0, rows);
        assert!(run(2, 0, rows) == expected && run(5, 0, rows) == expected);
        for isa in Isa::all().into_iter().filter(|isa| *isa != Isa::best()) {
            assert!(with(isa, || run(1, 0, rows)) == expected, "{isa:?}");
        }
        for row in [0, rows / 2, rows - 1] {
            let values = row * width..(row + 1) * width;
            // Enough threads to split the work of one task.
            assert!(run(1, row, 1) == expected[values.clone()] && run(16, row, 1) == expected[values], "{row}");
        }
    }

    /// Products of `tokens` rows with weights, side by side.
    fn linear(&mut self, x: Region, tokens: usize, matrices: &[Weight]) -> Vec<f32> {
        let y = self.buffer(tokens * matrices.iter().map(|weight| weight.rows).sum::<usize>());
        self.run(Linear { x, tokens, norm: None, matrices, y, add: false });
        self.read(y)
    }
}

fn to_bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn linear_bytes_ignore_batch_and_threads() {
    // More rows than one task computes.
    const ROWS: usize = 130;
    let mut dice = Dice(11);
    let mut lab = TestCpu::new();
    let eight = WeightFormat::Affine { bits: 8, group: 64, scale: Float::Bf16 };
    for last in [(AFFINE, 1), (WeightFormat::Mxfp4, 40)] {
        let all = [(AFFINE, 300), (eight, 7), (WeightFormat::Dense(Float::Bf16), 65), last]
            .map(|(codes, rows)| lab.weight(&mut dice, codes, rows, 384));
        let width: usize = all.iter().map(|weight| weight.rows).sum();
        let x = lab.random(&mut dice, ROWS * 384);
        for math in [CpuArithmetic::Integer, CpuArithmetic::F32] {
            let expected = to_bits(lab.with(1, math).linear(x, ROWS, &all));
            for threads in [2, 5] {
                assert!(to_bits(lab.with(threads, math).linear(x, ROWS, &all)) == expected);
            }
            let y = lab.random(&mut dice, ROWS * width);
            let before = lab.read(y);
            lab.run(Linear { x, tokens: ROWS, norm: None, matrices: &all, y, add: true });
            let sums = before.iter().zip(&expected).map(|(y, x)| y + f32::from_bits(*x)).collect();
            assert!(to_bits(lab.read(y)) == to_bits(sums));
            lab.with(1, math);
            let rows = (0..ROWS).flat_map(|row| lab.linear(x.rows(row, 1, 384), 1, &all)).collect();
            assert!(to_bits(rows) == expected);
            let mut first = 0;
            for weight in all {
                let alone = to_bits(lab.linear(x, ROWS, &[weight]));
                for (alone, row) in alone.chunks(weight.rows).zip(expected.chunks(width)) {
                    assert!(alone == &row[first..first + weight.rows]);
                }
                first += weight.rows;
            }
        }
    }
}

#[test]
fn linear_refuses_mismatched_sizes() {
    let mut dice = Dice(12);
    let mut lab = TestCpu::new();
    let weight = lab.weight(&mut dice, AFFINE, 8, 128);
    let x = lab.random(&mut dice, 2 * 128);
    let y = lab.buffer(2 * 9);
    let mut fails = |weight: Weight, x: Region, y: Region| {
        lab.fails(Linear { x, tokens: 2, norm: None, matrices: &[weight], y, add: false })
    };
    assert!(!fails(weight, x, y));
    assert!(fails(Weight { cols: 64, ..weight }, x, y));
    assert!(fails(Weight { rows: 9, ..weight }, x, y));
    assert!(fails(Weight { codes: WeightFormat::Affine { bits: 7, group: 64, scale: Float::Bf16 }, ..weight }, x, y));
    // An operation must not read a region that it writes.
    assert!(fails(weight, x, x.first(2 * 9 * 4)));
}

/// Experts of different formats and intermediate sizes, each in its own layer. Each of `tokens` tokens chooses `k` of
/// them at random.
struct Layer {
    experts: Vec<(MoeWeights, ExpertSlots, [Weight; 3])>,
    assignments: Vec<Vec<u32>>,
    k: usize,
}

impl Layer {
    const HIDDEN: usize = 256;

    fn random(
        lab: &mut TestCpu,
        dice: &mut Dice,
        kinds: &[(WeightFormat, WeightFormat, usize)],
        tokens: usize,
        k: usize,
    ) -> Self {
        let hidden = Self::HIDDEN;
        let mut experts = Vec::new();
        for (up, down, inner) in kinds {
            let shapes = [(*up, *inner, hidden), (*up, *inner, hidden), (*down, hidden, *inner)];
            let (mut bytes, mut stacks): (Vec<u8>, [ExpertStack; 3]) = Default::default();
            for ((codes, rows, cols), stack) in shapes.into_iter().zip(&mut stacks) {
                let owned = OwnedWeight::random(dice, codes, rows, cols);
                let at = owned.view().parts.map(|part| {
                    let at = bytes.len();
                    bytes.extend(part);
                    at
                });
                *stack = ExpertStack { codes, rows, cols, global_scales: vec![1.0], at: vec![at] };
            }
            let stride = bytes.len();
            let segments = vec![lab.bytes(&bytes)];
            let table = Region::default();
            let slots = ExpertSlots { segments, table, per_segment: 1, stride };
            let weights = stacks.each_ref().map(|stack| {
                let lens = stack.codes.part_bytes(stack.rows, stack.cols);
                let part = |part: usize| slots.part(0, stack.at[0][part], lens[part]).unwrap();
                let parts = [0, 1, 2].map(part);
                Weight { codes: stack.codes, rows: stack.rows, cols: stack.cols, global_scale: 1.0, parts }
            });
            let codes = WeightFormat::Dense(Float::F32);
            let router = Weight { codes, rows: 1, cols: hidden, global_scale: 1.0, parts: Default::default() };
            experts.push((MoeWeights { k, renormalise: true, router, shared: None, stacks }, slots, weights));
        }
        let mut assignments = vec![Vec::new(); kinds.len()];
        for token in 0..tokens {
            let first = dice.below(kinds.len());
            for rank in 0..k {
                assignments[(first + rank) % kinds.len()].push((token * k + rank) as u32);
            }
        }
        Self { experts, assignments, k }
    }

    /// Computes some assignments of one expert. `out` is `[tokens * (k + 1), hidden]`.
    fn run(
        &self,
        lab: &mut TestCpu,
        expert: usize,
        assignments: &[u32],
        x: Region,
        tokens: usize,
        out: Region,
    ) -> bool {
        let (layer, slots, _) = &self.experts[expert];
        let groups = [ExpertGroup { expert: 0, slot: 0, first: 0, count: assignments.len() as u32 }];
        let set = ExpertSet::Loaded { groups: &groups, assignments, shared: false, per_assignment: None };
        let act = lab.buffer(tokens * (self.k + 1) * layer.row());
        let scores = lab.buffer(tokens);
        let buffers = MoeBuffers { out, act, ..MoeBuffers::default() };
        !lab.fails(Experts { layer, slots, tokens, x, buffers: MoeBuffers { scores, ..buffers }, experts: set })
    }

    /// Computes all assignments of all experts.
    fn all(&self, lab: &mut TestCpu, x: Region, tokens: usize) -> Vec<f32> {
        let out = lab.buffer(tokens * (self.k + 1) * Self::HIDDEN);
        for (expert, assignments) in self.assignments.iter().enumerate() {
            assert!(self.run(lab, expert, assignments, x, tokens, out));
        }
        lab.read(out.floats(tokens * self.k * Self::HIDDEN))
    }
}

fn kinds() -> Vec<(WeightFormat, WeightFormat, usize)> {
    let affine = |bits, group| WeightFormat::Affine { bits, group, scale: Float::Bf16 };
    vec![
        (AFFINE, AFFINE, 192),
        (AFFINE, AFFINE, 192),
        (affine(3, 32), affine(8, 128), 384),
        (AFFINE, affine(5, 32), 96),
        (WeightFormat::Dense(Float::F32), AFFINE, 64),
        (AFFINE, WeightFormat::Mxfp8, 160),
        (WeightFormat::Fp8(Some(Float::Bf16)), WeightFormat::Fp8(Some(Float::F32)), 352),
    ]
}

#[test]
fn experts_match_naive_reference() {
    let mut dice = Dice(13);
    let mut lab = TestCpu::new();
    let tokens = 40;
    let k = 3;
    let hidden = Layer::HIDDEN;
    let layer = Layer::random(&mut lab, &mut dice, &kinds(), tokens, k);
    let x = lab.random(&mut dice, tokens * hidden);
    for math in [CpuArithmetic::F32, CpuArithmetic::Integer] {
        // The tolerance: a few quantization levels of each product's activations.
        let levels = |weight: &Weight| match weight.codes {
            WeightFormat::Affine { bits, group, .. } if math == CpuArithmetic::Integer => {
                4.0 / ActivationFormat::new(bits, group).levels as f32
            }
            _ => 0.0,
        };
        let out = layer.all(lab.with(3, math), x, tokens);
        lab.with(1, CpuArithmetic::F32);
        for ((_, _, [gate, up, down]), assignments) in layer.experts.iter().zip(&layer.assignments) {
            let tolerance = 1e-6 + levels(gate) + levels(up) + levels(down);
            for assignment in assignments {
                let x = x.rows(*assignment as usize / k, 1, hidden);
                let gate = lab.linear(x, 1, &[*gate]);
                let up = lab.linear(x, 1, &[*up]);
                let act: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                let act = lab.floats(&act);
                let expected = lab.linear(act, 1, &[*down]);
                let size = expected.iter().fold(0f32, |max, y| max.max(y.abs()));
                for (got, expected) in out[*assignment as usize * hidden..][..hidden].iter().zip(&expected) {
                    assert!((got - expected).abs() <= tolerance * size, "{got} {expected} of {size}");
                }
            }
        }
    }
}

#[test]
fn expert_bytes_ignore_batch_and_threads() {
    let mut dice = Dice(14);
    let mut lab = TestCpu::new();
    let tokens = 300;
    let k = 4;
    let hidden = Layer::HIDDEN;
    let layer = Layer::random(&mut lab, &mut dice, &kinds(), tokens, k);
    let x = lab.random(&mut dice, tokens * hidden);
    for math in [CpuArithmetic::Integer, CpuArithmetic::F32] {
        let expected = to_bits(layer.all(lab.with(1, math), x, tokens));
        assert!(to_bits(layer.all(lab.with(4, math), x, tokens)) == expected);
        let single = lab.buffer(tokens * (k + 1) * hidden);
        for (expert, assignments) in layer.assignments.iter().enumerate().rev() {
            for assignment in assignments.iter().step_by(7) {
                assert!(layer.run(&mut lab, expert, &[*assignment], x, tokens, single));
                let row = single.rows(*assignment as usize, 1, hidden);
                assert!(lab.bits(row) == expected[*assignment as usize * hidden..][..hidden]);
            }
        }
        for isa in Isa::all() {
            assert!(to_bits(with(isa, || layer.all(lab.with(1, math), x, tokens))) == expected, "{isa:?}");
        }
    }
}

#[test]
fn experts_refuse_invalid_assignments() {
    let mut dice = Dice(15);
    let mut lab = TestCpu::new();
    let mut layer = Layer::random(&mut lab, &mut dice, &kinds()[..1], 1, 1);
    let x = lab.random(&mut dice, Layer::HIDDEN);
    let out = lab.buffer(2 * Layer::HIDDEN);
    assert!(layer.run(&mut lab, 0, &[0], x, 1, out));
    // An assignment of another token, an assignment that does not exist, and a duplicate.
    for assignments in [&[1][..], &[2], &[0, 0]] {
        assert!(!layer.run(&mut lab, 0, assignments, x, 1, out));
    }
    layer.experts[0].0.stacks[2] = layer.experts[0].0.stacks[1].clone();
    assert!(!layer.run(&mut lab, 0, &[0], x, 1, out));
}

#[test]
fn combine_adds_in_rank_order() -> Result<(), DeviceError> {
    let mut dice = Dice(16);
    let mut lab = TestCpu::new();
    let tokens = 5;
    let k = 3;
    let hidden = 40;
    let codes = WeightFormat::Dense(Float::F32);
    let router = Weight { codes, rows: 1, cols: hidden, global_scale: 1.0, parts: Default::default() };
    let down = lab.weight(&mut dice, codes, hidden, 8);
    let shared = Some(SharedExpert { gate_up: [router; 2], down, result: router });
    let layer = &MoeWeights { k, renormalise: true, router, shared, stacks: Default::default() };
    let out = lab.random(&mut dice, tokens * (k + 1) * hidden);
    let weights = lab.random(&mut dice, tokens * (k + 1));
    let h = lab.random(&mut dice, tokens * hidden);
    let scores = lab.buffer(tokens * layer.width());
    let act = lab.buffer(tokens * (k + 1) * layer.row());
    let buffers = MoeBuffers { scores, act, out, weights, ..MoeBuffers::default() };
    let before = lab.read(h);
    let slots = &ExpertSlots::default();
    lab.with(2, CpuArithmetic::Integer).run(CombineExperts { layer, slots, tokens, buffers, per_assignment: None, h });
    let got = lab.read(h);
    let rows = lab.read(out);
    let weights = lab.read(weights);
    for token in 0..tokens {
        for col in 0..hidden {
            let add = |y: f32, assignment: usize, rank: usize| {
                weights[token * (k + 1) + rank].mul_add(rows[assignment * hidden + col], y)
            };
            let routed = (0..k).fold(0f32, |y, rank| add(y, token * k + rank, rank));
            let sum = before[token * hidden + col] + add(routed, tokens * k + token, k);
            assert_eq!(got[token * hidden + col], sum);
        }
    }
    Ok(())
}
