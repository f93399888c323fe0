//! Activation functions, computed in place. The vision tower does not use Candle's functions, because they are scalar
//! code and Candle's GELU runs on one thread.

use super::simd::{
    float,
    math::{exp, sigmoid},
    wide,
};

wide! {
    /// The tanh form of GELU: `x * (1 + tanh(u)) / 2`, which is `x * sigmoid(2 u)`.
    pub fn gelu(x: &mut [f32]) {
        /// `2 * sqrt(2 / pi)`.
        const SCALE: f32 = 1.595_769;
        for x in x {
            let cubic = (0.044_715 * *x).mul_add(*x, 1.0);
            *x *= sigmoid(SCALE * *x * cubic);
        }
    }
}

wide! {
    /// `softmax(scale * x)` of one row. `scale` must be positive.
    pub fn softmax(x: &mut [f32], scale: f32) {
        let (chunks, rest) = x.as_chunks::<16>();
        let mut lanes = [f32::NEG_INFINITY; 16];
        for chunk in chunks {
            for (max, x) in lanes.iter_mut().zip(chunk) {
                *max = if *x > *max { *x } else { *max };
            }
        }
        let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
        let (chunks, rest) = x.as_chunks_mut::<16>();
        let one = V::splat(1.0);
        let mut sum = V::splat(0.0);
        for chunk in chunks {
            for x in chunk.iter_mut() {
                *x = exp((*x - max) * scale);
            }
            sum = V::load(chunk).fma(one, sum);
        }
        for x in rest.iter_mut() {
            *x = exp((*x - max) * scale);
        }
        let share = 1.0 / V::load(&float::padded(rest)).fma(one, sum).sum();
        for x in x {
            *x *= share;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_matches_its_formula() {
        let inputs: Vec<f32> = (-2000..2000).map(|x| x as f32 / 100.0).chain([0.0, -1e20, 1e20]).collect();
        let mut found = inputs.clone();
        gelu(&mut found);
        for (x, found) in inputs.into_iter().map(f64::from).zip(found.into_iter().map(f64::from)) {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let expected = 0.5 * x * (1.0 + u.tanh());
            assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1.0), "gelu({x}) = {found}, not {expected}");
        }
    }

    #[test]
    fn softmax_matches_its_formula() {
        for len in [1, 15, 16, 17, 1000] {
            let inputs: Vec<f32> = (0..len).map(|i| ((i * 37) % 101) as f32 * 3.0 - 400.0).collect();
            let mut found = inputs.clone();
            softmax(&mut found, 0.25);
            let max = inputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f64> = inputs.iter().map(|x| (f64::from(x - max) * 0.25).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (found, weight) in found.iter().zip(weights) {
                assert!((f64::from(*found) - weight / sum).abs() < 1e-6, "{len}: {found}, not {}", weight / sum);
            }
        }
    }
}
