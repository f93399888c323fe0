//! Compares attention over 8-bit and 4-bit keys and values with naive f64 loops over the documented format. The bytes
//! must not depend on batches, thread counts or instruction sets.

use super::{TestCpu, attention::some_tokens};
use crate::{
    device::Region,
    ops::{
        Attention, AttentionShape, Backend, KvCache, KvFormat, KvWrite, QkNormRope, RecentRing,
        attention::{GROUP, PAGE, RECENT, recent_start},
        simd::{
            Isa,
            tests::{Random, with},
        },
    },
};

/// Query heads, key heads, head dimension, positions.
const SHAPES: [(usize, usize, usize, usize); 6] =
    [(2, 2, 64, 70), (4, 2, 128, 300), (6, 2, 64, 705), (7, 1, 64, 400), (8, 1, 256, 1050), (15, 5, 64, 200)];

/// A cache that was filled in chunks of at most [`CHUNK`] positions, and the values written to it.
struct FilledCache {
    shape: AttentionShape,
    cache: KvCache,
    proj: Region,
    /// `[count, heads * dim]`.
    q: Region,
}

const CHUNK: usize = 150;

impl FilledCache {
    fn new(lab: &mut TestCpu, random: &mut Random, shape: (usize, usize, usize, usize), format: KvFormat) -> Self {
        let (heads, kv_heads, dim, count) = shape;
        let recent = RecentRing { capacity: (CHUNK + 2 * RECENT).next_multiple_of(RECENT), format: KvFormat::I16 };
        let recent = Some(recent).filter(|_| format != KvFormat::I16);
        let shape = AttentionShape { heads, kv_heads, dim, rope_dim: 0, eps: 1e-6, context: count + 3, format, recent };
        let proj = lab.random(random, count * shape.width());
        let [keys, values] = [0, 1].map(|_| lab.cpu.allocate(shape.cache_bytes()).unwrap());
        let ring =
            |_| if recent.is_some() { lab.cpu.allocate(shape.recent_bytes()).unwrap() } else { Region::default() };
        let recent = [0, 1].map(ring);
        let cache = KvCache { keys, values, table: lab.table(shape.pages()), recent };
        let q = lab.buffer(count * heads * dim);
        let ones = lab.floats(&vec![1.0; dim]);
        let rope = QkNormRope { q_norm: ones, k_norm: ones, rope_table: Region::default() };
        let filled = Self { shape, cache, proj, q };
        for start in (0..count).step_by(CHUNK) {
            let tokens = CHUNK.min(count - start);
            let proj = filled.proj.rows(start, tokens, shape.width());
            let q = filled.q.rows(start, tokens, heads * dim);
            lab.run(KvWrite { shape: &filled.shape, start, tokens, proj, norm_rope: rope, q, cache });
        }
        filled
    }

    fn attend(&self, lab: &mut TestCpu, start: usize, tokens: usize) -> Vec<f32> {
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

    /// The output of head `head` at `position`, computed in f64.
    fn expected(&self, lab: &mut TestCpu, head: usize, position: usize, plain: &[f32]) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, dim, .. } = self.shape;
        let kv = head / (heads / kv_heads);
        let width = self.shape.width();
        let q = lab.read(self.q.rows(position, 1, heads * dim));
        let q = &q[head * dim..][..dim];
        let mut scores = Vec::new();
        let mut values = Vec::new();
        for at in 0..=position {
            let row = &plain[at * width + 2 * heads * dim..];
            let (key, value) = if at < recent_start(position) {
                (self.rounded(lab, self.cache.keys, kv, at), self.rounded(lab, self.cache.values, kv, at))
            } else {
                let key = &row[kv * dim..][..dim];
                let mean = key.iter().map(|k| f64::from(k * k)).sum::<f64>() / dim as f64;
                let key: Vec<f64> = key.iter().map(|k| f64::from(*k) / (mean + 1e-6).sqrt()).collect();
                let value: Vec<f64> = row[(kv_heads + kv) * dim..][..dim].iter().map(|v| f64::from(*v)).collect();
                (hadamard(&key), hadamard(&value))
            };
            scores.push(q.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum::<f64>() / (dim as f64).sqrt());
            values.push(value);
        }
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum = |d: usize| weights.iter().zip(&values).map(|(w, value)| w * value[d]).sum::<f64>() / total;
        let turned = hadamard(&(0..dim).map(sum).collect::<Vec<f64>>());
        let gate = &plain[position * width + head * 2 * dim + dim..][..dim];
        turned.iter().zip(gate).map(|(y, gate)| y / (1.0 + (-f64::from(*gate)).exp())).collect()
    }
}

/// The Hadamard transform by its definition, for a length that is a power of two.
fn hadamard(x: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let row = |i: usize| x.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>() / (x.len() as f64).sqrt();
    (0..x.len()).map(row).collect()
}

#[test]
fn quantized_attention_matches_naive_reference() {
    let mut random = Random(51);
    let mut lab = TestCpu::new();
    for format in [KvFormat::Eight, KvFormat::Four] {
        for shape in SHAPES {
            let filled = FilledCache::new(&mut lab, &mut random, shape, format);
            let heads = shape.0;
            let count = shape.3;
            let width = shape.0 * shape.2;
            let plain = lab.read(filled.proj);
            for position in [0, 63, 64, 191, 192, count - 1].into_iter().filter(|position| *position < count) {
                // The ring holds only recent positions, so older queries cannot be repeated.
                if position + CHUNK < count {
                    continue;
                }
                let got = filled.attend(&mut lab, position, 1);
                for head in [0, heads - 1] {
                    let expected = filled.expected(&mut lab, head, position, &plain);
                    for (got, expected) in got[head * shape.2..].iter().zip(&expected) {
                        assert!((f64::from(*got) - expected).abs() < 1e-4, "{got} {expected} {format:?} {shape:?}");
                    }
                }
                assert_eq!(got.len(), width);
            }
        }
    }
}

#[test]
fn quantized_attention_error_is_small() {
    let mut lab = TestCpu::new();
    let shape = (8, 1, 256, 900);
    let of = |lab: &mut TestCpu, format| {
        let filled = FilledCache::new(lab, &mut Random(52), shape, format);
        filled.attend(lab, 890, 10)
    };
    let exact = of(&mut lab, KvFormat::I16);
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let size = norm(&mut exact.iter().copied());
    for (format, max) in [(KvFormat::Eight, 0.01), (KvFormat::Four, 0.15)] {
        let few = of(&mut lab, format);
        let off = norm(&mut few.iter().zip(&exact).map(|(a, b)| a - b)) / size;
        assert!(off < max && off > 0.0, "{format:?}: {off}");
    }
}

#[test]
#[ignore = "exhaustive: every shape and instruction set"]
fn quantized_attention_bytes_ignore_batch_and_isa() {
    let mut random = Random(53);
    let mut lab = TestCpu::new();
    for format in [KvFormat::Eight, KvFormat::Four] {
        for shape in SHAPES {
            let filled = FilledCache::new(&mut lab, &mut random, shape, format);
            let width = shape.0 * shape.2;
            let tokens = some_tokens(shape.3.min(CHUNK), width);
            let at = shape.3 - tokens;
            lab.rows_stand_alone(tokens, width, |lab, from, len| filled.attend(lab, at + from, len));
        }
    }
}

#[test]
fn quantized_write_agrees_across_isas() {
    for format in [KvFormat::Eight, KvFormat::Four] {
        let bytes = |isa| {
            with(isa, || {
                let mut lab = TestCpu::new();
                let filled = FilledCache::new(&mut lab, &mut Random(54), (4, 2, 128, 200), format);
                let mut bytes = vec![0; filled.cache.keys.len + filled.cache.values.len];
                let (keys, values) = bytes.split_at_mut(filled.cache.keys.len);
                lab.cpu.read(filled.cache.keys, keys).unwrap();
                lab.cpu.read(filled.cache.values, values).unwrap();
                bytes
            })
        };
        let expected = bytes(Isa::Scalar);
        assert!(Isa::all().into_iter().all(|isa| bytes(isa) == expected));
    }
}

#[test]
fn kv_bits_refuse_bad_dims_and_rings() {
    let mut random = Random(55);
    let mut lab = TestCpu::new();
    let mut filled = FilledCache::new(&mut lab, &mut random, (2, 2, 64, 70), KvFormat::Eight);
    let op = |filled: &FilledCache| {
        let FilledCache { shape, cache, proj, q } = *filled;
        (shape, cache, proj.rows(0, 64, shape.width()), q)
    };
    let ring = filled.shape.recent;
    filled.shape.recent = ring.map(|ring| RecentRing { capacity: 128, ..ring });
    let (shape, cache, proj, q) = op(&filled);
    let partials = Region::default();
    let y = lab.buffer(64 * 128);
    assert!(lab.fails(Attention { shape: &shape, start: 0, tokens: 64, q, cache, proj, partials, y }));
    filled.shape = AttentionShape { recent: ring, dim: 40, ..filled.shape };
    let (shape, cache, ..) = op(&filled);
    assert!(lab.fails(Attention { shape: &shape, start: 0, tokens: 1, q, cache, proj, partials, y }));
}
