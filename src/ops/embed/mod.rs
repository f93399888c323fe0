//! Rows of an embedding table, dequantised as they are gathered.

mod cases;

pub(super) use cases::cases;

use super::{
    Float, Weight,
    cpu::{Cpu, refuse},
    simd::unpack,
};
use crate::device::{Binding, DeviceError, Dispatch, Effect, Region};
use std::cell::RefCell;

/// `into[t] = table[ids[t]]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed<'a> {
    /// `[vocab, hidden]`.
    pub table: &'a Weight,
    pub tokens: usize,
    /// `[tokens]` u32.
    pub ids: Region,
    /// `[tokens, hidden]` f32.
    pub into: Region,
}

thread_local! {
    /// A row's codes, and its values.
    static SCRATCH: RefCell<(Vec<u8>, Vec<f32>)> = RefCell::default();
}

impl Embed<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, Effect)) {
        see(self.ids.floats(self.tokens), Effect::Read);
        see(self.into.floats(self.tokens * self.table.cols), Effect::Write);
    }

    pub(super) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (view, cols) = (cpu.memory.view(self.table), self.table.cols);
        let ids = cpu.memory.words(self.ids.floats(self.tokens));
        let into = cpu.memory.floats_mut(self.into.floats(self.tokens * cols));
        if let Some(id) = ids.iter().find(|id| **id as usize >= view.rows) {
            return refuse(format!("token {id} of {}", view.rows));
        }
        cpu.compute.threads.run_pieces(into, cols, &|token, row| {
            SCRATCH.with_borrow_mut(|(codes, values)| {
                unpack::expand(&view, ids[token] as usize, codes, values);
                for (row, value) in row.iter_mut().zip(values) {
                    *row = *value * view.gain;
                }
            });
        });
        Ok(())
    }

    /// `kernels/weights.metal`. An id past the end takes the last row.
    pub fn dispatch(&self) -> Dispatch {
        let Self { table, tokens, ids, into } = *self;
        let mut args = vec![table.cols as u32, 0];
        args.extend(table.words());
        let mut bindings = vec![Binding::read(ids.floats(tokens))];
        bindings.extend(table.bindings());
        bindings.push(Binding::write(into.floats(tokens * table.cols)));
        let grid = [table.cols.div_ceil(512) as u32, tokens as u32, 1];
        Dispatch { kernel: "embed", args, bindings, grid, threads: 32 }
    }
}

/// The whole matrix as f16 or f32 values, for a matrix product: `kernels/weights.metal`. Panics for bf16.
pub fn dequantise(weight: &Weight, float: Float, out: Region) -> Dispatch {
    assert!(float != Float::Bf16, "weights are expanded to f16 or f32");
    let mut args = vec![weight.cols as u32, if float == Float::F32 { 0 } else { 1 }];
    args.extend(weight.words());
    let mut bindings = weight.bindings().to_vec();
    bindings.push(Binding::write(out.first(weight.rows * weight.cols * float.bytes())));
    let grid = [weight.cols.div_ceil(512) as u32, weight.rows as u32, 1];
    Dispatch { kernel: "dequantise", args, bindings, grid, threads: 32 }
}
