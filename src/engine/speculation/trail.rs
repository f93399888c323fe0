//! The hidden rows of a sequence's last tokens, kept until a draft wants them: so a draft costs next to nothing as long as
//! nobody speculates.

/// Rows of `width` floats; the last of them is of the sequence's last token.
#[derive(Debug, Default)]
pub struct Trail {
    width: usize,
    /// At least so many are kept, if there were so many; at most twice as many.
    most: usize,
    first: usize,
    rows: Vec<f32>,
}

impl Trail {
    pub fn new(width: usize, most: usize) -> Self {
        Self { width, most, ..Self::default() }
    }

    pub fn clear(&mut self) {
        (self.first, self.rows) = (0, Vec::new());
    }

    /// The rows are of the positions from here on.
    pub fn first(&self) -> usize {
        self.first
    }

    /// And up to here.
    pub fn end(&self) -> usize {
        self.first + self.rows.len() / self.width
    }

    /// A sequence that is now `len` tokens long left `rows`. What is in front of a gap is forgotten.
    pub fn follow(&mut self, len: usize, rows: &[f32]) {
        let at = len - rows.len() / self.width;
        if at != self.end() {
            self.rows.clear();
            self.first = at;
        }
        self.rows.extend_from_slice(rows);
        let kept = self.end() - self.first;
        if kept > 2 * self.most {
            self.rows.drain(..(kept - self.most) * self.width);
            self.first += kept - self.most;
        }
    }

    /// The rows from a position on, which is at least [`Trail::first`].
    pub fn since(&self, position: usize) -> &[f32] {
        self.rows.get((position - self.first) * self.width..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(places: std::ops::Range<usize>) -> Vec<f32> {
        places.flat_map(|place| [place as f32, -(place as f32)]).collect()
    }

    #[test]
    fn it_keeps_the_last_rows_without_a_gap() {
        let mut trail = Trail::new(2, 4);
        trail.follow(3, &rows(0..3));
        trail.follow(8, &rows(3..8));
        assert_eq!((trail.first(), trail.end(), trail.since(1)), (0, 8, &rows(1..8)[..]));
        trail.follow(9, &rows(8..9));
        assert_eq!((trail.first(), trail.end(), trail.since(7)), (5, 9, &rows(7..9)[..]));
        // A chunk of a prompt leaves its last rows only.
        trail.follow(20, &rows(18..20));
        assert_eq!((trail.first(), trail.end(), trail.since(18)), (18, 20, &rows(18..20)[..]));
        trail.clear();
        trail.follow(2, &rows(0..2));
        assert_eq!((trail.first(), trail.since(2)), (0, &[][..]));
    }
}
