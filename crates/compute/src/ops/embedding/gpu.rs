//! Embedding rows on a GPU.

use super::Embedding;
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{Float, Weight},
};

impl Embedding<'_> {
    /// A launch of `embed`. An id past the end selects the last row.
    pub fn launch(&self) -> Launch {
        let Self { table, tokens, ids, into } = *self;
        let mut args = vec![table.cols as u32, 0];
        args.extend(table.words());
        let mut bindings = vec![Binding::read(ids.floats(tokens))];
        bindings.extend(table.bindings());
        bindings.push(Binding::write(into.floats(tokens * table.cols)));
        let grid = [table.cols.div_ceil(512) as u32, tokens as u32, 1];
        Launch { kernel: "embed", args, bindings, grid, threads: 32, skip: SkipUse::None }
    }
}

/// Dequantizes a whole matrix to f16 or f32 for a matrix product. Panics for bf16.
pub fn dequantize(weight: &Weight, float: Float, out: Region) -> Launch {
    assert!(float != Float::Bf16, "weights are expanded to f16 or f32");
    let mut args = vec![weight.cols as u32, if float == Float::F32 { 0 } else { 1 }];
    args.extend(weight.words());
    let mut bindings = weight.bindings().to_vec();
    bindings.push(Binding::write(out.first(weight.rows * weight.cols * float.bytes())));
    let grid = [weight.cols.div_ceil(512) as u32, weight.rows as u32, 1];
    Launch { kernel: "dequantize", args, bindings, grid, threads: 32, skip: SkipUse::None }
}
