//! Random numbers by index. The i-th number of a sequence is computed directly.

use moestro_base::platform::split_mix64::{INCREMENT, mix};

/// The i-th 64 random bits of the SplitMix64 sequence with the key `key`.
pub fn bits(key: u64, i: u64) -> u64 {
    mix(key.wrapping_add(i.wrapping_add(1).wrapping_mul(INCREMENT)))
}

/// Key of the sequence for a name: the FNV-1a hash of the name, mixed with the seed.
pub fn key(seed: u64, name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    bits(hash, seed)
}

/// Converts random bits to a number with uniform distribution in [low, high).
pub fn uniform(bits: u64, low: f32, high: f32) -> f32 {
    low + (high - low) * (bits >> 40) as f32 / (1u32 << 24) as f32
}

/// Converts random bits to a number with standard normal distribution (Box and Muller, 1958). The upper bits give the
/// radius, and the lower bits give the angle.
pub fn normal(bits: u64) -> f32 {
    let radius = ((bits >> 32) as f64 + 0.5) / (1u64 << 32) as f64;
    let angle = (bits & 0xffff_ffff) as f64 / (1u64 << 32) as f64;
    ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
}

/// Fills `out` with bytes of the sequence. `from` is the position of the first of these bytes in the sequence, a
/// multiple of 8.
pub fn fill(key: u64, from: u64, out: &mut [u8]) {
    let mut i = from / 8;
    let mut words = out.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&bits(key, i).to_le_bytes());
        i += 1;
    }
    let rest = words.into_remainder();
    let len = rest.len();
    rest.copy_from_slice(&bits(key, i).to_le_bytes()[..len]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_depend_on_each_other() {
        let mut whole = vec![0; 1001];
        fill(7, 0, &mut whole);
        let mut part = vec![0; 401];
        fill(7, 600, &mut part);
        assert_eq!(whole[600..], part[..]);
        assert_ne!(key(1, "a"), key(1, "b"));
        assert_ne!(key(1, "a"), key(2, "a"));
    }

    #[test]
    fn distributions_have_expected_moments() {
        let n = 100_000;
        let mean = |f: &dyn Fn(u64) -> f32| (0..n).map(|i| f(bits(3, i)) as f64).sum::<f64>() / n as f64;
        assert!(mean(&normal).abs() < 0.01);
        assert!((mean(&|b| normal(b).powi(2)) - 1.0).abs() < 0.02);
        assert!((mean(&|b| uniform(b, 2.0, 4.0)) - 3.0).abs() < 0.01);
    }
}
