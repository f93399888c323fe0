//! Prepares images: decodes them and scales them to the size that the tower reads.

use super::{
    config::ImageLimits,
    decode::{self, ImageHeader},
    image::Image,
    resize::{MAX_RATIO, resize_bytes, target_size},
};
use crate::error::ImageError;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Maximum number of bytes of cached pixels. Later requests of a conversation send the same images again.
pub const RECENT_BYTES: usize = 16 << 20;

/// Prepares the images of a model. Shared by all threads.
#[derive(Debug)]
pub struct ImageProcessor {
    limits: ImageLimits,
    /// The token id that is the placeholder for each token of an image.
    pub image_token: u32,
    /// Cached images, least recently used first.
    recent: Mutex<Vec<Arc<Image>>>,
}

impl ImageProcessor {
    /// Maximum size of an encoded image in bytes.
    pub const MAX_ENCODED_BYTES: usize = decode::MAX_ENCODED_BYTES;

    pub fn new(limits: ImageLimits, image_token: u32) -> Self {
        Self { limits, image_token, recent: Mutex::default() }
    }

    /// Maximum number of tokens of one image.
    pub fn max_tokens(&self) -> usize {
        self.limits.max_tokens()
    }

    /// Maximum number of bytes that [`ImageProcessor::working_bytes`] itself needs for this image. Returns at once.
    pub fn header_bytes(encoded: &[u8]) -> usize {
        ImageHeader::reading_bytes(encoded)
    }

    /// Maximum number of bytes that [`ImageProcessor::prepare`] needs for this image. Reads the header and the metadata.
    pub fn working_bytes(&self, encoded: &[u8]) -> Result<usize, ImageError> {
        let ImageHeader { height, width, decoding_bytes } = ImageHeader::read(encoded)?;
        let target = target_size(height, width, &self.limits);
        let scaling =
            target.map_or(0, |(high, wide)| resize_bytes([height, width].map(|side| side as usize), [high, wide]));
        Ok(decoding_bytes.max(scaling))
    }

    /// Decodes an image and scales it to at most `max_tokens` tokens.
    pub fn prepare(&self, encoded: &[u8], max_tokens: Option<usize>) -> Result<Arc<Image>, ImageError> {
        let limits = max_tokens.map_or(self.limits, |max| self.limits.with_max_tokens(max));
        let pixels = [limits.min_pixels, limits.max_pixels].map(u64::to_le_bytes).concat();
        let hash: [u8; 32] = Sha256::new_with_prefix(encoded).chain_update(pixels).finalize().into();
        if let Some(known) = self.recent(&hash) {
            return Ok(known);
        }
        let decoded = decode::decode(encoded)?;
        let width = decoded.width as u32;
        let height = decoded.height as u32;
        let ratio = ImageError::Ratio { width, height, max: MAX_RATIO };
        let (height, width) = target_size(height, width, &limits).ok_or(ratio)?;
        let pixels = decoded.resized(height, width);
        let image = Arc::new(Image { hash, height: height / limits.factor, width: width / limits.factor, pixels });
        self.remember(image.clone());
        Ok(image)
    }

    /// Drops the cached images.
    pub fn forget(&self) {
        self.recent.lock().clear();
    }

    fn recent(&self, hash: &[u8; 32]) -> Option<Arc<Image>> {
        let mut recent = self.recent.lock();
        let index = recent.iter().position(|image| image.hash == *hash)?;
        let image = recent.remove(index);
        recent.push(image.clone());
        Some(image)
    }

    fn remember(&self, image: Arc<Image>) {
        let mut recent = self.recent.lock();
        recent.push(image);
        let mut bytes: usize = recent.iter().map(|image| image.pixels.data.len()).sum();
        while bytes > RECENT_BYTES {
            bytes -= recent.remove(0).pixels.data.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision");

    fn processor() -> ImageProcessor {
        let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
        ImageProcessor::new(limits, 1003)
    }

    #[test]
    fn prepared_images_have_transformers_sizes() {
        let processor = processor();
        for (name, height, width) in [("gradient.png", 2, 3), ("shapes.png", 2, 6), ("noise.jpg", 2, 5)] {
            let encoded = std::fs::read(format!("{FIXTURE}/images/{name}")).unwrap();
            let image = processor.prepare(&encoded, None).unwrap();
            assert_eq!((image.height, image.width), (height, width), "{name}");
            assert!(Arc::ptr_eq(&image, &processor.prepare(&encoded, None).unwrap()), "{name} is remembered");
            let small = processor.prepare(&encoded, Some(4)).unwrap();
            assert!(small.tokens() <= 4 && small.hash != image.hash, "{name}: {}", small.tokens());
        }
    }
}
