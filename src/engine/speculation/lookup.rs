//! Prompt lookup: what followed the last few tokens when they occurred before. Drafting costs nothing, so only the verify
//! counts; it pays where an answer repeats its prompt, as edits of code and quotations do.

use std::collections::HashMap;

/// The longest and the shortest run of tokens that is looked for.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// Tokens so far, and where each run of them last ended.
#[derive(Debug, Default)]
pub struct Lookup {
    tokens: Vec<u32>,
    /// By length less [`SHORTEST`]: from a run to the place behind its last occurrence but the present one.
    ends: [HashMap<[u32; LONGEST], u32>; LONGEST - SHORTEST + 1],
}

impl Lookup {
    /// Begins a sequence.
    pub fn start(&mut self, prompt: &[u32]) {
        // What a prompt shares with the last one need not be entered again.
        let shared = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        if shared < self.tokens.len() {
            self.tokens.clear();
            self.ends.iter_mut().for_each(HashMap::clear);
        }
        for &id in &prompt[self.tokens.len()..] {
            self.push(id);
        }
    }

    /// The sequence goes on.
    pub fn push(&mut self, id: u32) {
        // The runs that end here are entered when the next token is known: until then they would find themselves.
        let place = self.tokens.len();
        for length in SHORTEST..=LONGEST {
            if let Some(run) = self.run(length) {
                self.ends[length - SHORTEST].insert(run, place as u32);
            }
        }
        self.tokens.push(id);
    }

    /// The last `length` tokens, padded.
    fn run(&self, length: usize) -> Option<[u32; LONGEST]> {
        let from = self.tokens.len().checked_sub(length)?;
        let mut run = [u32::MAX; LONGEST];
        run[..length].copy_from_slice(&self.tokens[from..]);
        Some(run)
    }

    /// At most `most` tokens that followed the longest run that the sequence ends with and that it had before.
    pub fn propose(&self, most: usize, out: &mut Vec<u32>) {
        out.clear();
        let found = (SHORTEST..=LONGEST).rev().find_map(|length| {
            let run = self.run(length)?;
            self.ends[length - SHORTEST].get(&run).map(|&place| place as usize)
        });
        let Some(place) = found else { return };
        // What followed may reach up to the present: then it goes round.
        let period = self.tokens.len() - place;
        out.extend((0..most).map(|index| self.tokens[place + index % period]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proposed(tokens: &[u32], most: usize) -> Vec<u32> {
        let (mut lookup, mut out) = (Lookup::default(), Vec::new());
        lookup.start(tokens);
        lookup.propose(most, &mut out);
        out
    }

    #[test]
    fn what_followed_before_is_proposed() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 6, 2, 3], 3), [4, 5, 6]);
        // The longer run counts, and of several occurrences the last.
        assert_eq!(proposed(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(proposed(&[2, 3, 7, 2, 3, 8, 2, 3], 1), [8]);
        assert!(proposed(&[1, 2, 3, 4], 4).is_empty());
        assert!(proposed(&[1], 4).is_empty() && proposed(&[], 4).is_empty());
    }

    #[test]
    fn a_repetition_goes_round() {
        assert_eq!(proposed(&[5, 6, 5, 6, 5, 6], 4), [5, 6, 5, 6]);
        assert_eq!(proposed(&[7, 7, 7], 3), [7, 7, 7]);
    }

    proptest! {
        #[test]
        fn pushing_is_starting_with_more(tokens in prop::collection::vec(0u32..4, 0..60), cut in 0usize..60) {
            let cut = cut.min(tokens.len());
            let (mut grown, mut out) = (Lookup::default(), Vec::new());
            grown.start(&tokens[..cut]);
            for &id in &tokens[cut..] {
                grown.push(id);
            }
            grown.propose(5, &mut out);
            prop_assert_eq!(&out, &proposed(&tokens, 5));
            // Another prompt on the same table forgets the first.
            grown.start(&[9, 1, 9, 1]);
            grown.propose(2, &mut out);
            prop_assert_eq!(&out, &[9, 1]);
        }
    }
}
