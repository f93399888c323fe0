//! Rows of the KV cache, one for each position, in pages or a ring. Both have one block for each key head, in the layout
//! of `kv_format.rs`.
//!
//! An f32 row is its `dim` values. An i16 row is `dim` integers, with one f32 scale, stored as two i16, low half first.
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
    /// Number of elements that hold the scale of a row.
    const SCALE_ELEMENTS: usize;

    fn load<V: Vector>(x: &[Self; 16]) -> V;

    /// The factor that all values of row `row` are multiplied by. `scales` are the scales of all rows.
    fn scale(scales: &[Self], row: usize) -> f32;
}

impl KvElement for f32 {
    const SCALE_ELEMENTS: usize = 0;

    #[inline(always)]
    fn load<V: Vector>(x: &[f32; 16]) -> V {
        V::load(x)
    }

    #[inline(always)]
    fn scale(_: &[f32], _: usize) -> f32 {
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
    fn scale(scales: &[i16], row: usize) -> f32 {
        let [low, high] = [scales[2 * row], scales[2 * row + 1]].map(|half| u32::from(half as u16));
        f32::from_bits(low | high << 16)
    }
}

/// Cached keys or values of the page that contains one position, or of the ring.
#[derive(Clone, Copy)]
pub(in crate::ops) struct KvView<'a, T> {
    data: &'a [T],
    /// The next page, to prefetch.
    next: &'a [T],
    pub dim: usize,
    /// Number of positions in `data`.
    pub capacity: usize,
    /// Position of the first row, a multiple of `capacity`.
    first: usize,
}

impl<'a, T: KvElement> KvView<'a, T> {
    /// Views the cache at `position`: a ring of `count` blocks, or the pages of `count` blocks that `table` lists in
    /// order. A block has `capacity` rows of `dim` values.
    #[inline(always)]
    pub fn at(bytes: &'a [u8], table: Option<&[u32]>, [count, capacity, dim]: [usize; 3], position: usize) -> Self {
        let data = bytemuck::cast_slice(bytes);
        let size = count * capacity * (dim + T::SCALE_ELEMENTS);
        let page = |index: usize| match table {
            Some(table) => table.get(index).map(|page| &data[*page as usize * size..][..size]),
            None => Some(&data[..size]),
        };
        let index = position / capacity;
        let data = page(index).unwrap_or_default();
        // If there is no next page, this page is prefetched again, because prefetching unmapped memory costs a
        // page-table walk each time.
        Self { data, next: page(index + 1).unwrap_or(data), dim, capacity, first: index * capacity }
    }

    /// Number of elements of a block.
    #[inline(always)]
    fn block(&self) -> usize {
        self.capacity * (self.dim + T::SCALE_ELEMENTS)
    }

    /// Address `bytes` after the values of `position`, to prefetch. The values of the next page follow. The address may
    /// be outside the cache.
    #[inline(always)]
    pub fn prefetch_address(&self, head: usize, position: usize, bytes: usize) -> *const u8 {
        let row = self.dim * size_of::<T>();
        let at = self.row_index(position) * row + bytes;
        let end = self.capacity * row;
        let (data, at) = if at < end { (self.data, at) } else { (self.next, at - end) };
        data.as_ptr().wrapping_add(head * self.block()).cast::<u8>().wrapping_add(at)
    }

    /// Address of the scale `rows` after that of `position`, to prefetch. The address may be outside the cache.
    #[inline(always)]
    pub fn prefetch_scale(&self, head: usize, position: usize, rows: usize) -> *const u8 {
        let at = self.row_index(position) + rows;
        let (data, at) = if at < self.capacity { (self.data, at) } else { (self.next, at - self.capacity) };
        let scales = head * self.block() + self.capacity * self.dim;
        data.as_ptr().wrapping_add(scales + at * T::SCALE_ELEMENTS).cast::<u8>()
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
        let (values, scales) = self.data[head * self.block()..][..self.block()].split_at(self.capacity * self.dim);
        let index = self.row_index(first);
        let values = &values[index * self.dim..][..count * self.dim];
        let scales = &scales[index * T::SCALE_ELEMENTS..][..count * T::SCALE_ELEMENTS];
        KvRows { values, scales, dim: self.dim }
    }

    /// Copies the rows of positions `first..first + count` to `to`, a block of `capacity` rows, from row `row` on.
    #[inline(always)]
    pub fn copy_rows(&self, head: usize, [first, count]: [usize; 2], to: &mut [T], [row, capacity]: [usize; 2]) {
        let rows = self.rows(head, first, count);
        to[row * self.dim..][..count * self.dim].copy_from_slice(rows.values);
        let scales = capacity * self.dim + row * T::SCALE_ELEMENTS;
        to[scales..][..count * T::SCALE_ELEMENTS].copy_from_slice(rows.scales);
    }

    /// The values of a position, and their scale.
    #[inline(always)]
    pub fn row(&self, head: usize, position: usize) -> (&'a [T], f32) {
        let row = self.rows(head, position, 1);
        (row.values, row.scale(0))
    }
}

/// Consecutive rows of one head.
#[derive(Clone, Copy)]
pub(in crate::ops) struct KvRows<'a, T> {
    values: &'a [T],
    scales: &'a [T],
    dim: usize,
}

impl<'a, T: KvElement> KvRows<'a, T> {
    /// The values of each row.
    #[inline(always)]
    pub fn iter(&self) -> impl Iterator<Item = &'a [T]> {
        self.values.chunks_exact(self.dim)
    }

    #[inline(always)]
    pub fn scale(&self, row: usize) -> f32 {
        T::scale(self.scales, row)
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
        let to = self.format.row_mut(self.dim, cache, page * self.kv_heads + head, PAGE, position);
        let Some((bits, ring)) = kv_quant::bits(self.format).zip(self.recent) else {
            return store_row(self.format, row, to, scratch);
        };
        kv_quant::hadamard(row);
        let [codes, scales] = to;
        kv_quant::quantize_row(bits, row, codes, scales);
        let to = ring.format.row_mut(self.dim, recent, head, ring.capacity, position);
        store_row(ring.format, row, to, scratch)
    }
}

impl KvFormat {
    /// The codes and the scales of a position's row, in block number `block` of `bytes`. A block has `capacity` rows.
    fn row_mut(self, dim: usize, bytes: &mut [u8], block: usize, capacity: usize, position: usize) -> [&mut [u8]; 2] {
        let size = capacity * self.row_bytes(dim);
        let [codes, scales] = self.row_ranges(dim, capacity, position % capacity, 1);
        let (before, after) = bytes[block * size..][..size].split_at_mut(codes.end);
        [&mut before[codes.clone()], &mut after[scales.start - codes.end..scales.end - codes.end]]
    }
}

/// Stores one row in `format`, as codes and scales.
fn store_row(
    format: KvFormat,
    row: &[f32],
    [codes, scales]: [&mut [u8]; 2],
    wide: &mut [i32; MAX_HEAD_DIM],
) -> Result<(), DeviceError> {
    match format {
        KvFormat::F32 => codes.copy_from_slice(bytemuck::cast_slice(row)),
        KvFormat::I16 => {
            let values = bytemuck::cast_slice_mut::<u8, i16>(codes);
            let wide = &mut wide[..row.len()];
            let (factor, _) = quant::quantize(row, wide, FORMAT);
            for (value, wide) in values.iter_mut().zip(&*wide) {
                *value = *wide as i16;
            }
            scales.copy_from_slice(&factor.to_le_bytes());
        }
        KvFormat::Eight | KvFormat::Four => {
            return refuse(format!("the CPU does not support the cache format {format:?}"));
        }
    }
    Ok(())
}
