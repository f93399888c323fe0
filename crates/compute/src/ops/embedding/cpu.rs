//! Embedding rows on the CPU.

use super::Embedding;
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        quant::unpack,
    },
};
use std::cell::RefCell;

thread_local! {
    /// The codes of one row, and its values.
    static SCRATCH: RefCell<(Vec<u8>, Vec<f32>)> = RefCell::default();
}

impl Embedding<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let view = cpu.memory.view(self.table);
        let cols = self.table.cols;
        let ids = cpu.memory.words(self.ids.floats(self.tokens));
        let into = cpu.memory.floats_mut(self.into.floats(self.tokens * cols));
        if let Some(id) = ids.iter().find(|id| **id as usize >= view.rows) {
            return refuse(format!("token id {id} is outside the vocabulary of {}", view.rows));
        }
        cpu.compute.threads.run_pieces(into, cols, &|token, row| {
            SCRATCH.with_borrow_mut(|(codes, values)| {
                unpack::expand(&view, ids[token] as usize, codes, values);
                for (row, value) in row.iter_mut().zip(values) {
                    *row = *value * view.global_scale;
                }
            });
        });
        Ok(())
    }
}
