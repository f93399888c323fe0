//! An image and its position in a prompt.
//!
//! Images of one size have the same placeholder ids, so ids alone do not identify a prompt. [`prefix_keys`] replaces
//! the ids of an image's tokens by numbers from its content hash. The prompt cache compares these numbers and stores
//! them, in memory and on disk.

use super::resize::RgbImage;
use sha2::{Digest, Sha256};
use std::{borrow::Cow, ops::Range, sync::Arc};

/// The lowest key of an image token. Token ids are smaller.
const FIRST_KEY: u32 = 1 << 31;

/// An image, ready for the vision tower.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Hash of the encoded bytes and of the size limits. The hash and the tower's weights determine the rows of the
    /// image.
    pub hash: [u8; 32],
    /// Number of rows of tokens.
    pub height: usize,
    /// Number of columns of tokens.
    pub width: usize,
    /// The pixels, scaled to the size that the tower reads.
    pub pixels: RgbImage,
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        (self.hash, self.height, self.width) == (other.hash, other.height, other.width)
    }
}

/// An image, and the index of its first token in the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedImage {
    pub at: usize,
    pub image: Arc<Image>,
}

impl Image {
    pub fn tokens(&self) -> usize {
        self.height * self.width
    }
}

impl PlacedImage {
    /// The indices of the image's tokens in the prompt.
    pub fn tokens(&self) -> Range<usize> {
        self.at..self.at + self.image.tokens()
    }

    /// The image without the memory of its pixels, for comparisons and cache keys.
    pub fn without_pixels(&self) -> Self {
        Self { at: self.at, image: Arc::new(Image { pixels: RgbImage::default(), ..*self.image }) }
    }
}

/// Repeats each `placeholder` in `ids` once for each token of its image. `None` if there are more or fewer placeholders
/// than images.
pub fn place_images(ids: Vec<u32>, images: &[Arc<Image>], placeholder: u32) -> Option<(Vec<u32>, Vec<PlacedImage>)> {
    if ids.iter().filter(|id| **id == placeholder).count() != images.len() {
        return None;
    }
    let mut expanded = Vec::with_capacity(ids.len());
    let mut placed = Vec::with_capacity(images.len());
    let mut images = images.iter();
    for id in ids {
        match (id == placeholder).then(|| images.next()).flatten() {
            Some(image) => {
                let at = expanded.len();
                expanded.resize(at + image.tokens(), placeholder);
                placed.push(PlacedImage { at, image: image.clone() });
            }
            None => expanded.push(id),
        }
    }
    Some((expanded, placed))
}

/// Replaces the tokens of `images` in `ids` by numbers that identify each image. Eight tokens contain the whole hash.
pub fn prefix_keys<'a>(ids: &'a [u32], images: &[PlacedImage]) -> Cow<'a, [u32]> {
    if images.is_empty() {
        return Cow::Borrowed(ids);
    }
    let mut keys = ids.to_vec();
    for placed in images {
        let PlacedImage { at, image } = placed;
        let size = [image.height as u64, image.width as u64].map(u64::to_le_bytes).concat();
        let digest = Sha256::new_with_prefix(image.hash).chain_update(size).finalize();
        let words = digest.as_chunks::<4>().0.iter().map(|word| FIRST_KEY | u32::from_le_bytes(*word));
        let end = placed.tokens().end.min(keys.len());
        let tokens = keys.get_mut(*at..end).unwrap_or_default();
        tokens.iter_mut().zip(words.cycle()).for_each(|(key, word)| *key = word);
    }
    Cow::Owned(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(at: usize, hash: u8, height: usize, width: usize) -> PlacedImage {
        PlacedImage { at, image: Arc::new(Image { hash: [hash; 32], height, width, ..Image::default() }) }
    }

    #[test]
    fn placeholders_are_expanded_in_order() {
        let images = [placed(0, 1, 1, 2), placed(0, 2, 2, 2)].map(|placed| placed.image);
        let (ids, placed) = place_images(vec![5, 9, 6, 9, 7], &images, 9).unwrap();
        assert_eq!(ids, [5, 9, 9, 6, 9, 9, 9, 9, 7]);
        assert_eq!(placed.iter().map(PlacedImage::tokens).collect::<Vec<_>>(), [1..3, 4..8]);
        for ids in [vec![5, 9], vec![9, 9, 9], vec![5]] {
            assert!(place_images(ids, &images, 9).is_none());
        }
    }

    #[test]
    fn prefix_keys_identify_each_image() {
        let ids = [5, 6, 9, 9, 9, 9, 9, 9, 7];
        let keys = |images: &[PlacedImage]| prefix_keys(&ids, images).into_owned();
        assert_eq!(keys(&[]), ids);
        let one = keys(&[placed(2, 1, 2, 3)]);
        assert_eq!((&one[..2], one[8]), (&ids[..2], 7));
        assert!(one[2..8].iter().all(|key| *key >= FIRST_KEY), "{one:?}");
        assert_eq!(one, keys(&[placed(2, 1, 2, 3)]));
        for other in [placed(2, 2, 2, 3), placed(2, 1, 3, 2)] {
            let other = keys(&[other]);
            assert!(one[2..8].iter().zip(&other[2..8]).all(|(a, b)| a != b), "{one:?} {other:?}");
        }
        // An image whose last tokens are cut off keeps the keys of its other tokens.
        assert_eq!(prefix_keys(&ids[..4], &[placed(2, 1, 2, 3)])[..], one[..4]);
    }
}
