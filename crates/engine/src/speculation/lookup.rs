//! Prompt-lookup drafts: propose the tokens that followed an earlier occurrence of the last few tokens.
//!
//! Finding a draft takes almost no time. Only verifying the draft takes time. Prompt-lookup drafts save time if an
//! answer repeats parts of its prompt, as code edits and quotations do.

use super::draft::{Draft, DraftKind, DraftRequest, TokenHistory};
use moestro_model::{error::ModelError, model::Model};

/// Maximum number of last tokens to search for.
const MAX_RUN: usize = 4;
/// Minimum number of last tokens to search for.
const MIN_RUN: usize = 2;

/// A prompt-lookup draft. No index is needed, since a backward search of 100,000 tokens takes only 0.1 ms.
#[derive(Debug, Clone, Copy, Default)]
pub struct LookupDraft;

impl<M: Model> Draft<M> for LookupDraft {
    fn kind(&self) -> DraftKind {
        DraftKind::Lookup
    }

    fn propose(&mut self, _: &mut M, _: &mut M::State, request: DraftRequest<'_>) -> Result<(), ModelError> {
        let DraftRequest { history, max, mut sampler, out } = request;
        find_continuation(history, max, out);
        let possible = out.iter().take_while(|id| sampler.admits(**id)).count();
        out.truncate(possible);
        Ok(())
    }
}

/// Searches for the longest run of tokens that ends `history` and also occurs earlier. Appends at most `max` of the
/// tokens that followed the earlier occurrence. If the run occurs several times, uses the latest occurrence.
fn find_continuation(TokenHistory { evaluated, last }: TokenHistory<'_>, max: usize, out: &mut Vec<u32>) {
    let mut found = None;
    let mut longest = MIN_RUN - 1;
    for (end, _) in evaluated.iter().enumerate().rev().filter(|(_, id)| **id == last) {
        // Compare the tokens before this occurrence of `last` with the tokens before the end of the history.
        let pairs = evaluated[..end].iter().rev().zip(evaluated.iter().rev());
        let run = 1 + pairs.take(MAX_RUN - 1).take_while(|(a, b)| a == b).count();
        if run > longest {
            found = Some(end + 1);
            longest = run;
            if run == MAX_RUN {
                break;
            }
        }
    }
    let Some(start) = found else { return };
    // If fewer than `max` tokens followed the run, the draft repeats these tokens.
    let period = evaluated.len() + 1 - start;
    let token = |position: usize| evaluated.get(position).copied().unwrap_or(last);
    out.extend((0..max).map(|index| token(start + index % period)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proposed(tokens: &[u32], max: usize) -> Vec<u32> {
        let mut out = Vec::new();
        if let Some((&last, evaluated)) = tokens.split_last() {
            find_continuation(TokenHistory { evaluated, last }, max, &mut out);
        }
        out
    }

    #[test]
    fn lookup_proposes_what_followed_before() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 6, 2, 3], 3), [4, 5, 6]);
        // The longer run wins, then the later occurrence.
        assert_eq!(proposed(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(proposed(&[2, 3, 7, 2, 3, 8, 2, 3], 1), [8]);
        assert!(proposed(&[1, 2, 3, 4], 4).is_empty());
        assert!(proposed(&[1], 4).is_empty() && proposed(&[], 4).is_empty());
    }

    #[test]
    fn lookup_repeats_a_short_continuation() {
        assert_eq!(proposed(&[5, 6, 5, 6, 5, 6], 4), [5, 6, 5, 6]);
        assert_eq!(proposed(&[7, 7, 7], 3), [7, 7, 7]);
    }

    proptest! {
        #[test]
        fn lookup_finds_longest_latest_run(tokens in prop::collection::vec(0u32..4, 0..60)) {
            let runs = |length: usize| -> Option<usize> {
                let from = tokens.len().checked_sub(length)?;
                (0..from).rev().find(|&at| tokens[at..at + length] == tokens[from..]).map(|at| at + length)
            };
            let start = (MIN_RUN..=MAX_RUN).rev().find_map(runs);
            let expected = start.map_or(Vec::new(), |start| tokens[start..].iter().copied().cycle().take(5).collect());
            prop_assert_eq!(proposed(&tokens, 5), expected);
        }
    }
}
