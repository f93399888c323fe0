//! Measures how fast this machine computes a model's feed-forward in decoding. Uses the model's kernels on synthetic
//! weights.

use crate::error::ModelError;
use moestro_base::error::StoreError;
use moestro_compute::{
    device::{CpuDevice, Region, Slab},
    ops::{
        Backend, Cpu, ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, Float, Linear, MoeBuffers, MoeWeights,
        ReservedBuffer, Weight, WeightFormat,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// The encoding and shape of one projection.
#[derive(Debug, Clone, Copy)]
pub struct ProjectionShape {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
}

impl ProjectionShape {
    pub fn of(weight: &Weight) -> Self {
        Self { codes: weight.codes, rows: weight.rows, cols: weight.cols }
    }

    pub fn of_stack(stack: &ExpertStack) -> Self {
        Self { codes: stack.codes, rows: stack.rows, cols: stack.cols }
    }

    /// Number of bytes of the codes, of the scales and of the biases.
    fn parts(&self) -> [usize; 3] {
        self.codes.part_bytes(self.rows, self.cols)
    }

    /// A stack of one expert whose bytes start at `at`. Sets `at` to the end of these bytes.
    fn stack(&self, at: &mut usize) -> ExpertStack {
        let at = self.parts().map(|len| std::mem::replace(at, *at + len));
        ExpertStack { codes: self.codes, rows: self.rows, cols: self.cols, global_scales: vec![1.0], at: vec![at] }
    }
}

/// Number of bytes of gate, up and down together.
pub fn bytes(kinds: &[ProjectionShape; 3]) -> usize {
    kinds.iter().flat_map(ProjectionShape::parts).sum()
}

/// A byte that gives ordinary small scales in every encoding.
const FILL: u8 = 0x3c;

/// Measures the bytes of weights per second that one token's feed-forward reads, with `at_once` experts (gate, up, down
/// of `kinds`) per call. The calls cycle through `memory` bytes, which should exceed the CPU's caches. Runs for about
/// `budget`.
pub fn decode_rate(
    kinds: &[ProjectionShape; 3],
    at_once: usize,
    compute: &CpuDevice,
    memory: usize,
    budget: Duration,
) -> Result<f64, ModelError> {
    let size = bytes(kinds).max(1);
    let at_once = at_once.max(1);
    let calls = (memory / size / at_once).max(1);
    let len = calls * at_once * size;
    let mut slab =
        Slab::new(len).map_err(|error| StoreError::Memory(format!("cannot measure the kernels: {error}")))?;
    compute.threads.run_pieces(slab.as_mut_slice(), 1 << 20, &|_, piece| piece.fill(FILL));
    let slab = Arc::new(slab);

    let hidden = kinds[0].cols;
    let mut at = 0;
    let stacks = kinds.each_ref().map(|kind| kind.stack(&mut at));
    let router = Weight {
        codes: WeightFormat::Dense(Float::F32),
        rows: 0,
        cols: hidden,
        global_scale: 1.0,
        parts: Default::default(),
    };
    let layer = MoeWeights { k: at_once, renormalise: true, router, shared: None, stacks };
    let mut cpu = Cpu::new(compute.clone());
    let (segments, table) = cpu.adopt_segments(ReservedBuffer::ExpertTable, &slab, std::slice::from_ref(&(0..len)))?;
    let slots = ExpertSlots { segments, table, per_segment: usize::MAX, stride: size };
    let x = cpu.allocate(hidden * 4)?;
    let out = cpu.allocate((at_once + 1) * hidden * 4)?;
    let values: Vec<f32> = (0..hidden).map(|index| index as f32 / hidden as f32 - 0.5).collect();
    cpu.write(x, bytemuck::cast_slice(&values))?;
    let act = cpu.allocate((at_once + 1) * layer.row() * 4)?;
    let scores = Region::default();
    let buffers = MoeBuffers { act, out, scores, ..MoeBuffers::default() };
    let assignments: Vec<u32> = (0..at_once as u32).collect();
    let mut done = 0;
    let begin = Instant::now();
    while done < 2 || begin.elapsed() < budget {
        let first = (done % calls * at_once) as u32;
        let group = |index: u32| ExpertGroup { expert: 0, slot: first + index, first: index, count: 1 };
        let groups: Vec<_> = assignments.iter().map(|index| group(*index)).collect();
        let set = ExpertSet::Loaded { groups: &groups, assignments: &assignments, shared: false, per_assignment: None };
        cpu.execute(&Experts { layer: &layer, slots: &slots, tokens: 1, x, buffers, experts: set }.into())?;
        done += 1;
    }
    Ok((done * at_once * size) as f64 / begin.elapsed().as_secs_f64())
}

/// Number of columns of the matrix of [`matrix_rate`].
const COLS: usize = 2048;
/// Number of products between two waits for a GPU.
const PRODUCTS: usize = 8;

/// Measures the bytes of weights per second of a matrix-vector product with a large 4-bit matrix, like a model's output
/// head. Runs for about `budget` and uses `memory` bytes.
pub fn matrix_rate(backend: &mut dyn Backend, memory: usize, budget: Duration) -> Result<f64, ModelError> {
    let codes = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let row: usize = codes.row_bytes(COLS).iter().sum();
    let rows = (memory.min(backend.max_buffer_len()) / row / 16 * 16).max(16);
    let mut slab =
        Slab::new(rows * row).map_err(|error| StoreError::Memory(format!("cannot measure the matrix: {error}")))?;
    slab.as_mut_slice().fill(FILL);
    let bytes = backend.adopt(&Arc::new(slab), 0..rows * row)?;
    backend.mark_loaded(bytes, 0)?;
    let mut at = 0;
    let parts = codes.row_bytes(COLS).map(|len| {
        at += len * rows;
        bytes.part(at - len * rows, len * rows)
    });
    let matrices = [Weight { codes, rows, cols: COLS, global_scale: 1.0, parts }];
    let x = backend.allocate(COLS * 4)?;
    let y = backend.allocate(rows * 4)?;
    let product = Linear { x, tokens: 1, norm: None, matrices: &matrices, y, add: false };
    let mut run = || -> Result<(), ModelError> {
        (0..PRODUCTS).try_for_each(|_| backend.execute(&product.into()))?;
        let end = backend.sync_point();
        Ok(backend.wait_for(end)?)
    };
    run()?;
    let mut runs = 0;
    let begin = Instant::now();
    while runs == 0 || begin.elapsed() < budget {
        run()?;
        runs += 1;
    }
    Ok((runs * PRODUCTS * rows * row) as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_compute::device::CpuArithmetic;

    #[test]
    fn matrix_rate_is_plausible() {
        let mut cpu = Cpu::new(CpuDevice::new(2, CpuArithmetic::Integer));
        let rate = matrix_rate(&mut cpu, 1 << 20, Duration::from_millis(5)).unwrap();
        assert!(rate > 1e6 && rate < 1e13, "{rate}");
    }

    #[test]
    fn decode_rate_covers_every_encoding() {
        let affine = |bits, group| WeightFormat::Affine { bits, group, scale: Float::Bf16 };
        for codes in
            [affine(4, 64), affine(8, 32), WeightFormat::Mxfp4, WeightFormat::Nvfp4, WeightFormat::Dense(Float::Bf16)]
        {
            let kind = |rows, cols| ProjectionShape { codes, rows, cols };
            let kinds = [kind(64, 128), kind(64, 128), kind(128, 64)];
            let compute = CpuDevice::new(2, CpuArithmetic::Integer);
            let rate = decode_rate(&kinds, 3, &compute, 1 << 20, Duration::from_millis(5)).unwrap();
            assert!(rate > 1e6 && rate < 1e13, "{codes:?}: {rate}");
        }
    }
}
