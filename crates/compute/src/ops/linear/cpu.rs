//! Linear layers on the CPU.

use super::{
    Linear,
    matmul::{OutputColumns, check, normed, product},
};
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        simd::OutPtr,
    },
};

impl Linear<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens;
        let cols = self.cols();
        let width = self.width();
        let Cpu { compute, memory, quantized, scratch } = cpu;
        let mut columns = [OutputColumns::default(); 4];
        let Some(columns) = columns.get_mut(..self.matrices.len()) else {
            return refuse(format!("a linear layer has at most 4 matrices, not {}", self.matrices.len()));
        };
        let mut at = 0;
        for (column, matrix) in columns.iter_mut().zip(self.matrices) {
            *column = OutputColumns { weight: memory.view(matrix), at };
            check(&column.weight, cols)?;
            at += matrix.rows;
        }
        let columns = &*columns;
        let (x, key) = normed(compute, memory, self.x, tokens, cols, self.norm, &mut scratch.normed);
        quantized.fill(compute, key, x, tokens, cols, columns.iter().map(|column| column.weight.codes));
        let y = memory.floats_mut(self.y.floats(tokens * width));
        if !self.add {
            product(compute, quantized, x, cols, columns, y, width, None);
            return Ok(());
        }
        scratch.product.resize((tokens * width).max(scratch.product.len()), 0.0);
        let result = &mut scratch.product[..tokens * width];
        product(compute, quantized, x, cols, columns, result, width, Some(OutPtr(y.as_mut_ptr())));
        Ok(())
    }
}
