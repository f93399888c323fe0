//! Inputs on which the GPU is compared with the CPU: a file for each operation, and one for the order of launches.

mod attention;
mod block_attention;
mod conv;
mod delta;
mod embedding;
mod experts;
mod linear;
mod ngram;
mod norm;
mod order;
mod router;
mod sample;
mod streams;

use super::KernelCheck;
use crate::device::{DeviceError, Driver};

type Cases<D> = fn(&mut KernelCheck<'_, D>) -> Result<(), DeviceError>;

/// The parts of the check, by name.
pub fn parts<D: Driver>() -> [(&'static str, Cases<D>); 13] {
    [
        ("products", linear::cases),
        ("norm", norm::cases),
        ("embedding", embedding::cases),
        ("delta rule", conv::cases),
        ("delta net", delta::cases),
        ("attention", attention::cases),
        ("attention to blocks", block_attention::cases),
        ("router", router::cases),
        ("experts", experts::cases),
        ("residual streams", streams::cases),
        ("n-gram rows", ngram::cases),
        ("choice of a token", sample::cases),
        ("order and memory", order::cases),
    ]
}
