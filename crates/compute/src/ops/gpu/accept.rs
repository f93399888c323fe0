//! Which weights the GPU's kernels support.

use crate::{
    device::DeviceError,
    ops::{MoeWeights, WeightFormat, cpu::refuse},
};

/// Kernels load 16 bytes at a time.
pub const ALIGN: usize = 16;

/// Returns an error if the kernels cannot read rows of `cols` values in this format.
pub fn accept_format(codes: WeightFormat, cols: usize) -> Result<(), DeviceError> {
    match codes {
        WeightFormat::Fp8(None) => refuse("GPU kernels need FP8 weights with scales".into()),
        WeightFormat::Fp8(_) if !cols.is_multiple_of(16) => {
            refuse(format!("GPU kernels need FP8 rows that are multiples of 16, not {cols}"))
        }
        _ => Ok(()),
    }
}

/// Returns an error if the kernels cannot compute these experts.
pub fn accept_moe(layer: &MoeWeights) -> Result<(), DeviceError> {
    let experts = layer.router.rows;
    let k = layer.k;
    if experts > 1024 || k > 31 {
        return refuse(format!(
            "GPU kernels support at most 1024 experts per layer and 31 per token, not {experts} and {k}"
        ));
    }
    for stack in &layer.stacks {
        accept_format(stack.codes, stack.cols)?;
        let is_uniform = stack.at.windows(2).all(|pair| pair[0] == pair[1]);
        if !is_uniform || stack.at.iter().flatten().any(|at| at % ALIGN != 0) {
            let how = "run `moestro pack`, or on Linux use --expert-io buffered";
            return refuse(format!(
                "GPU kernels need the same layout in every slot, which this checkpoint does not give: {how}"
            ));
        }
        if stack.global_scales.windows(2).any(|pair| pair[0] != pair[1]) {
            return refuse("GPU kernels need one global scale for all experts of a layer".into());
        }
        if stack.cols % 16 != 0 {
            return refuse(format!("GPU kernels need expert rows that are multiples of 16, not {}", stack.cols));
        }
    }
    Ok(())
}
