//! Positions of rows for RoPE. Up to the first image, the position of a row is its index. After the first image, the
//! two differ.
//!
//! A text token has one position on all three axes: time, height and width. All tokens of an image have the time at
//! which the image starts. The height and width of an image token count the image's rows and columns, from that time
//! on. The next text token comes after the larger of height and width:
//!
//! ```text
//! text        (next, next, next)              next += 1
//! image h x w (s, s + row, s + column)        s = next before it; next = s + max(h, w)
//! ```
//! The causal mask and the KV cache use the index, not the position.

use super::vision::PlacedImage;

/// Time, height and width.
pub type Position = [usize; 3];

/// The positions of the rows from `index` on. Within an image, `next` is where the image starts.
#[derive(Debug, Clone, Copy)]
pub struct RowPositions<'a> {
    pub next: usize,
    index: usize,
    /// All images of the sequence, in order.
    images: &'a [PlacedImage],
}

impl<'a> RowPositions<'a> {
    /// `next` is the position that a text token at `index` would have. `images` may also contain images before `index`.
    pub fn new(next: usize, index: usize, images: &'a [PlacedImage]) -> Self {
        Self { next, index, images }
    }

    /// The value of `next` after `rows` more rows.
    pub fn next_after(mut self, rows: usize) -> usize {
        self.by_ref().take(rows).for_each(drop);
        self.next
    }
}

impl Iterator for RowPositions<'_> {
    type Item = Position;

    fn next(&mut self) -> Option<Position> {
        let index = self.index;
        let next = self.next;
        self.index += 1;
        while let [first, rest @ ..] = self.images
            && first.tokens().end <= index
        {
            self.images = rest;
        }
        let Some(placed) = self.images.first().filter(|placed| placed.at <= index) else {
            self.next += 1;
            return Some([next; 3]);
        };
        let token = index - placed.at;
        let width = placed.image.width;
        if token + 1 == placed.image.tokens() {
            self.next += placed.image.height.max(width);
        }
        Some([next, next + token / width, next + token % width])
    }
}

/// The axis of RoPE frequency `j`: 0 for time, 1 for height, 2 for width. `sections` has the number of frequencies of
/// each axis.
pub fn axis(j: usize, sections: &[usize; 3]) -> usize {
    let axis = j % 3;
    if j < 3 * sections[axis] { axis } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::vision::Image;
    use std::sync::Arc;

    fn placed(at: usize, height: usize, width: usize) -> PlacedImage {
        PlacedImage { at, image: Arc::new(Image { height, width, ..Image::default() }) }
    }

    #[test]
    fn image_advances_by_its_longer_side() {
        let images = [placed(16, 2, 3), placed(55, 2, 5)];
        let all: Vec<Position> = RowPositions::new(0, 0, &images).take(75).collect();
        assert_eq!(all[15], [15; 3]);
        let first = [[16, 16, 16], [16, 16, 17], [16, 16, 18], [16, 17, 16], [16, 17, 17], [16, 17, 18]];
        assert_eq!(all[16..22], first);
        assert_eq!((all[22], all[54]), ([19; 3], [51; 3]));
        assert_eq!((all[59], all[60], all[64]), ([52, 52, 56], [52, 53, 52], [52, 53, 56]));
        assert_eq!((all[65], all[74]), ([57; 3], [66; 3]));
        // The positions can continue from `next` at any row, also inside an image.
        for cut in 0..75 {
            let next = RowPositions::new(0, 0, &images).next_after(cut);
            let rest: Vec<Position> = RowPositions::new(next, cut, &images).take(75 - cut).collect();
            assert_eq!(rest, all[cut..], "{cut}");
        }
    }

    #[test]
    fn frequencies_take_turns_between_axes() {
        let axes: Vec<usize> = (0..32).map(|j| axis(j, &[11, 11, 10])).collect();
        for (j, found) in axes.iter().enumerate() {
            let expected = if j % 3 == 1 && j < 33 {
                1
            } else if j % 3 == 2 && j < 30 {
                2
            } else {
                0
            };
            assert_eq!(*found, expected, "{j}");
        }
        assert_eq!((0..4).map(|j| axis(j, &[4, 0, 0])).collect::<Vec<_>>(), [0; 4]);
    }
}
