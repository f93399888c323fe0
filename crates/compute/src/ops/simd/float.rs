//! Dot products in f32.
//!
//! Value `k` is added to lane `k % 16` by fma, in order of `k`. [`Vector::sum`] then adds the lanes.

use super::Vector;

/// Dot products of `a` with `N` rows `b` of the same length.
#[inline(always)]
pub fn dot<V: Vector, const N: usize>(a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    let mut lanes = [V::splat(0.0); N];
    let (chunks, rest) = a.as_chunks::<16>();
    let mut blocks: [&[[f32; 16]]; N] = [&[]; N];
    for n in 0..N {
        blocks[n] = &b[n][..a.len()].as_chunks::<16>().0[..chunks.len()];
    }
    for (index, chunk) in chunks.iter().enumerate() {
        let a = V::load(chunk);
        for n in 0..N {
            lanes[n] = a.fma(V::load(&blocks[n][index]), lanes[n]);
        }
    }
    if !rest.is_empty() {
        let last = V::load(&padded(rest));
        for n in 0..N {
            lanes[n] = last.fma(V::load(&padded(&b[n][chunks.len() * 16..a.len()])), lanes[n]);
        }
    }
    let mut sums = [0f32; N];
    for n in 0..N {
        sums[n] = lanes[n].sum();
    }
    sums
}

/// At most sixteen values, padded with zeros.
#[inline(always)]
pub fn padded<T: Copy + Default>(x: &[T]) -> [T; 16] {
    let mut out = [T::default(); 16];
    out[..x.len()].copy_from_slice(x);
    out
}
