//! The next tokens, chosen on the device.

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

/// `ids[row]` = a token chosen from a row of `logits`. Of equal logits, the one with the lower id counts as larger. NaN
/// and negative infinity are never chosen. If there is no other logit, the id is [`u32::MAX`].
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// For each of at most [`MAX_ROWS`] rows: its place in `logits`, and how to choose.
    pub rows: &'a [(usize, TokenChoice)],
    /// Number of logits of a row to choose from.
    pub count: usize,
    /// Number of logits from one place to the next.
    pub stride: usize,
    /// `[places, stride]` f32.
    pub logits: Region,
    /// [`Sample::scratch_words`] words.
    pub scratch: Region,
    /// `[rows]` u32.
    pub ids: Region,
}

/// Maximum number of rows.
pub(super) const MAX_ROWS: usize = 16;

impl Sample<'_> {
    /// Number of words of `scratch`. `None` if a GPU cannot choose from so many logits or rows.
    pub fn scratch_words(rows: &[(usize, TokenChoice)], count: usize) -> Option<usize> {
        let candidates = max_top_k(rows) * count.div_ceil(BLOCK);
        let is_possible = (1..=MAX_ROWS).contains(&rows.len())
            && rows.iter().all(|(_, choice)| (1..=TokenChoice::MAX_TOP_K).contains(&choice.top_k))
            && candidates <= BLOCK;
        is_possible.then_some(2 * rows.len() * (candidates + max_top_k(rows)))
    }

    /// The logits of a row.
    fn row(&self, place: usize) -> Region {
        self.logits.part(place * self.stride * 4, self.count * 4)
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        self.rows.iter().for_each(|(place, _)| see(self.row(*place), BufferAccess::Read));
        see(self.scratch, BufferAccess::Write);
        see(self.ids.floats(self.rows.len()), BufferAccess::Write);
    }
}

/// The largest `top_k` of the rows.
fn max_top_k(rows: &[(usize, TokenChoice)]) -> usize {
    rows.iter().map(|(_, choice)| choice.top_k).max().unwrap_or(0)
}
