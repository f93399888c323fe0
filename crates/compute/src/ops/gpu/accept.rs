//! Which weights the GPU's kernels support.

use crate::{
    device::DeviceError,
    ops::{ModelPart, MoeWeights, WeightFormat, cpu::refuse},
};

/// Kernels load 16 bytes at a time.
const ALIGN: usize = 16;

/// Returns an error if the kernels cannot compute this part of a model.
pub(super) fn accept_part(part: ModelPart<'_>) -> Result<(), DeviceError> {
    match part {
        ModelPart::Weight(weight) => match weight.parts.iter().find(|part| part.offset % ALIGN != 0) {
            Some(part) => refuse(format!(
                "GPU kernels need matrices at multiples of 16 bytes, but one is at byte {} of the trunk",
                part.offset
            )),
            None => accept_format(weight.codes, weight.cols),
        },
        ModelPart::Attention(shape) if shape.dim > 256 || shape.dim % 4 != 0 || shape.heads > 32 * shape.kv_heads => {
            refuse(format!(
                "GPU kernels need heads that are multiples of 4, at most 256, and at most 32 per key head, not {shape:?}"
            ))
        }
        ModelPart::Delta(shape) if shape.conv_width != 4 || shape.key_dim.max(shape.value_dim) > 256 => {
            refuse(format!("GPU kernels need a convolution of width 4 and heads of at most 256, not {shape:?}"))
        }
        ModelPart::Indexer(shape) if shape.dim > 256 || shape.dim % 4 != 0 => {
            let dim = shape.dim;
            refuse(format!("GPU kernels need indexer heads that are multiples of 4, at most 256, not {dim}"))
        }
        ModelPart::Attention(shape) => shape.divisible(),
        ModelPart::Indexer(_) | ModelPart::Delta(_) => Ok(()),
        ModelPart::Moe(layer) => accept_moe(layer),
    }
}

/// Returns an error if the kernels cannot read rows of `cols` values in this format.
fn accept_format(codes: WeightFormat, cols: usize) -> Result<(), DeviceError> {
    match codes {
        WeightFormat::Fp8(None) => refuse("GPU kernels need FP8 weights with scales".into()),
        WeightFormat::Fp8(_) if !cols.is_multiple_of(16) => {
            refuse(format!("GPU kernels need FP8 rows that are multiples of 16, not {cols}"))
        }
        _ => Ok(()),
    }
}

/// Returns an error if the kernels cannot compute these experts.
fn accept_moe(layer: &MoeWeights) -> Result<(), DeviceError> {
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
