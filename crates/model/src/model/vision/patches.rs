//! Cuts a scaled image into the rows that the tower reads. All rows of the tower are in *block order*: the patches of a
//! block, which becomes one token, are consecutive.

use super::{
    config::{CHANNELS, ImageLimits, VisionConfig},
    resize::RgbImage,
};

/// `(row, column)` of every patch of a grid, in block order.
pub fn block_order(rows: usize, columns: usize, merge: usize) -> Vec<(usize, usize)> {
    let blocks = (0..rows / merge).flat_map(|row| (0..columns / merge).map(move |column| (row, column)));
    let within = move |(row, column): (usize, usize)| {
        (0..merge * merge).map(move |patch| (row * merge + patch / merge, column * merge + patch % merge))
    };
    blocks.flat_map(within).collect()
}

/// The normalised patches `[patches, channels * frames * patch * patch]`. All frames of a patch are the same still
/// image.
pub fn patches(image: &RgbImage, config: &VisionConfig, limits: &ImageLimits) -> Vec<f32> {
    let patch = config.patch;
    let table = normalised(limits);
    let order = block_order(image.height / patch, image.width / patch, config.merge);
    let mut out = Vec::with_capacity(order.len() * config.patch_values());
    for (row, column) in order {
        for (channel, table) in table.iter().enumerate() {
            let start = out.len();
            for y in 0..patch {
                let at = ((row * patch + y) * image.width + column * patch) * CHANNELS + channel;
                let pixels = image.data[at..].iter().step_by(CHANNELS).take(patch);
                out.extend(pixels.map(|value| table[usize::from(*value)]));
            }
            let frame = start..out.len();
            for _ in 1..config.frames {
                out.extend_from_within(frame.clone());
            }
        }
    }
    out
}

/// `(value / 255 - mean) / std` for each channel and value.
fn normalised(limits: &ImageLimits) -> [[f32; 256]; CHANNELS] {
    std::array::from_fn(|channel| {
        let mean = limits.mean[channel];
        let std = limits.std[channel];
        std::array::from_fn(|value| ((value as f64 * (1.0 / 255.0)) as f32 - mean) / std)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision");

    #[test]
    fn patches_match_transformers_bit_for_bit() {
        let dir = format!("{FIXTURE}/hf_bf16");
        let json = serde_json::from_slice(&std::fs::read(format!("{dir}/config.json")).unwrap()).unwrap();
        let config = VisionConfig::new(&json, 128).unwrap();
        let limits = ImageLimits::read(Path::new(&dir), &config).unwrap();
        let stages = std::fs::read(format!("{FIXTURE}/images.safetensors")).unwrap();
        let stages = safetensors::SafeTensors::deserialize(&stages).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let words = stages.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
            words.into_iter().map(f32::from_le_bytes).collect()
        };
        let table = floats("pixel_lut");
        for name in ["gradient", "shapes", "noise"] {
            let rgb = stages.tensor(&format!("{name}.rgb")).unwrap();
            let image = RgbImage { height: rgb.shape()[0], width: rgb.shape()[1], data: rgb.data().to_vec() };
            let (height, width) =
                super::super::resize::target_size(image.height as u32, image.width as u32, &limits).unwrap();
            let image = image.resized(height, width);
            assert!(image.data == stages.tensor(&format!("{name}.resized")).unwrap().data(), "{name} is scaled");
            let expected: Vec<f32> = stages
                .tensor(&format!("{name}.patches"))
                .unwrap()
                .data()
                .iter()
                .map(|v| table[usize::from(*v)])
                .collect();
            assert!(patches(&image, &config, &limits) == expected, "{name}");
            if name == "gradient" {
                assert!(expected == floats("gradient.pixel_values"));
            }
        }
    }

    #[test]
    fn blocks_follow_each_other() {
        let order = block_order(2, 4, 2);
        assert_eq!(order, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
    }
}
