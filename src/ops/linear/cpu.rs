//! Linear layers on the CPU.

use super::{
    Linear,
    matmul::{Column, check, normed, product},
};
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        simd::Out,
    },
};

impl Linear<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (tokens, cols, width) = (self.tokens, self.cols(), self.width());
        let Cpu { compute, memory, quantised, scratch } = cpu;
        let mut columns = [Column::default(); 4];
        let Some(columns) = columns.get_mut(..self.matrices.len()) else {
            return refuse(format!("{} matrices at once", self.matrices.len()));
        };
        let mut at = 0;
        for (column, matrix) in columns.iter_mut().zip(self.matrices) {
            *column = Column { weight: memory.view(matrix), at };
            check(&column.weight, cols)?;
            at += matrix.rows;
        }
        let columns = &*columns;
        let (x, key) = normed(compute, memory, self.x, tokens, cols, self.norm, &mut scratch.normed);
        quantised.fill(compute, key, x, tokens, cols, columns.iter().map(|column| column.weight.codes));
        let y = memory.floats_mut(self.y.floats(tokens * width));
        if !self.add {
            product(compute, quantised, x, cols, columns, y, width, None);
            return Ok(());
        }
        scratch.product.resize((tokens * width).max(scratch.product.len()), 0.0);
        let result = &mut scratch.product[..tokens * width];
        product(compute, quantised, x, cols, columns, result, width, Some(Out(y.as_mut_ptr())));
        Ok(())
    }
}
