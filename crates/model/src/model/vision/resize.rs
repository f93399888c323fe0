//! Computes the target size of an image and scales it. The result is bit for bit that of Pillow 12.2 and 12.3 with 8 bits
//! and `BICUBIC`.
//!
//! There are two passes, along rows and along columns. Each pass rounds to 8 bits. The kernel is Keys' cubic with
//! a = -0.5, stretched when the image shrinks. Weights are fixed-point numbers with 22 fractional bits.
//!
//! Pillow's versions differ in the order of the passes. Before 12.2, rows are always first. Since 13, the sizes decide for
//! each image.

use super::config::{CHANNELS, ImageLimits};

/// The largest ratio of the sides.
pub const MAX_RATIO: u32 = 200;
/// The ratio of height to width above which columns are scaled before rows, if the height shrinks.
const TALL_RATIO: usize = 100;
/// Maximum number of bytes of the weights and sums of a pass.
const WEIGHT_BYTES: usize = 4 << 20;
/// Number of bits after the binary point of a weight.
const FRACTION: u32 = 22;

/// An image in 8-bit RGB, row by row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RgbImage {
    pub width: usize,
    pub height: usize,
    /// `[height, width, 3]`.
    pub data: Vec<u8>,
}

/// Returns height and width after scaling. Both are multiples of the factor, and the image has at most
/// [`ImageLimits::max_tokens`] tokens. Their ratio is nearly that of the image, unless the image would then be less than
/// one token high or wide. `None` if one side is more than [`MAX_RATIO`] times the other.
///
/// The sizes are those of transformers, except where those exceed the limit: for images that are thinner than one token,
/// and for a lower limit that is close to the upper limit.
pub fn target_size(height: u32, width: u32, limits: &ImageLimits) -> Option<(usize, usize)> {
    let longer = height.max(width);
    let shorter = height.min(width);
    if shorter == 0 || u64::from(longer) > u64::from(shorter) * u64::from(MAX_RATIO) {
        return None;
    }
    let h = f64::from(height);
    let w = f64::from(width);
    let factor = limits.factor as f64;
    let min = limits.min_pixels as f64;
    let max = limits.max_pixels as f64;
    let tokens = |scale: &dyn Fn(f64) -> f64| [h, w].map(scale);
    let pixels = |[high, wide]: [f64; 2]| high * factor * (wide * factor);
    let mut sides = tokens(&|side| (side / factor).round_ties_even());
    if pixels(sides) < min {
        let grow = (min / (h * w)).sqrt();
        sides = tokens(&|side| (side * grow / factor).ceil());
    }
    if pixels(sides) > max {
        let shrink = (h * w / max).sqrt();
        sides = tokens(&|side| (side / shrink / factor).floor());
    }
    let [high, wide] = sides.map(|side| (side as usize).max(1));
    // The other side of an image that is one token high or wide may have at most the limit.
    let most = limits.max_tokens();
    let (high, wide) = (high.min((most / wide).max(1)), wide.min((most / high).max(1)));
    Some((high * limits.factor, wide * limits.factor))
}

/// Maximum number of bytes that scaling an image needs, with the image itself. Sizes are height and width.
pub fn resize_bytes(from: [usize; 2], to: [usize; 2]) -> usize {
    // The image after the first pass.
    let between = (from[0] * to[1]).max(to[0] * from[1]);
    CHANNELS * (from[0] * from[1] + between + to[0] * to[1]) + WEIGHT_BYTES
}

impl RgbImage {
    /// Scales the image. Skips a pass if its dimension does not change.
    pub fn resized(self, height: usize, width: usize) -> Self {
        let is_tall = self.height > self.width * TALL_RATIO && height < self.height;
        let image = if is_tall { self.resized_columns(height) } else { self };
        let image = if image.width == width { image } else { image.resized_rows(width) };
        if image.height == height { image } else { image.resized_columns(height) }
    }

    fn resized_rows(&self, width: usize) -> Self {
        let taps = Taps::new(self.width, width);
        let mut data = vec![0; self.height * width * CHANNELS];
        for (from, to) in self.data.chunks_exact(self.width * CHANNELS).zip(data.chunks_exact_mut(width * CHANNELS)) {
            for (pixel, (first, weights)) in to.as_chunks_mut::<CHANNELS>().0.iter_mut().zip(taps.iter()) {
                let mut sums = [1 << (FRACTION - 1); CHANNELS];
                for (near, weight) in from.as_chunks::<CHANNELS>().0[first..].iter().zip(weights) {
                    sums.iter_mut().zip(near).for_each(|(sum, value)| *sum += i32::from(*value) * weight);
                }
                *pixel = sums.map(to_byte);
            }
        }
        Self { width, height: self.height, data }
    }

    fn resized_columns(&self, height: usize) -> Self {
        let taps = Taps::new(self.height, height);
        let row = self.width * CHANNELS;
        let mut data = vec![0; height * row];
        let mut sums = vec![0i32; row];
        for (to, (first, weights)) in data.chunks_exact_mut(row).zip(taps.iter()) {
            sums.fill(1 << (FRACTION - 1));
            for (near, weight) in self.data[first * row..].chunks_exact(row).zip(weights) {
                sums.iter_mut().zip(near).for_each(|(sum, value)| *sum += i32::from(*value) * weight);
            }
            to.iter_mut().zip(&sums).for_each(|(byte, sum)| *byte = to_byte(*sum));
        }
        Self { width: self.width, height, data }
    }
}

fn to_byte(sum: i32) -> u8 {
    (sum >> FRACTION).clamp(0, 255) as u8
}

/// For each output value, the index of the first input value, and the weights of the input values from that index on.
struct Taps {
    first: Vec<usize>,
    /// For each output value, the end of its weights in `weights`.
    ends: Vec<usize>,
    weights: Vec<i32>,
}

impl Taps {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let mut taps = Self { first: Vec::with_capacity(to), ends: Vec::with_capacity(to), weights: Vec::new() };
        for output in 0..to {
            let center = (output as f64 + 0.5) * scale;
            // `as` rounds toward zero and clamps negative numbers to zero.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            let weight = |input: usize| cubic((input as f64 - center + 0.5) * (1.0 / stretch));
            let weights: Vec<f64> = (first..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let fixed = |weight: &f64| {
                let share = if sum == 0.0 { *weight } else { weight / sum };
                (share * f64::from(1 << FRACTION) + 0.5f64.copysign(share)) as i32
            };
            taps.weights.extend(weights.iter().map(fixed));
            taps.first.push(first);
            taps.ends.push(taps.weights.len());
        }
        taps
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        let weights = starts.zip(&self.ends).map(|(start, end)| &self.weights[start..*end]);
        self.first.iter().copied().zip(weights)
    }
}

/// Keys' cubic kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision");

    fn limits(min_pixels: u64, max_pixels: u64) -> ImageLimits {
        ImageLimits { min_pixels, max_pixels, factor: 32, mean: [0.5; 3], std: [0.5; 3] }
    }

    #[test]
    fn target_sizes_match_transformers() {
        let refs: serde_json::Value =
            serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/refs.json")).unwrap()).unwrap();
        let cases = refs["smart_resize"].as_array().unwrap();
        assert_eq!(cases.len(), 180);
        let mut thin = 0;
        for case in cases {
            let n: Vec<u64> = case.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
            let found = target_size(n[0] as u32, n[1] as u32, &limits(n[2], n[3]));
            if n[4] * n[5] > n[3] {
                // The size in transformers exceeds the limit, because one side is a single token.
                assert!(n[4].min(n[5]) == 32, "{case}");
                thin += 1;
                continue;
            }
            assert_eq!(found, Some((n[4] as usize, n[5] as usize)), "{case}");
        }
        assert!(thin < 20, "{thin}");
    }

    #[test]
    fn targets_never_exceed_the_token_limit() {
        // Sides around powers of two and around multiples of the factor, with all ratios.
        let sides: Vec<u32> = (0..14).flat_map(|n| [1 << n, (1 << n) + 1, 3 << n, (1u32 << n) * 25 / 4 + 7]).collect();
        let mut thin = 0;
        for tokens in [1, 2, 3, 7, 63, 64, 65, 113, 199, 200, 225, 256, 1024, 65_536] {
            for min in [0, 1024, 65_536, u64::MAX] {
                let limits = limits(min, 16_777_216).with_max_tokens(tokens);
                let pairs = sides.iter().flat_map(|high| sides.iter().map(move |wide| (*high, *wide)));
                let ratios =
                    (1..=200).flat_map(|ratio| [(1, ratio), (ratio * 31, 31), (32, ratio * 32), (9, ratio * 9)]);
                for (height, width) in pairs.chain(ratios) {
                    let Some((high, wide)) = target_size(height, width, &limits) else { continue };
                    assert!(high > 0 && wide > 0 && high % 32 == 0 && wide % 32 == 0, "{height} x {width}");
                    let found = high / 32 * (wide / 32);
                    assert!(found <= limits.max_tokens().min(tokens), "{height} x {width}, {limits:?}: {found}");
                    thin += usize::from(found == tokens && high.min(wide) == 32 && tokens > 1);
                }
            }
        }
        assert!(thin > 100, "{thin} thin images reach their limit");
    }

    #[test]
    fn extreme_ratios_have_no_target_size() {
        let limits = limits(65_536, 16_777_216);
        assert!(target_size(200, 1, &limits).is_some() && target_size(1, 200, &limits).is_some());
        assert!(target_size(201, 1, &limits).is_none() && target_size(65_535, 300, &limits).is_none());
        assert!(target_size(0, 0, &limits).is_none() && target_size(0, 5, &limits).is_none());
    }

    #[test]
    fn resize_matches_pillow_bit_for_bit() {
        let file = std::fs::read(format!("{FIXTURE}/resize_vectors.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&file).unwrap();
        let image = |name: &str| {
            let tensor = file.tensor(name).unwrap();
            RgbImage { height: tensor.shape()[0], width: tensor.shape()[1], data: tensor.data().to_vec() }
        };
        let inputs: Vec<_> = file.names().into_iter().filter_map(|name| name.strip_suffix(".in")).collect();
        assert!(inputs.len() >= 9 && inputs.contains(&"tall"), "{inputs:?}");
        for name in inputs {
            let expected = image(&format!("{name}.out"));
            let found = image(&format!("{name}.in")).resized(expected.height, expected.width);
            assert!(found == expected, "{name}");
        }
    }
}
