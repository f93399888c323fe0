//! [`HiddenHistory`] stores hidden rows of a sequence's last tokens until a draft needs them.

/// Hidden rows of consecutive positions. The last row belongs to the sequence's last token.
#[derive(Debug, Default)]
pub struct HiddenHistory {
    /// Number of floats per row.
    width: usize,
    /// Minimum number of latest rows to keep. The history keeps at most twice this number.
    capacity: usize,
    /// Position of the first row.
    first: usize,
    rows: Vec<f32>,
}

impl HiddenHistory {
    pub fn new(width: usize, capacity: usize) -> Self {
        Self { width, capacity, ..Self::default() }
    }

    pub fn clear(&mut self) {
        self.first = 0;
        self.rows = Vec::new();
    }

    /// Position of the first row.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Position after the last row.
    pub fn end(&self) -> usize {
        self.first + self.rows.len() / self.width
    }

    /// Appends the rows of the last tokens of a sequence that has `len` tokens. If these rows do not continue the
    /// history, drops all earlier rows.
    pub fn append(&mut self, len: usize, rows: &[f32]) {
        let at = len - rows.len() / self.width;
        if at != self.end() {
            self.rows.clear();
            self.first = at;
        }
        self.rows.extend_from_slice(rows);
        let kept = self.end() - self.first;
        if kept > 2 * self.capacity {
            self.rows.drain(..(kept - self.capacity) * self.width);
            self.first += kept - self.capacity;
        }
    }

    /// The rows from `position` to the end. `position` must be at least [`HiddenHistory::first`].
    pub fn since(&self, position: usize) -> &[f32] {
        self.rows.get((position - self.first) * self.width..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(positions: std::ops::Range<usize>) -> Vec<f32> {
        positions.flat_map(|position| [position as f32, -(position as f32)]).collect()
    }

    #[test]
    fn history_keeps_latest_consecutive_rows() {
        let mut history = HiddenHistory::new(2, 4);
        history.append(3, &rows(0..3));
        history.append(8, &rows(3..8));
        assert_eq!((history.first(), history.end(), history.since(1)), (0, 8, &rows(1..8)[..]));
        history.append(9, &rows(8..9));
        assert_eq!((history.first(), history.end(), history.since(7)), (5, 9, &rows(7..9)[..]));
        // A chunk of a prompt provides only its last rows.
        history.append(20, &rows(18..20));
        assert_eq!((history.first(), history.end(), history.since(18)), (18, 20, &rows(18..20)[..]));
        history.clear();
        history.append(2, &rows(0..2));
        assert_eq!((history.first(), history.since(2)), (0, &[][..]));
    }
}
