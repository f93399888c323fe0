//! The fit of a draft to its model. A draft that reads other layers than it was trained on, multiplies by other norms, or
//! was made for another model does no harm, since every token is verified; but it is of no use, and a user should know.

/// Cycles that are judged together.
const CYCLES: u32 = 12;
/// So many of them at least must have had a right token. A draft that fits has half of its first tokens right and more, also
/// at a high temperature, since it draws with the same random numbers: that one in 300 such drafts has fewer is bad luck.
const LEAST: u32 = 2;

/// Counts how often a draft's first token was right.
#[derive(Debug, Default)]
pub struct Fit {
    cycles: u32,
    right: u32,
    said: bool,
}

impl Fit {
    /// A cycle accepted so many tokens; whether it turns out now that the draft does not fit. That is said once.
    pub fn fails(&mut self, accepted: usize) -> bool {
        self.cycles += 1;
        self.right += u32::from(accepted > 0);
        if self.cycles < CYCLES {
            return false;
        }
        let fails = self.right < LEAST && !self.said;
        *self = Self { said: self.said || fails, ..Self::default() };
        fails
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cycles at which it was said.
    fn said(accepted: impl Fn(u32) -> usize) -> Vec<u32> {
        let mut fit = Fit::default();
        (0..200).filter(|cycle| fit.fails(accepted(*cycle))).collect()
    }

    #[test]
    fn what_is_hardly_ever_right_is_said_once() {
        assert_eq!(said(|_| 0), [11]);
        assert_eq!(said(|cycle| usize::from(cycle % 12 == 0)), [11]);
        assert!(said(|cycle| usize::from(cycle % 3 == 0)).is_empty());
        // A draft that has been right for long and is so no more.
        assert_eq!(said(|cycle| usize::from(cycle < 100)), [119]);
    }
}
