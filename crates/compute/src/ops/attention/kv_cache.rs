//! Rows of the KV cache, one for each position, in pages `[kv_heads, PAGE, row]` or a ring `[kv_heads, capacity, row]`.
//!
//! An f32 row is its `dim` values. An i16 row is `dim` integers and one f32 scale, stored as two i16, low half first.
//! The scale is the row's largest magnitude divided by 32639. An i16 row has half the bytes of an f32 row. At long
//! contexts, decoding spends most of its time reading the cache. The error of a value is at most 2e-5 of the row's
//! largest value, less than that of bf16.

use super::{AttentionShape, KvFormat, KvWrite, MAX_HEAD_DIM, PAGE, RECENT, kv_quant};
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        norm::normalise,
        quant,
        simd::Vector,
    },
};

/// A row as 16-bit integers in natural order.
const FORMAT: quant::ActivationFormat =
    quant::ActivationFormat { group: 1, order: quant::ValueOrder::Natural, levels: 32_639 };

/// An element type of cached rows.
pub(in crate::ops) trait KvElement: Copy + Default + Sync + bytemuck::Pod {
    /// Number of elements at the end of a row that hold its scale.
    const SCALE_ELEMENTS: usize;

    fn load<V: Vector>(x: &[Self; 16]) -> V;

    /// The factor that all values of `row` are multiplied by.
    fn scale(row: &[Self]) -> f32;

    /// The values of a row without its scale.
    #[inline(always)]
    fn values(row: &[Self]) -> &[Self] {
        &row[..row.len() - Self::SCALE_ELEMENTS]
    }
}

impl KvElement for f32 {
    const SCALE_ELEMENTS: usize = 0;

    #[inline(always)]
    fn load<V: Vector>(x: &[f32; 16]) -> V {
        V::load(x)
    }

    #[inline(always)]
    fn scale(_: &[f32]) -> f32 {
        1.0
    }
}

impl KvElement for i16 {
    const SCALE_ELEMENTS: usize = 2;

    #[inline(always)]
    fn load<V: Vector>(x: &[i16; 16]) -> V {
        V::from_i16(x)
    }

    #[inline(always)]
    fn scale(row: &[i16]) -> f32 {
        let bits = |back: usize| u32::from(row[row.len() - back] as u16);
        f32::from_bits(bits(2) | bits(1) << 16)
    }
}

/// Cached keys or values of the page that contains one position, or of the ring.
#[derive(Clone, Copy)]
pub(in crate::ops) struct KvView<'a, T> {
    data: &'a [T],
    /// The next page, to prefetch.
    next: &'a [T],
    width: usize,
    /// Number of positions in `data`.
    pub capacity: usize,
    /// Position of the first row, a multiple of `capacity`.
    first: usize,
}

impl<'a, T: KvElement> KvView<'a, T> {
    /// Views the cache at `position`: a ring `[count, capacity, row]`, or the pages `[count, PAGE, row]` that `table`
    /// lists in order. Rows have `dim` values.
    #[inline(always)]
    pub fn at(bytes: &'a [u8], table: Option<&[u32]>, [count, capacity, dim]: [usize; 3], position: usize) -> Self {
        let data = bytemuck::cast_slice(bytes);
        let width = dim + T::SCALE_ELEMENTS;
        let size = count * capacity * width;
        let page = |index: usize| match table {
            Some(table) => table.get(index).map(|page| &data[*page as usize * size..][..size]),
            None => Some(&data[..size]),
        };
        let index = position / capacity;
        let data = page(index).unwrap_or_default();
        // If there is no next page, this page is prefetched again, because prefetching unmapped memory costs a
        // page-table walk each time.
        Self { data, next: page(index + 1).unwrap_or(data), width, capacity, first: index * capacity }
    }

    /// Address `bytes` after the row of `position`, to prefetch. The address may be outside the cache.
    #[inline(always)]
    pub fn prefetch_address(&self, head: usize, position: usize, bytes: usize) -> *const u8 {
        let of = |data: &[T], row: usize| data.as_ptr().cast::<u8>().wrapping_add(row * self.width * size_of::<T>());
        let row = self.row_index(position);
        let beyond = self.capacity * self.width * size_of::<T>();
        let at = row * self.width * size_of::<T>() + bytes;
        if at < beyond {
            of(self.data, head * self.capacity).wrapping_add(at)
        } else {
            of(self.next, head * self.capacity).wrapping_add(at - beyond)
        }
    }

    /// The row number of a position.
    #[inline(always)]
    fn row_index(&self, position: usize) -> usize {
        let at = position - self.first;
        if at < self.capacity { at } else { at - self.capacity }
    }

    /// The rows of positions `first..first + count`.
    #[inline(always)]
    pub fn rows(&self, head: usize, first: usize, count: usize) -> KvRows<'a, T> {
        let start = (head * self.capacity + self.row_index(first)) * self.width;
        KvRows { data: &self.data[start..start + count * self.width], width: self.width }
    }

    #[inline(always)]
    pub fn row(&self, head: usize, position: usize) -> &'a [T] {
        &self.data[(head * self.capacity + self.row_index(position)) * self.width..][..self.width]
    }
}

/// Consecutive rows of one head.
#[derive(Clone, Copy)]
pub(in crate::ops) struct KvRows<'a, T> {
    data: &'a [T],
    /// Number of elements in a row, including its scale.
    pub width: usize,
}

impl<'a, T: KvElement> KvRows<'a, T> {
    #[inline(always)]
    pub fn iter(&self) -> impl Iterator<Item = &'a [T]> {
        self.data.chunks_exact(self.width)
    }
}

impl KvWrite<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let shape = self.shape;
        let tokens = self.tokens;
        let memory = &cpu.memory;
        let dim = shape.dim;
        let width = shape.width();
        let heads = shape.heads;
        let half = shape.rope_dim / 2;
        if self.start + tokens > shape.context {
            return refuse(format!(
                "cannot cache {tokens} rows at position {}: the context has {} positions",
                self.start, shape.context
            ));
        }
        shape.check(tokens)?;
        let rounded = kv_quant::bits(shape.format);
        let proj = memory.floats(self.proj.floats(tokens * width));
        let turn = memory.floats(self.norm_rope.rope_table.floats(tokens * shape.rope_dim));
        let [q_norm, k_norm] =
            [self.norm_rope.q_norm, self.norm_rope.k_norm].map(|norm| memory.floats(norm.floats(dim)));
        let norm_rope = |token: usize, x: &[f32], norm: &[f32], y: &mut [f32]| {
            normalise(x, norm, shape.eps, y);
            let (low, high) = y[..2 * half].split_at_mut(half);
            let pairs = turn[token * 2 * half..].chunks_exact(2);
            for ((low, high), pair) in low.iter_mut().zip(high).zip(pairs) {
                (*low, *high) = (*low * pair[0] - *high * pair[1], *high * pair[0] + *low * pair[1]);
            }
        };
        let q = memory.floats_mut(self.q.floats(tokens * heads * dim));
        cpu.compute.threads.run_pieces(q, heads * dim, &|token, q| {
            for (q, x) in q.chunks_exact_mut(dim).zip(proj[token * width..].chunks_exact(2 * dim)) {
                norm_rope(token, &x[..dim], q_norm, q);
                if rounded.is_some() {
                    kv_quant::hadamard(q);
                }
            }
        });
        let caches = [self.cache.keys, self.cache.values].map(|cache| memory.bytes_mut(cache));
        let table = memory.words(self.cache.table);
        let rings = self.cache.recent.map(|recent| memory.bytes_mut(recent));
        let mut to = caches.into_iter().zip(rings);
        let (Some(keys), Some(values)) = (to.next(), to.next()) else { return Ok(()) };
        let mut buffer = [0f32; MAX_HEAD_DIM];
        let scratch = &mut [0i32; MAX_HEAD_DIM];
        let Some(row) = buffer.get_mut(..dim) else {
            return refuse(format!("head dimension {dim} is above {MAX_HEAD_DIM}"));
        };
        for token in 0..tokens {
            let from = &proj[token * width + 2 * heads * dim..][..2 * shape.kv_heads * dim];
            for head in 0..shape.kv_heads {
                let at = self.start + token;
                let Some(page) = table.get(at / PAGE) else { return refuse(format!("no page for position {at}")) };
                let page = *page as usize;
                norm_rope(token, &from[head * dim..][..dim], k_norm, row);
                shape.write_row(row, [&mut *keys.0, &mut *keys.1], head, page, at, scratch)?;
                row.copy_from_slice(&from[(shape.kv_heads + head) * dim..][..dim]);
                shape.write_row(row, [&mut *values.0, &mut *values.1], head, page, at, scratch)?;
            }
        }
        Ok(())
    }
}

impl AttentionShape {
    /// Checks that the cache can hold rows of this shape.
    pub(in crate::ops) fn check(&self, tokens: usize) -> Result<(), DeviceError> {
        let Some(bits) = kv_quant::bits(self.format) else { return Ok(()) };
        self.divisible()?;
        match self.recent {
            Some(recent) if recent.capacity >= tokens + 2 * RECENT && recent.capacity.is_multiple_of(RECENT) => Ok(()),
            other => refuse(format!("a {bits}-bit cache cannot take {tokens} rows with the ring {other:?}")),
        }
    }

    /// Checks that `--kv-bits` can split the heads into groups.
    pub(in crate::ops) fn divisible(&self) -> Result<(), DeviceError> {
        match kv_quant::bits(self.format) {
            Some(bits) if !self.dim.is_multiple_of(64) || self.dim > MAX_HEAD_DIM => refuse(format!(
                "--kv-bits {bits} needs a head dimension that is a multiple of 64 up to {MAX_HEAD_DIM}, not {}",
                self.dim
            )),
            _ => Ok(()),
        }
    }

    /// Writes a row into the cache and, if the shape has a ring, into the ring.
    fn write_row(
        &self,
        row: &mut [f32],
        [cache, recent]: [&mut [u8]; 2],
        head: usize,
        page: usize,
        position: usize,
        scratch: &mut [i32; MAX_HEAD_DIM],
    ) -> Result<(), DeviceError> {
        let from =
            |first: usize, capacity: usize, bytes: usize| ((first + head) * capacity + position % capacity) * bytes..;
        let bytes = self.format.row_bytes(self.dim);
        let to = &mut cache[from(page * self.kv_heads, PAGE, bytes)][..bytes];
        let Some((bits, ring)) = kv_quant::bits(self.format).zip(self.recent) else {
            return store_row(self.format, row, to, scratch);
        };
        kv_quant::hadamard(row);
        kv_quant::quantize_row(bits, row, to);
        let bytes = ring.format.row_bytes(self.dim);
        store_row(ring.format, row, &mut recent[from(0, ring.capacity, bytes)][..bytes], scratch)
    }
}

/// Stores one row in `format`.
fn store_row(format: KvFormat, row: &[f32], to: &mut [u8], wide: &mut [i32; MAX_HEAD_DIM]) -> Result<(), DeviceError> {
    match format {
        KvFormat::F32 => to.copy_from_slice(bytemuck::cast_slice(row)),
        KvFormat::I16 => {
            let (values, scale) = bytemuck::cast_slice_mut::<u8, i16>(to).split_at_mut(row.len());
            let wide = &mut wide[..row.len()];
            let (factor, _) = quant::quantize(row, wide, FORMAT);
            for (value, wide) in values.iter_mut().zip(&*wide) {
                *value = *wide as i16;
            }
            scale.copy_from_slice(&[factor.to_bits() as i16, (factor.to_bits() >> 16) as i16]);
        }
        KvFormat::Eight | KvFormat::Four => {
            return refuse(format!("the CPU does not support the cache format {format:?}"));
        }
    }
    Ok(())
}
