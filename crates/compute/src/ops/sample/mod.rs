//! The next token, chosen on the device.

mod cpu;
mod gpu;

use crate::device::{BufferAccess, Region};

/// Number of values that one threadgroup of a GPU compares.
pub(super) const BLOCK: usize = 4096;

/// How to choose a token. The steps are those of the engine's `Sampler`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenChoice {
    /// Number of likeliest tokens to choose from. 1 chooses the likeliest token.
    pub top_k: usize,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    /// The random number, from 0 to below 1.
    pub share: f32,
}

impl TokenChoice {
    /// The largest `top_k`.
    pub const MAX_TOP_K: usize = 64;

    /// The token with the largest logit.
    pub const LIKELIEST: Self = Self { top_k: 1, temperature: 1.0, top_p: 1.0, min_p: 0.0, share: 0.0 };
}

/// `id` = a token chosen from `logits`. Of equal logits, the one with the lower id counts as larger. NaN and negative
/// infinity are never chosen. If there is no other logit, the id is [`u32::MAX`].
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub choice: TokenChoice,
    pub count: usize,
    /// `[count]` f32.
    pub logits: Region,
    /// [`Sample::scratch_words`] words.
    pub scratch: Region,
    /// One u32.
    pub id: Region,
}

impl Sample {
    /// Number of words of `scratch`. `None` if a GPU cannot choose from so many logits.
    pub fn scratch_words(choice: &TokenChoice, count: usize) -> Option<usize> {
        let candidates = choice.top_k * count.div_ceil(BLOCK);
        let is_possible = (1..=TokenChoice::MAX_TOP_K).contains(&choice.top_k) && candidates <= BLOCK;
        is_possible.then_some(2 * (candidates + choice.top_k))
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        see(self.logits.floats(self.count), BufferAccess::Read);
        see(self.scratch, BufferAccess::Write);
        see(self.id.floats(1), BufferAccess::Write);
    }
}
