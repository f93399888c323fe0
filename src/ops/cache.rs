//! Where full attention keeps its keys and values: `[KV, N, row]`, one row a position.
//!
//! With [`Math::F32`] a row is its D values. With [`Math::Integer`] it is D integers and then an f32 (as two more, low
//! half first): the row's largest magnitude over 32639, times which an integer is the value. That is half the bytes,
//! which is what decoding over a long context costs, and an error of at most 2e-5 of the row's largest value: less
//! than bf16's of each.

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, bail};

use super::{
    norm::normalise,
    quant,
    rope::{HeadNorm, Rotation},
    simd::Vector,
    view::Rows,
};
use crate::device::Math;

/// A row as 16-bit integers, in the order of its values.
const FORMAT: quant::Format = quant::Format { group: 1, order: quant::Order::Natural, levels: 32_639 };

/// Type and width of a cache's row for heads of `dim` values.
pub fn cache_row(math: Math, dim: usize) -> (DType, usize) {
    match math {
        Math::F32 => (DType::F32, dim),
        Math::Integer => (DType::I16, dim + 2),
    }
}

/// A kind of value that a cache holds.
pub(super) trait Cached: Copy + Default + Sync + 'static {
    /// Values of a row that are not its contents.
    const TAIL: usize;

    fn slice(storage: &CpuStorage) -> Option<&[Self]>;

    fn load<V: Vector>(x: &[Self; 16]) -> V;

    /// What the loaded values of `row` are to be multiplied by.
    fn scale(row: &[Self]) -> f32;

    /// The contents of a row.
    #[inline(always)]
    fn values(row: &[Self]) -> &[Self] {
        &row[..row.len() - Self::TAIL]
    }
}

impl Cached for f32 {
    const TAIL: usize = 0;

    fn slice(storage: &CpuStorage) -> Option<&[f32]> {
        if let CpuStorage::F32(values) = storage { Some(values) } else { None }
    }

    #[inline(always)]
    fn load<V: Vector>(x: &[f32; 16]) -> V {
        V::load(x)
    }

    #[inline(always)]
    fn scale(_: &[f32]) -> f32 {
        1.0
    }
}

impl Cached for i16 {
    const TAIL: usize = 2;

    fn slice(storage: &CpuStorage) -> Option<&[i16]> {
        if let CpuStorage::I16(values) = storage { Some(values) } else { None }
    }

    #[inline(always)]
    fn load<V: Vector>(x: &[i16; 16]) -> V {
        V::widen(x)
    }

    #[inline(always)]
    fn scale(row: &[i16]) -> f32 {
        let bits = |back: usize| u32::from(row[row.len() - back] as u16);
        f32::from_bits(bits(2) | bits(1) << 16)
    }
}

/// A cache of keys or values, as a slice.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a, T> {
    data: &'a [T],
    width: usize,
    /// Key and value heads.
    pub count: usize,
    /// Positions.
    pub room: usize,
}

impl<'a, T: Cached> Heads<'a, T> {
    /// A contiguous cache of rows with `dim` values.
    pub fn new(storage: &'a CpuStorage, layout: &Layout, dim: usize) -> Result<Self> {
        let (count, room, width) = layout.shape().dims3()?;
        let range = layout.contiguous_offsets();
        let data = T::slice(storage).zip(range).and_then(|(data, (start, end))| data.get(start..end));
        match data {
            Some(data) if width == dim + T::TAIL => Ok(Self { data, width, count, room }),
            _ => bail!("a cache {:?} for heads of {dim}", layout.shape()),
        }
    }

    /// The rows of positions `first..first + count`.
    #[inline(always)]
    pub fn rows(&self, head: usize, first: usize, count: usize) -> CachedRows<'a, T> {
        let start = (head * self.room + first) * self.width;
        CachedRows { data: &self.data[start..start + count * self.width], width: self.width }
    }

    #[inline(always)]
    pub fn row(&self, head: usize, position: usize) -> &'a [T] {
        &self.data[(head * self.room + position) * self.width..][..self.width]
    }
}

/// Rows of one head that follow each other.
#[derive(Clone, Copy)]
pub(super) struct CachedRows<'a, T> {
    data: &'a [T],
    /// Values of a row, those included that are not its contents.
    pub width: usize,
}

impl<'a, T: Cached> CachedRows<'a, T> {
    #[inline(always)]
    pub fn iter(&self) -> impl Iterator<Item = &'a [T]> {
        self.data.chunks_exact(self.width)
    }
}

/// Writes rows `[T, KV * D]` to positions `at..at + T` of a cache; keys (which have a norm) are normed and turned first.
pub fn remember(cache: &Tensor, rows: &Tensor, at: usize, key: Option<(HeadNorm<'_>, &Rotation)>) -> Result<()> {
    cache.inplace_op2(rows, &Remember { at, key })
}

struct Remember<'a> {
    at: usize,
    key: Option<(HeadNorm<'a>, &'a Rotation)>,
}

impl InplaceOp2 for Remember<'_> {
    fn name(&self) -> &'static str {
        "remember"
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, to: &Layout, rows: &CpuStorage, from: &Layout) -> Result<()> {
        let (heads, room, width) = to.shape().dims3()?;
        let rows = Rows::new(rows, from)?;
        let Some((start, end)) = to.contiguous_offsets() else { bail!("remember: the cache is not contiguous") };
        let tail = if matches!(cache, CpuStorage::I16(_)) { i16::TAIL } else { f32::TAIL };
        let dim = width.saturating_sub(tail);
        if rows.width() != heads * dim || self.at + rows.count() > room {
            bail!("remember: {} rows of {} at {} of [{heads}, {room}, {dim}]", rows.count(), rows.width(), self.at)
        }
        let (mut row, mut wide) = (vec![0f32; dim], vec![0i32; dim]);
        for token in 0..rows.count() {
            for (head, x) in rows.row(token).chunks_exact(dim.max(1)).enumerate() {
                match self.key {
                    None => row.copy_from_slice(x),
                    Some((norm, rotation)) => {
                        normalise(x, norm.weight, norm.eps, &mut row);
                        rotation.turn(token, &mut row);
                    }
                }
                let at = start + (head * room + self.at + token) * width;
                match cache {
                    CpuStorage::F32(cache) if at + width <= end => cache[at..at + width].copy_from_slice(&row),
                    CpuStorage::I16(cache) if at + width <= end => {
                        let (values, scale) = cache[at..at + width].split_at_mut(dim);
                        let (factor, _) = quant::quantise(&row, &mut wide, FORMAT);
                        for (value, wide) in values.iter_mut().zip(&wide) {
                            *value = *wide as i16;
                        }
                        scale.copy_from_slice(&[factor.to_bits() as i16, (factor.to_bits() >> 16) as i16]);
                    }
                    _ => bail!("remember: a cache of {:?} with {end} values", to.shape()),
                }
            }
        }
        Ok(())
    }
}
