//! Attention to selected blocks on the CPU. The result of a row does not depend on the other rows or on the number of
//! threads.

use super::{BlockAttention, BlockAttentionRows, IndexCache};
use crate::{
    device::DeviceError,
    ops::{
        Attention, QkNormRope,
        attention::{
            KvElement, KvFormat, KvSelection, KvView, PAGE,
            kv_quant::{self, QuantizedKv, recent_start},
        },
        cpu::{Cpu, refuse},
        simd::{float, wide},
    },
};
use std::{marker::PhantomData, ops::Range};

impl BlockAttentionRows<'_> {
    /// Computes one row after the other.
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { attend, rows, .. } = *self;
        let both = self.attention_rows();
        let indexer = attend.indexer;
        let ring = attend.cache.capacity * indexer.recent_width() * 4;
        for row in 0..self.write.tokens {
            let at = cpu.memory.sequence(&rows, row);
            let (write, attention) = both.row(row, at);
            write.on_cpu(cpu)?;
            let index = attend.index.rows(row, 1, indexer.width());
            let rope_table = attend.norm_rope.rope_table.rows(row, 1, indexer.rope_dim);
            let norm_rope = QkNormRope { rope_table, ..attend.norm_rope };
            let cache = IndexCache { recent: attend.cache.recent.part(at[0] * ring, ring), ..attend.cache };
            BlockAttention { attention, index, norm_rope, cache, indexer }.on_cpu(cpu)?;
        }
        Ok(())
    }
}

impl BlockAttention<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let shape = self.attention.shape;
        let tokens = self.attention.tokens;
        if tokens == 0 || shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
            return refuse(format!("cannot attend with {tokens} tokens: {shape:?}"));
        }
        shape.check(tokens)?;
        let pages = cpu.memory.words(self.attention.cache.table).len();
        if pages * PAGE < self.attention.start + tokens {
            return refuse(format!("{pages} pages are too few for position {}", self.attention.start + tokens));
        }
        self.close_blocks(&cpu.memory)?;
        let first = self.rows_without_selection();
        if first > 0 {
            self.attention.part(0, first).on_cpu(cpu)?;
        }
        let mut scratch = std::mem::take(&mut cpu.scratch.selection);
        self.select(cpu, &mut scratch);
        let mut done = Ok(());
        if first < tokens {
            let rest = self.part(first, tokens - first);
            done = rest.attend(cpu, &scratch.selected[first * self.indexer.blocks..]);
        }
        cpu.scratch.selection = scratch;
        done
    }

    /// Number of rows that attend to all positions before any row that does not. Products with quantized keys and
    /// values are integers in full attention, so there are no such rows with a quantized cache.
    fn rows_without_selection(&self) -> usize {
        let Attention { shape, start, tokens, .. } = self.attention;
        let positions = (self.indexer.blocks + 1) * self.indexer.ratio - 1;
        if shape.recent.is_some() { 0 } else { positions.saturating_sub(start).min(tokens) }
    }

    /// Attends to `selected`, `[tokens, blocks]`, and to each query's open block.
    fn attend(&self, cpu: &Cpu, selected: &[u32]) -> Result<(), DeviceError> {
        let op = &self.attention;
        let shape = op.shape;
        let memory = &cpu.memory;
        let caches = [op.cache.keys, op.cache.values].map(|cache| memory.bytes(cache));
        let table = memory.words(op.cache.table);
        let positions = SelectedPositions { op: self, selected };
        let pages = SelectedPages { positions, caches, table };
        let Some((bits, ring)) = kv_quant::bits(shape.format).zip(shape.recent) else {
            match shape.format {
                KvFormat::F32 => op.on_selected::<f32>(cpu, &pages, false),
                KvFormat::I16 => op.on_selected::<i16>(cpu, &pages, false),
                other => return refuse(format!("the CPU does not support the cache format {other:?}")),
            }
            return Ok(());
        };
        let quantized = caches.map(|cache| QuantizedKv::new(bits, cache, table, shape.kv_heads, shape.dim));
        let rings = op.cache.recent.map(|ring| memory.bytes(ring));
        let capacity = ring.capacity;
        match ring.format {
            KvFormat::F32 => {
                let rows = SelectedCodes { positions, quantized, rings, capacity, element: PhantomData::<f32> };
                op.on_selected(cpu, &rows, true);
            }
            KvFormat::I16 => {
                let rows = SelectedCodes { positions, quantized, rings, capacity, element: PhantomData::<i16> };
                op.on_selected(cpu, &rows, true);
            }
            other => return refuse(format!("the CPU does not support the cache format {other:?}")),
        }
        Ok(())
    }
}

/// The positions that each query attends to: its selected blocks, in ascending order, and its open block.
#[derive(Clone, Copy)]
struct SelectedPositions<'a> {
    op: &'a BlockAttention<'a>,
    /// `[tokens, blocks]`.
    selected: &'a [u32],
}

impl SelectedPositions<'_> {
    fn count(&self, token: usize) -> usize {
        let position = self.op.attention.start + token;
        let (closed, chosen) = self.op.closed(position);
        position + 1 - (closed - chosen) * self.op.indexer.ratio
    }

    /// Splits the positions with these indices into runs of consecutive positions in one page. Calls `copy` with the
    /// number of a row in `seen`, the first position and the length of each run. A run is inside a block. It does not
    /// cross the first position that the query reads from a ring.
    fn for_each_run(&self, token: usize, seen: Range<usize>, mut copy: impl FnMut(usize, usize, usize)) {
        let indexer = self.op.indexer;
        let position = self.op.attention.start + token;
        let (closed, chosen) = self.op.closed(position);
        let blocks = &self.selected[token * indexer.blocks..][..chosen];
        let recent = recent_start(position);
        let mut index = seen.start;
        while index < seen.end {
            let block = blocks.get(index / indexer.ratio).map_or(closed, |block| *block as usize);
            let in_block = index - (index / indexer.ratio).min(chosen) * indexer.ratio;
            let first = block * indexer.ratio + in_block;
            let page_end = first / PAGE * PAGE + PAGE;
            let end = page_end.min(first + (indexer.ratio - in_block).min(seen.end - index));
            let end = if first < recent { end.min(recent) } else { end };
            copy(index - seen.start, first, end - first);
            index += end - first;
        }
    }
}

/// Selected positions of a cache with f32 or 16-bit rows.
struct SelectedPages<'a> {
    positions: SelectedPositions<'a>,
    caches: [&'a [u8]; 2],
    table: &'a [u32],
}

impl<T: KvElement> KvSelection<T> for SelectedPages<'_> {
    fn count(&self, token: usize) -> usize {
        self.positions.count(token)
    }

    fn copy(&self, token: usize, head: usize, seen: Range<usize>, to: [&mut [T]; 2]) {
        let shape = self.positions.op.attention.shape;
        let sizes = [shape.kv_heads, PAGE, shape.dim];
        for (cache, to) in self.caches.into_iter().zip(to) {
            self.positions.for_each_run(token, seen.clone(), |row, first, count| {
                let page = KvView::<T>::at(cache, Some(self.table), sizes, first);
                page.copy_rows(head, [first, count], to, [row, PAGE]);
            });
        }
    }
}

/// Selected positions of a quantized cache with a ring of recent positions, whose elements are `R`. They are copied as
/// f32.
struct SelectedCodes<'a, R> {
    positions: SelectedPositions<'a>,
    quantized: [QuantizedKv<'a>; 2],
    rings: [&'a [u8]; 2],
    /// Number of positions in a ring.
    capacity: usize,
    element: PhantomData<R>,
}

impl<R: KvElement> KvSelection<f32> for SelectedCodes<'_, R> {
    fn count(&self, token: usize) -> usize {
        self.positions.count(token)
    }

    fn copy(&self, token: usize, head: usize, seen: Range<usize>, to: [&mut [f32]; 2]) {
        let Attention { shape, start, .. } = self.positions.op.attention;
        let dim = shape.dim;
        let recent = recent_start(start + token);
        let sizes = [shape.kv_heads, self.capacity, dim];
        for ((codes, ring), to) in self.quantized.iter().zip(self.rings).zip(to) {
            self.positions.for_each_run(token, seen.clone(), |row, first, count| {
                for (position, to) in (first..first + count).zip(to[row * dim..].chunks_exact_mut(dim)) {
                    if position >= recent {
                        let (values, scale) = KvView::<R>::at(ring, None, sizes, position).row(head, position);
                        scale_row(values, scale, to);
                    } else {
                        let row = codes.rows(head, position, 1);
                        kv_quant::dequantize_row(codes.bits, [row.codes, row.scales], to);
                    }
                }
            });
        }
    }
}

wide! {
    /// `to = scale * values`.
    fn scale_row[T: KvElement](values: &[T], scale: f32, to: &mut [f32]) {
        let scale = V::splat(scale);
        let (chunks, rest) = values.as_chunks::<16>();
        let (to, last) = to.as_chunks_mut::<16>();
        for (chunk, to) in chunks.iter().zip(to) {
            scale.fma(T::load::<V>(chunk), V::splat(0.0)).store(to);
        }
        if !rest.is_empty() {
            let mut padded = [0.0; 16];
            scale.fma(T::load::<V>(&float::padded(rest)), V::splat(0.0)).store(&mut padded);
            last.copy_from_slice(&padded[..last.len()]);
        }
    }
}
