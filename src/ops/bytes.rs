//! Tensors of a state as bytes, and back: what a snapshot holds. Little-endian, on every machine the order in memory.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Appends the values `range` of a contiguous f32 or i16 tensor.
pub fn read(tensor: &Tensor, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("a state that is not contiguous, or not on the CPU: {layout:?}")
    };
    if range.end > end - start {
        bail!("{range:?} of a state of {} values", end - start)
    }
    let range = start + range.start..start + range.end;
    match storage {
        CpuStorage::F32(values) => append(&values[range], f32::to_le_bytes, out),
        CpuStorage::I16(values) => append(&values[range], i16::to_le_bytes, out),
        _ => bail!("a state of {:?}", tensor.dtype()),
    }
    Ok(())
}

fn append<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + values.len() * N, 0);
    for (bytes, value) in out[start..].as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *bytes = to(*value);
    }
}

/// Overwrites the values of a contiguous f32 or i16 tensor from the `first` on.
pub fn write(tensor: &Tensor, first: usize, bytes: &[u8]) -> Result<()> {
    tensor.inplace_op1(&Write { first, bytes })
}

struct Write<'a> {
    first: usize,
    bytes: &'a [u8],
}

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "write-bytes"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a state that is not contiguous: {layout:?}")
        };
        match storage {
            CpuStorage::F32(values) => overwrite(&mut values[start..end], self.first, self.bytes, f32::from_le_bytes),
            CpuStorage::I16(values) => overwrite(&mut values[start..end], self.first, self.bytes, i16::from_le_bytes),
            _ => bail!("a state that is neither f32 nor i16"),
        }
    }
}

fn overwrite<T, const N: usize>(
    values: &mut [T],
    first: usize,
    bytes: &[u8],
    from: impl Fn([u8; N]) -> T,
) -> Result<()> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    let (true, Some(values)) = (rest.is_empty(), values.get_mut(first..first + chunks.len())) else {
        bail!("{} bytes at value {first} of {}", bytes.len(), values.len())
    };
    for (value, bytes) in values.iter_mut().zip(chunks) {
        *value = from(*bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn bytes_come_back_as_they_went() -> Result<()> {
        let floats = Tensor::from_vec(vec![1f32, -0.0, f32::NAN, 4.5], (2, 2), &Device::Cpu)?;
        let mut bytes = Vec::new();
        read(&floats, 1..4, &mut bytes)?;
        assert_eq!(bytes.len(), 12);
        let other = Tensor::zeros((2, 2), candle_core::DType::F32, &Device::Cpu)?;
        write(&other, 1, &bytes)?;
        let bits = |t: &Tensor| {
            Ok::<_, candle_core::Error>(
                t.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect::<Vec<_>>(),
            )
        };
        assert_eq!(bits(&other)?[1..], bits(&floats)?[1..]);

        let words = Tensor::from_vec(vec![-3i16, 7, 300], 3, &Device::Cpu)?;
        let mut bytes = Vec::new();
        read(&words, 0..3, &mut bytes)?;
        assert_eq!(bytes, [253, 255, 7, 0, 44, 1]);
        assert!(read(&words, 1..4, &mut bytes).is_err());
        assert!(write(&words, 2, &bytes).is_err());
        assert!(write(&words, 0, &bytes[..3]).is_err());
        Ok(())
    }
}
