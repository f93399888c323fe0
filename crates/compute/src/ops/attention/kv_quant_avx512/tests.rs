//! Tests of the AVX-512 kernels for quantized rows.

use super::*;
use crate::ops::simd::Isa;

#[test]
fn scales_load_for_any_group_count() {
    if !Isa::all().contains(&Isa::Avx512) {
        return;
    }
    for pairs in 1..=9 {
        let stride = 10 + 4 * pairs;
        let half = |row: usize, group: usize| (0x3f00 + 64 * group + row) as u16;
        let rows: Vec<u8> = (0..16)
            .flat_map(|row| {
                let halves = (0..2 * pairs).flat_map(move |group| half(row, group).to_le_bytes());
                std::iter::repeat_n(0xff, 10).chain(halves)
            })
            .collect();
        assert_eq!(rows.len(), 16 * stride);
        // SAFETY: the processor has AVX-512. There are sixteen rows with scales after ten bytes. Both types hold 16
        // floats.
        let read: Vec<[[f32; 16]; 2]> = unsafe {
            let mut scales = vec![[_mm512_setzero_ps(); 2]; pairs];
            codes::scales(rows[10..].as_ptr(), stride, &mut scales);
            scales.into_iter().map(|two| std::mem::transmute::<[__m512; 2], [[f32; 16]; 2]>(two)).collect()
        };
        for (group, scales) in read.as_flattened().iter().enumerate() {
            let expected: [f32; 16] = std::array::from_fn(|row| f32::from_bits(u32::from(half(row, group)) << 16));
            assert_eq!(*scales, expected, "{pairs} {group}");
        }
    }
}

#[test]
fn two_digit_product_is_rounded_once() {
    // The combination of digits in [`dots`], against a conversion of the whole integer.
    for (high, low) in [(0, 0), (1, -1), (65_537, 3), (65_537, -3), (-300_001, 1_001), (520_192, 520_192)] {
        let beside = |x: i32| f32::from_bits((ROUND.to_bits() as i32 + x) as u32);
        let dot = (beside(high) - (ROUND + ROUND / 256.0)).mul_add(256.0, beside(low));
        assert_eq!(dot.to_bits(), ((256 * high + low) as f32).to_bits(), "{high} {low}");
    }
}
