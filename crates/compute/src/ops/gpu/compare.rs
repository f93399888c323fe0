//! Measures two ways to compute the same on a GPU, for `moestro doctor --report`. The shapes are those of decoding with
//! Qwen3.5-35B-A3B and Qwen3.5-27B.

use super::variants::{VARIANTS, time_launches, time_products, time_variants, with_buffer};
use crate::{
    device::{CommandQueue, DeviceError, Driver, Launch, Region},
    ops::{
        Attention, AttentionShape, DecodedProduct, ExpertStack, Float, KvCache, KvFormat, MoeWeights, SharedExpert,
        Weight, WeightFormat, attention::max_splits,
    },
};
use serde::Serialize;

/// Times of two ways to compute the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub what: String,
    /// The way that is in use, or the staged variant of a product. Then the other way.
    pub ways: [&'static str; 2],
    pub micros: [f64; 2],
}

impl Comparison {
    /// `seconds` are those of the two ways.
    pub fn new(what: String, ways: [&'static str; 2], seconds: [f64; 2]) -> Self {
        Self { what, ways, micros: seconds.map(|seconds| seconds * 1e6) }
    }
}

/// Matrices that share a row: their rows, their columns, and whether the row is normalised first.
const MATRICES: [(&str, &[usize], usize, bool); 11] = [
    ("35B q k v", &[8192, 512, 512], 2048, true),
    ("35B out", &[2048], 4096, false),
    ("35B delta net in", &[8192, 4096, 32, 32], 2048, true),
    ("35B router, shared expert", &[256, 512, 512, 1], 2048, true),
    ("35B head", &[248_320], 2048, true),
    ("27B q k v", &[12_288, 1024, 1024], 5120, true),
    ("27B out", &[5120], 6144, false),
    ("27B delta net in", &[10_240, 6144, 48, 48], 5120, true),
    ("27B gate up", &[17_408, 17_408], 5120, true),
    ("27B down", &[5120], 17_408, false),
    ("27B head", &[248_320], 5120, true),
];
/// Query heads and kv heads.
const HEADS: [(&str, usize, usize); 2] = [("35B", 16, 2), ("27B", 24, 4)];
/// Number of tokens before the decoded token of each comparison of attention.
const TOKENS: [usize; 3] = [512, 8192, 32_768];
/// Number of tokens of each comparison of split sizes.
const SPLIT_TOKENS: [usize; 2] = [4096, 8192];
/// The split size, in positions, that is compared with the one in use.
const LONG_SPLIT: usize = 64;
/// Minimum number of bytes of keys and values that are read before any is read again.
const KV_BYTES: usize = 64 << 20;

const fn affine(bits: u8) -> WeightFormat {
    WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 }
}

fn matrix(codes: WeightFormat, rows: usize, cols: usize) -> Weight {
    Weight { codes, rows, cols, global_scale: 1.0, parts: Default::default() }
}

/// The experts of a layer of the 35B model, and the size of a slot in bytes.
fn experts() -> (MoeWeights, usize) {
    let hidden = 2048;
    let inner = 512;
    let codes = affine(4);
    let mut stride = 0;
    let stacks = [(inner, hidden), (inner, hidden), (hidden, inner)].map(|(rows, cols)| {
        let at = codes.part_bytes(rows, cols).map(|len| {
            stride += len;
            stride - len
        });
        ExpertStack { codes, rows, cols, global_scales: vec![1.0], at: vec![at] }
    });
    let gate_up = [matrix(codes, inner, hidden); 2];
    let shared = SharedExpert { gate_up, down: matrix(codes, hidden, inner), result: matrix(codes, 1, hidden) };
    let router = matrix(codes, 256, hidden);
    (MoeWeights { k: 8, renormalise: true, router, shared: Some(shared), stacks }, stride)
}

/// Attention of one token of the 35B or the 27B model.
pub struct DecodedAttention {
    shape: AttentionShape,
    tokens: usize,
}

impl DecodedAttention {
    fn new(heads: usize, kv_heads: usize, tokens: usize) -> Self {
        let shape = AttentionShape {
            heads,
            kv_heads,
            dim: 256,
            rope_dim: 64,
            eps: 1e-6,
            context: tokens + 1,
            format: KvFormat::I16,
            recent: None,
        };
        Self { shape, tokens }
    }

    /// Attention of the 35B model after the largest number of [`TOKENS`].
    pub fn long() -> Self {
        let [(_, heads, kv_heads), _] = HEADS;
        Self::new(heads, kv_heads, TOKENS[TOKENS.len() - 1])
    }

    /// The number of bytes of keys and values, and how many copies of them are read in turn.
    fn cache(&self) -> (usize, usize) {
        let bytes = 2 * self.shape.cache_bytes();
        (bytes, (KV_BYTES / bytes).clamp(1, 32))
    }

    /// Number of bytes of all buffers.
    fn bytes(&self) -> usize {
        let (bytes, copies) = self.cache();
        let shape = &self.shape;
        let rows = shape.width() + 2 * shape.heads * shape.dim + shape.pages();
        bytes * copies + 4 * (rows + shape.heads * max_splits(shape.context) * (shape.dim + 2))
    }

    /// The buffer's words of the page table, and the launches of each copy of keys and values.
    fn launches(&self, buffer: Region) -> ((Region, Vec<u32>), Vec<[Launch; 2]>) {
        let shape = &self.shape;
        let (bytes, copies) = self.cache();
        let mut at = bytes * copies;
        let mut take = |floats: usize| {
            at += floats * 4;
            buffer.part(at - floats * 4, floats * 4)
        };
        let proj = take(shape.width());
        let [q, y] = [take(shape.heads * shape.dim), take(shape.heads * shape.dim)];
        let partials = take(shape.heads * max_splits(shape.context) * (shape.dim + 2));
        let table = take(shape.pages());
        let one = |copy: usize| {
            let [keys, values] = [0, 1].map(|half| buffer.part((2 * copy + half) * bytes / 2, bytes / 2));
            let cache = KvCache { keys, values, table, recent: [Region::default(); 2] };
            let op = Attention { shape, start: self.tokens, tokens: 1, q, cache, proj, partials, y };
            op.launches(1, false).collect::<Vec<_>>()
        };
        ((table, (0..shape.pages() as u32).collect()), (0..copies).flat_map(one).collect())
    }
}

/// Compares the variants of kernels and of attention on this device.
pub fn compare_kernels(gpu: &mut CommandQueue<impl Driver>) -> Result<Vec<Comparison>, DeviceError> {
    let mut found = Vec::new();
    for (name, rows, cols, has_norm) in MATRICES {
        let matrices = rows.iter().map(|rows| matrix(affine(4), *rows, cols)).collect();
        let seconds = time_variants(gpu, &DecodedProduct::Matrices { matrices, has_norm })?;
        found.extend(seconds.map(|seconds| Comparison::new(name.into(), VARIANTS, seconds)));
    }
    let (layer, stride) = experts();
    let seconds = time_variants(gpu, &DecodedProduct::Experts { layer: &layer, stride })?;
    found.extend(seconds.map(|seconds| Comparison::new("35B experts gate up".into(), VARIANTS, seconds)));

    let [fp8, eight] = [WeightFormat::Fp8(Some(Float::Bf16)), affine(8)]
        .map(|codes| DecodedProduct::Matrices { matrices: vec![matrix(codes, 6144, 5120)], has_norm: false });
    let seconds = time_products(gpu, [&fp8, &eight])?;
    let formats = |seconds| Comparison::new("27B, 6144 x 5120 weights".into(), ["FP8", "8-bit integers"], seconds);
    found.extend(seconds.map(formats));

    for (model, heads, kv_heads) in HEADS {
        for tokens in TOKENS {
            let op = DecodedAttention::new(heads, kv_heads, tokens);
            let seconds = time_attention(gpu, &op, |launches| op.shape.with_two_heads(launches))?;
            let shared = if (heads / kv_heads).is_multiple_of(4) { "4 heads together" } else { "3 heads together" };
            let what = format!("{model} attention, {tokens} tokens");
            found.push(Comparison::new(what, [shared, "2 heads together"], seconds));
        }
    }
    let [(model, heads, kv_heads), _] = HEADS;
    for tokens in SPLIT_TOKENS {
        let op = DecodedAttention::new(heads, kv_heads, tokens);
        let seconds = time_attention(gpu, &op, |launches| op.shape.with_min_split(launches, tokens, LONG_SPLIT))?;
        let what = format!("{model} attention, {tokens} tokens");
        found.push(Comparison::new(what, ["splits of 16", "splits of 64"], seconds));
    }
    Ok(found)
}

/// Seconds of attention with the launches in use, and with the launches that `change` makes of them.
pub fn time_attention(
    gpu: &mut CommandQueue<impl Driver>,
    op: &DecodedAttention,
    change: impl Fn([Launch; 2]) -> [Launch; 2],
) -> Result<[f64; 2], DeviceError> {
    with_buffer(gpu, op.bytes(), |gpu, buffer| {
        let ((table, pages), launches) = op.launches(buffer);
        gpu.write_words(table, &pages)?;
        let other: Vec<_> = launches.iter().cloned().flat_map(&change).collect();
        // A pair of launches is one operation.
        Ok(time_launches(gpu, [&launches.concat(), &other])?.map(|seconds| 2.0 * seconds))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_launches_fit_their_buffer() {
        for (_, heads, kv_heads) in HEADS {
            for tokens in TOKENS.into_iter().chain(SPLIT_TOKENS) {
                let op = DecodedAttention::new(heads, kv_heads, tokens);
                let ((table, pages), launches) = op.launches(Region { len: op.bytes(), ..Region::default() });
                assert_eq!(table.len, pages.len() * 4);
                assert!((1..=32).contains(&launches.len()), "{} launches", launches.len());
                for [splits, merge] in launches.into_iter().map(|launches| op.shape.with_two_heads(launches)) {
                    assert_eq!((splits.kernel, merge.kernel), ("attention_decode_256_i16", "attention_merge"));
                    assert_eq!(splits.threads as usize, 16 * heads / kv_heads);
                }
            }
        }
    }
}
