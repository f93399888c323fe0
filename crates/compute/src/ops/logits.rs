//! The largest of a row of logits, and exponentials over the row. A row has one logit per token of the vocabulary. NaN
//! counts as negative infinity.

use super::simd::{math::exp, wide};

/// Maps a logit to a number that is safe to compute with: NaN to negative infinity, infinity to the largest finite
/// number, negative zero to zero.
#[inline(always)]
pub fn finite(logit: f32) -> f32 {
    let logit = if logit > f32::MAX { f32::MAX } else { logit };
    (if logit.is_nan() { f32::NEG_INFINITY } else { logit }) + 0.0
}

wide! {
    /// The sum of `e^(logit - max)`. `max` is finite.
    pub fn exp_sum(logits: &[f32], max: f32) -> f64 {
        let (blocks, rest) = logits.as_chunks::<16>();
        let mut lanes = [0f64; 16];
        for block in blocks {
            for (lane, &logit) in lanes.iter_mut().zip(block) {
                *lane += f64::from(exp(finite(logit) - max));
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&logit| f64::from(exp(finite(logit) - max))).sum::<f64>()
    }
}

wide! {
    /// Replaces each logit by its weight, `e^((logit - max) / temperature)`. `max` is finite.
    pub fn to_weights(row: &mut [f32], max: f32, temperature: f32) {
        for x in row {
            *x = exp((finite(*x) - max) / temperature);
        }
    }
}

wide! {
    /// The sum of the weights that are at least `min`.
    pub fn sum_from(weights: &[f32], min: f32) -> f64 {
        let (blocks, rest) = weights.as_chunks::<16>();
        let kept = |weight: f32| f64::from(if weight >= min { weight } else { 0.0 });
        let mut lanes = [0f64; 16];
        for block in blocks {
            for (lane, &weight) in lanes.iter_mut().zip(block) {
                *lane += kept(weight);
            }
        }
        lanes.iter().sum::<f64>() + rest.iter().map(|&weight| kept(weight)).sum::<f64>()
    }
}

/// The largest logit. Negative infinity if every logit is NaN or negative infinity.
pub fn peak(logits: &[f32]) -> f32 {
    // Sixteen lanes stay in registers. A comparison with NaN is false.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = logits.as_chunks::<16>();
    for block in blocks {
        for (lane, &logit) in lanes.iter_mut().zip(block) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |peak, &logit| if logit > peak { logit } else { peak })
}

/// The id of the largest logit. If several are equal, the lowest of their ids. `None` if every logit is NaN or
/// negative infinity.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let peak = peak(logits);
    // First find the block with a loop in registers, then the position within the block.
    let has = |block: &[f32]| block.iter().fold(false, |any, &logit| any | (logit == peak));
    let block = logits.chunks(64).position(has)? * 64;
    let id = block + logits[block..].iter().position(|&logit| logit == peak)?;
    (peak > f32::NEG_INFINITY).then_some(id as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_weights_match_f64() {
        for len in [1, 15, 16, 33, 1000] {
            let logits: Vec<f32> = (0..len).map(|i| ((i * 37) % 101) as f32 * 0.3 - 30.0).collect();
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let exact: Vec<f64> = logits.iter().map(|&x| f64::from(x - max).exp()).collect();
            assert!((exp_sum(&logits, max) / exact.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{len}");

            let mut weights = logits.clone();
            to_weights(&mut weights, max, 0.5);
            for (&weight, exact) in weights.iter().zip(&exact) {
                assert!((f64::from(weight) - exact * exact).abs() <= 1e-6 * exact * exact + 1e-37, "{len}: {weight}");
            }
            let above: f64 = weights.iter().filter(|&&weight| weight >= 0.01).map(|&weight| f64::from(weight)).sum();
            assert!((sum_from(&weights, 0.01) - above).abs() < 1e-9, "{len}");
        }
    }

    #[test]
    fn odd_logits_have_safe_weights() {
        let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::MIN, 0.0];
        assert_eq!(exp_sum(&odd, f32::MAX), 1.0);
        for temperature in [1e-40, 1.0, f32::MAX] {
            let mut weights = odd;
            to_weights(&mut weights, f32::MAX, temperature);
            assert_eq!((weights[0], weights[1], weights[2]), (0.0, 0.0, 1.0));
            assert!(weights.iter().all(|weight| (0.0..=1.0).contains(weight)), "{weights:?}");
        }
        assert_eq!(finite(-0.0).to_bits(), 0);
    }
}
