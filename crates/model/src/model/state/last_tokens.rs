//! The last tokens of a sequence, for n-gram hashes.

/// The tokens of a sequence from position `base` on.
#[derive(Debug, Default)]
pub struct LastTokens {
    /// Position of the first token.
    base: usize,
    ids: Vec<u32>,
}

impl LastTokens {
    /// Stores `ids` as the tokens directly before position `len`.
    pub fn ending_at(len: usize, ids: Vec<u32>) -> Self {
        Self { base: len.saturating_sub(ids.len()), ids }
    }

    /// Replaces all tokens from position `at` on by `ids`.
    pub fn write(&mut self, at: usize, ids: &[u32]) {
        self.ids.truncate(at.saturating_sub(self.base));
        self.ids.extend(ids);
    }

    /// Returns up to `count` tokens before position `len`.
    pub fn before(&self, len: usize, count: usize) -> &[u32] {
        let end = len.saturating_sub(self.base).min(self.ids.len());
        &self.ids[end.saturating_sub(count)..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_tokens_are_overwritten() {
        let mut history = LastTokens::default();
        history.write(0, &[1, 2, 3, 4]);
        history.write(2, &[5]);
        assert_eq!(
            (history.before(3, 2), history.before(1, 2), history.before(0, 2)),
            (&[2, 5][..], &[1][..], &[][..])
        );
        let mut restored = LastTokens::ending_at(3, history.before(3, 2).to_vec());
        restored.write(3, &[6]);
        assert_eq!((restored.before(4, 2), restored.before(3, 2)), (&[5, 6][..], &[2, 5][..]));
    }
}
