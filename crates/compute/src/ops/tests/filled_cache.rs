//! [`FilledCache`]: keys and values of random rows, with the attention that naive f64 loops compute.

use super::TestCpu;
use crate::{
    device::Region,
    ops::{
        Attention, AttentionShape, Backend, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing,
        attention::{GROUP, PAGE, RECENT, recent_start},
    },
};
use test_support::mutate::Dice;

/// A cache that was filled in several chunks of at most [`CHUNK`] positions, and the values written to it.
pub struct FilledCache {
    pub shape: AttentionShape,
    pub cache: KvCache,
    pub proj: Region,
    /// Queries that the writes returned, `[count, heads * dim]`.
    pub q: Region,
}

pub const CHUNK: usize = 150;

fn is_quantized(format: KvFormat) -> bool {
    matches!(format, KvFormat::Eight | KvFormat::Four)
}

/// A shape with room for `count` positions and a few more.
pub fn shape(
    (heads, kv_heads, dim, count): (usize, usize, usize, usize),
    rope_dim: usize,
    format: KvFormat,
) -> AttentionShape {
    let ring = RecentRing { capacity: (CHUNK + 2 * RECENT).next_multiple_of(RECENT), format: KvFormat::I16 };
    let recent = is_quantized(format).then_some(ring);
    AttentionShape { heads, kv_heads, dim, rope_dim, eps: 1e-6, context: count + 3, format, recent }
}

impl FilledCache {
    /// Fills `count` positions with random values.
    pub fn new(lab: &mut TestCpu, dice: &mut Dice, shape: AttentionShape, count: usize) -> Self {
        let width = shape.heads * shape.dim;
        let proj = lab.random(dice, count * shape.width());
        let mut bytes = |len: usize| lab.buffer(len.div_ceil(4)).first(len);
        let [keys, values] = [(); 2].map(|()| bytes(shape.cache_bytes()));
        let recent = [(); 2].map(|()| shape.recent.map_or(Region::default(), |_| bytes(shape.recent_bytes())));
        let cache = KvCache { keys, values, table: lab.table(shape.pages()), recent };
        let q = lab.buffer(count * width);
        let ones = lab.floats(&vec![1.0; shape.dim]);
        let norm_rope = QkNormRope { q_norm: ones, k_norm: ones, rope_table: lab.buffer(count * shape.rope_dim) };
        let filled = Self { shape, cache, proj, q };
        let chunk = CHUNK.min(count.div_ceil(2));
        for start in (0..count).step_by(chunk) {
            filled.write(lab, start, chunk.min(count - start), norm_rope);
        }
        filled
    }

    pub fn write(&self, lab: &mut TestCpu, start: usize, tokens: usize, norm_rope: QkNormRope) {
        let Self { shape, cache, .. } = self;
        let proj = self.proj.rows(start, tokens, shape.width());
        let q = self.q.rows(start, tokens, shape.heads * shape.dim);
        lab.run(KvWrite { shape, start, tokens, proj, norm_rope, q, cache: *cache });
    }

    pub fn attend(&self, lab: &mut TestCpu, start: usize, tokens: usize) -> Vec<f32> {
        let shape = &self.shape;
        let cache = self.cache;
        let width = shape.heads * shape.dim;
        let q = self.q.rows(start, tokens, width);
        let proj = self.proj.rows(start, tokens, shape.width());
        let y = lab.buffer(tokens * width);
        lab.run(Attention { shape, start, tokens, q, cache, proj, partials: Region::default(), y });
        lab.read(y)
    }

    /// Decodes a row of the documented format, in f64.
    fn rounded(&self, lab: &mut TestCpu, region: Region, head: usize, position: usize) -> Vec<f64> {
        let AttentionShape { kv_heads, dim, format, .. } = self.shape;
        let page = self.shape.pages() - 1 - position / PAGE;
        let block = region.part((page * kv_heads + head) * PAGE * format.row_bytes(dim), PAGE * format.row_bytes(dim));
        let bits = if format == KvFormat::Eight { 8 } else { 4 };
        let mut read = |start: usize, len: usize| {
            let mut bytes = vec![0; len];
            lab.cpu.read(block.part(start + position % PAGE * len, len), &mut bytes).unwrap();
            bytes
        };
        let bytes = read(0, dim * bits / 8);
        let scales = read(PAGE * dim * bits / 8, dim / GROUP * 2);
        let value = |at: usize| {
            let group = at / GROUP;
            let scale = f32::from_bits(u32::from(scales[2 * group]) << 16 | u32::from(scales[2 * group + 1]) << 24);
            let integer = if bits == 8 {
                i32::from(bytes[at] as i8)
            } else {
                let byte = bytes[group * GROUP / 2 + at % 16];
                2 * i32::from(if at % GROUP < 16 { byte & 15 } else { byte >> 4 }) - 15
            };
            f64::from(integer) * f64::from(scale)
        };
        (0..dim).map(value).collect()
    }

    /// The output of head `head` at `position`, computed in f64. `plain` are the values of [`Self::proj`].
    pub fn expected(&self, lab: &mut TestCpu, head: usize, position: usize, plain: &[f32]) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, dim, format, .. } = self.shape;
        let is_quantized = is_quantized(format);
        let turn = |x: Vec<f64>| if is_quantized { hadamard(&x) } else { x };
        let kv = head / (heads / kv_heads);
        let width = self.shape.width();
        let q = lab.read(self.q.rows(position, 1, heads * dim));
        let q = &q[head * dim..][..dim];
        let mut scores = Vec::new();
        let mut values = Vec::new();
        for at in 0..=position {
            let row = &plain[at * width + 2 * heads * dim..];
            let (key, value) = if is_quantized && at < recent_start(position) {
                (self.rounded(lab, self.cache.keys, kv, at), self.rounded(lab, self.cache.values, kv, at))
            } else {
                let key = &row[kv * dim..][..dim];
                let mean = key.iter().map(|k| f64::from(k * k)).sum::<f64>() / dim as f64;
                let key = key.iter().map(|k| f64::from(*k) / (mean + 1e-6).sqrt()).collect();
                let value = row[(kv_heads + kv) * dim..][..dim].iter().map(|v| f64::from(*v)).collect();
                (turn(key), turn(value))
            };
            scores.push(q.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum::<f64>() / (dim as f64).sqrt());
            values.push(value);
        }
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum = |d: usize| weights.iter().zip(&values).map(|(w, value)| w * value[d]).sum::<f64>() / total;
        let gate = &plain[position * width + head * 2 * dim + dim..][..dim];
        let y = turn((0..dim).map(sum).collect());
        y.iter().zip(gate).map(|(y, gate)| y / (1.0 + (-f64::from(*gate)).exp())).collect()
    }
}

/// The Hadamard transform by its definition, for a length that is a power of two.
fn hadamard(x: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let row = |i: usize| x.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>() / (x.len() as f64).sqrt();
    (0..x.len()).map(row).collect()
}
