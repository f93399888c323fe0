//! Tensors as slices: what the CPU side of an op sees.

use candle_core::{CpuStorage, Layout, Result, bail};

/// A matrix whose rows may be wider than what is looked at: columns of a fused projection, without a copy.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    width: usize,
    count: usize,
}

impl<'a> Rows<'a> {
    /// An f32 tensor `[rows, width]` whose columns are contiguous.
    pub fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let (CpuStorage::F32(data), (count, width)) = (storage, layout.shape().dims2()?) else {
            bail!("expected an f32 matrix, got {:?}", storage_type(storage))
        };
        let &[stride, 1] = layout.stride() else { bail!("expected contiguous columns, got {layout:?}") };
        let end = layout.start_offset() + count.saturating_sub(1) * stride + width;
        match data.get(layout.start_offset()..end) {
            Some(data) => Ok(Self { data, stride, width, count }),
            None => bail!("layout {layout:?} does not fit its storage"),
        }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.stride..index * self.stride + self.width]
    }
}

fn storage_type(storage: &CpuStorage) -> candle_core::DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// The values of a contiguous f32 tensor, to be written.
pub fn contiguous_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
        bail!("expected a contiguous f32 tensor, got {layout:?}")
    };
    match values.get_mut(start..end) {
        Some(values) => Ok(values),
        None => bail!("layout {layout:?} does not fit its storage"),
    }
}
