//! Compares attention over 8-bit and 4-bit keys and values with naive f64 loops over the documented format. The bytes
//! must not depend on batches, thread counts or instruction sets.

use super::{
    TestCpu,
    attention::some_tokens,
    filled_cache::{CHUNK, FilledCache, shape},
};
use crate::{
    device::Region,
    ops::{
        Attention, AttentionShape, Backend, KvFormat, RecentRing,
        simd::{Isa, tests::with},
    },
};
use test_support::mutate::Dice;

/// Query heads, key heads, head dimension, positions.
const SHAPES: [(usize, usize, usize, usize); 6] =
    [(2, 2, 64, 70), (4, 2, 128, 300), (6, 2, 64, 705), (7, 1, 64, 400), (8, 1, 256, 1050), (15, 5, 64, 200)];

fn filled(lab: &mut TestCpu, dice: &mut Dice, dims: (usize, usize, usize, usize), format: KvFormat) -> FilledCache {
    FilledCache::new(lab, dice, shape(dims, 0, format), dims.3)
}

#[test]
fn quantized_attention_matches_naive_reference() {
    let mut dice = Dice(51);
    let mut lab = TestCpu::new();
    for format in [KvFormat::Eight, KvFormat::Four] {
        for shape in SHAPES {
            let filled = filled(&mut lab, &mut dice, shape, format);
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
        let filled = filled(lab, &mut Dice(52), shape, format);
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
    let mut dice = Dice(53);
    let mut lab = TestCpu::new();
    for format in [KvFormat::Eight, KvFormat::Four] {
        for shape in SHAPES {
            let filled = filled(&mut lab, &mut dice, shape, format);
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
                let filled = filled(&mut lab, &mut Dice(54), (4, 2, 128, 200), format);
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
    let mut dice = Dice(55);
    let mut lab = TestCpu::new();
    let mut filled = filled(&mut lab, &mut dice, (2, 2, 64, 70), KvFormat::Eight);
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
