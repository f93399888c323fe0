//! Fuzzes the decoders of images and the scaling after them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_model::model::{ImageLimits, ImageProcessor};

fuzz_target!(|data: &[u8]| {
    let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
    if let Ok(image) = ImageProcessor::new(limits, 0).prepare(data, None) {
        assert!(image.tokens() <= 64);
        assert_eq!(image.pixels.data.len(), image.tokens() * 32 * 32 * 3);
    }
});
