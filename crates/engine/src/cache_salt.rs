//! [`CacheSalt`] separates cached prompts: prompts with different salts share no cached state.
//!
//! The salt is a part of a prompt's keys ([`CachedPrompt::keys`]), so it separates prompts in memory and on disk.

use moestro_model::model::{PlacedImage, prefix_keys};
use sha2::{Digest, Sha256};
use std::borrow::Cow;

/// Number of keys at the start of a prompt that together contain the salt's hash, 31 bits in each key. A shorter prefix
/// contains only a part of the hash.
const SALTED_KEYS: usize = 8;
/// The bits of a key that the salt changes: all except the highest bit, which distinguishes images from tokens.
const SALTED_BITS: u32 = u32::MAX >> 1;

/// The hash of a request's `cache_salt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSalt([u32; SALTED_KEYS]);

impl CacheSalt {
    pub fn new(salt: &str) -> Self {
        let digest: [u8; 4 * SALTED_KEYS] = Sha256::digest(salt).into();
        let words = digest.as_chunks::<4>().0;
        Self(std::array::from_fn(|index| u32::from_le_bytes(words[index]) & SALTED_BITS))
    }
}

/// A prompt as the prompt cache identifies it: tokens, images and salt.
#[derive(Debug, Clone, Copy, Default)]
pub struct CachedPrompt<'a> {
    pub ids: &'a [u32],
    pub images: &'a [PlacedImage],
    pub salt: Option<CacheSalt>,
}

impl<'a> CachedPrompt<'a> {
    /// The keys of the prompt, one number per token. Prompts that start with the same keys share cached state.
    pub fn keys(self) -> Cow<'a, [u32]> {
        let mut keys = prefix_keys(self.ids, self.images);
        if let Some(CacheSalt(words)) = self.salt {
            // XOR is invertible, so with the same salt different tokens have different keys.
            keys.to_mut().iter_mut().zip(words).for_each(|(key, word)| *key ^= word);
        }
        keys
    }

    /// True if the first `len` keys contain the whole hash of the salt, and the whole hash of every image that these
    /// keys include.
    pub fn has_whole_keys(&self, len: usize) -> bool {
        let ends_in_image = self.images.iter().any(|image| image.at < len && len < image.tokens().end);
        !ends_in_image && (self.salt.is_none() || len >= SALTED_KEYS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_model::model::Image;
    use std::sync::Arc;

    fn keys(ids: &[u32], salt: Option<&str>) -> Vec<u32> {
        CachedPrompt { ids, images: &[], salt: salt.map(CacheSalt::new) }.keys().into_owned()
    }

    #[test]
    fn first_keys_differ_between_salts() {
        let ids: Vec<u32> = (0..12).collect();
        assert_eq!(keys(&ids, None), ids);
        let salted = [keys(&ids, Some("a")), keys(&ids, Some("b")), ids.clone()];
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let one = &salted[one];
            let other = &salted[other];
            assert!(one.iter().zip(other).take(8).all(|(a, b)| a != b), "{one:?} {other:?}");
            assert_eq!(one[8..], other[8..]);
        }
        assert_eq!(salted[0], keys(&ids, Some("a")));
        // A key does not depend on later tokens.
        assert_eq!(salted[0][..5], keys(&ids[..5], Some("a")));
    }

    #[test]
    fn salted_keys_keep_images_apart() {
        let image = Image { hash: [1; 32], height: 1, width: 3, ..Image::default() };
        let images = [PlacedImage { at: 1, image: Arc::new(image) }];
        let prompt = CachedPrompt { ids: &[7; 9], images: &images, salt: Some(CacheSalt::new("a")) };
        let keys = prompt.keys();
        let is_image: Vec<bool> = keys.iter().map(|key| *key > SALTED_BITS).collect();
        assert_eq!(is_image, [false, true, true, true, false, false, false, false, false]);
        let unsalted = CachedPrompt { salt: None, ..prompt };
        assert!(keys.iter().zip(unsalted.keys().iter()).take(8).all(|(a, b)| a != b), "{keys:?}");
        assert_eq!([3, 4, 7, 8].map(|len| prompt.has_whole_keys(len)), [false, false, false, true]);
        assert_eq!([1, 3, 4].map(|len| unsalted.has_whole_keys(len)), [true, false, true]);
    }
}
