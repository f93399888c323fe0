//! Prompt lookup: what followed the last few tokens when they occurred before. Drafting costs nothing, so only the verify
//! counts; it pays where an answer repeats its prompt, as edits of code and quotations do.

use super::{Draft, Kind, Outlook, Sequence};
use crate::{error::ModelError, model::Model};

/// The longest and the shortest run of tokens that is looked for.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// Keeps nothing: a backward search of 100,000 tokens takes a tenth of a millisecond, and only when a draft is wanted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lookup;

impl<M: Model> Draft<M> for Lookup {
    fn kind(&self) -> Kind {
        Kind::Lookup
    }

    fn propose(
        &mut self,
        _: &mut M,
        _: &mut M::State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        propose(sequence, most, out);
        let possible = out.iter().take_while(|id| outlook.admits(**id)).count();
        out.truncate(possible);
        Ok(())
    }
}

/// At most `most` tokens that followed the longest run that the sequence ends with and that it had before; of several
/// occurrences, the last.
fn propose(Sequence { seen, last }: Sequence<'_>, most: usize, out: &mut Vec<u32>) {
    let mut found = None;
    let mut longest = SHORTEST - 1;
    for (end, _) in seen.iter().enumerate().rev().filter(|(_, id)| **id == last) {
        // `seen[..end]` and `seen` end alike in so many tokens, `last` comes behind both.
        let alike = seen[..end].iter().rev().zip(seen.iter().rev()).take(LONGEST - 1).take_while(|(a, b)| a == b);
        let run = 1 + alike.count();
        if run > longest {
            (found, longest) = (Some(end + 1), run);
            if run == LONGEST {
                break;
            }
        }
    }
    let Some(place) = found else { return };
    // The tokens that followed may reach up to the present: then they repeat.
    let period = seen.len() + 1 - place;
    let at = |place: usize| seen.get(place).copied().unwrap_or(last);
    out.extend((0..most).map(|index| at(place + index % period)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proposed(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut out = Vec::new();
        if let Some((&last, seen)) = tokens.split_last() {
            propose(Sequence { seen, last }, most, &mut out);
        }
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
        fn it_is_the_longest_run_and_the_last(tokens in prop::collection::vec(0u32..4, 0..60)) {
            let runs = |length: usize| -> Option<usize> {
                let from = tokens.len().checked_sub(length)?;
                (0..from).rev().find(|&at| tokens[at..at + length] == tokens[from..]).map(|at| at + length)
            };
            let place = (SHORTEST..=LONGEST).rev().find_map(runs);
            let expected = place.map_or(Vec::new(), |place| tokens[place..].iter().copied().cycle().take(5).collect());
            prop_assert_eq!(proposed(&tokens, 5), expected);
        }
    }
}
