//! How fast this machine computes a model's feed-forward, measured with the model's own kernels on bytes of no meaning.

use crate::{
    device::{Compute, Filling},
    error::{ModelError, StoreError},
    ops::{self, Assignment, Codes, ExpertView, Job, WeightView},
};
use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};

/// How one projection is stored.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub codes: Codes,
    pub rows: usize,
    pub cols: usize,
}

impl Kind {
    /// Bytes of codes, scales and biases.
    fn parts(&self) -> [usize; 3] {
        self.codes.row_bytes(self.cols).map(|bytes| bytes * self.rows)
    }

    fn view<'a>(&self, bytes: &mut &'a [u8]) -> WeightView<'a> {
        let parts = self.parts().map(|len| {
            let (part, rest) = bytes.split_at(len.min(bytes.len()));
            *bytes = rest;
            part
        });
        WeightView { codes: self.codes, rows: self.rows, cols: self.cols, gain: 1.0, parts }
    }
}

/// Bytes of gate, up and down together.
pub fn bytes(kinds: &[Kind; 3]) -> usize {
    kinds.iter().flat_map(Kind::parts).sum()
}

/// Makes every scale of every encoding an ordinary small number.
const FILL: u8 = 0x3c;

/// Bytes of weights a second that one token's feed-forward goes through, `at_once` experts (gate, up, down of `kinds`) a
/// call, always others: `room` bytes in turn, which should be more than the caches hold. Takes about `budget`.
pub fn decode_rate(
    kinds: &[Kind; 3],
    at_once: usize,
    compute: &Compute,
    room: usize,
    budget: Duration,
) -> Result<f64, ModelError> {
    let (size, at_once) = (bytes(kinds).max(1), at_once.max(1));
    let calls = (room / size / at_once).max(1);
    let len = calls * at_once * size;
    let span = Filling::new(len).and_then(|mut slab| {
        slab.fill(len, 1, |bytes| {
            compute.threads.run_pieces(bytes, 1 << 20, &|_, piece| piece.fill(FILL));
            Ok(())
        })
    });
    let span = span.map_err(|error| StoreError::Other(format!("measuring the kernels: {error}")))?;
    let weights = span.bytes();

    let hidden = kinds[0].cols;
    let x =
        Tensor::arange(0f32, hidden as f32, &Device::Cpu)?.affine(1.0 / hidden as f64, -0.5)?.reshape((1, hidden))?;
    let out = Tensor::zeros((at_once, hidden), DType::F32, &Device::Cpu)?;
    let places: Vec<_> = (0..at_once as u32).map(|place| [Assignment { token: 0, place }]).collect();
    let (mut done, begin) = (0, Instant::now());
    while done < 2 || begin.elapsed() < budget {
        let first = done % calls * at_once * size;
        let jobs = places.iter().enumerate().map(|(index, rows)| {
            let mut bytes = weights.get(first + index * size..).unwrap_or_default();
            let [gate, up, down] = kinds.map(|kind| kind.view(&mut bytes));
            Job { expert: ExpertView { gate, up, down }, rows }
        });
        ops::experts(compute, &x, &jobs.collect::<Vec<_>>(), &out)?;
        done += 1;
    }
    Ok((done * at_once * size) as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::Math, ops::Float};

    #[test]
    fn every_encoding_is_measured() {
        let affine = |bits, group| Codes::Affine { bits, group, scale: Float::Bf16 };
        for codes in [affine(4, 64), affine(8, 32), Codes::Mxfp4, Codes::Nvfp4, Codes::Dense(Float::Bf16)] {
            let kind = |rows, cols| Kind { codes, rows, cols };
            let kinds = [kind(64, 128), kind(64, 128), kind(128, 64)];
            let compute = Compute::cpu(2, Math::Integer);
            let rate = decode_rate(&kinds, 3, &compute, 1 << 20, Duration::from_millis(5)).unwrap();
            assert!(rate > 1e6 && rate < 1e13, "{codes:?}: {rate}");
        }
    }
}
