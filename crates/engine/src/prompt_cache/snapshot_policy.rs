//! Chooses the positions of a prompt at which to take snapshots: positions where another prompt is likely to diverge.

use crate::request::{Boundary, BoundaryKind};

/// Long prompts get additional snapshots at 1, 2, 4, ... times this number of tokens before the end. Such a snapshot is
/// used if the client edits an earlier message.
const STRIDE: usize = 1024;
/// Minimum number of tokens between two of the additional snapshots.
const MIN_GAP: usize = 512;

/// The kind of position at which a snapshot was taken. If not all snapshots of a prompt fit, they are taken in this
/// order of kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SnapshotKind {
    /// The end of the last message, before the answer. A retry diverges at this position. The next turn also diverges
    /// here if the template or the client formats the answer differently.
    Message,
    /// The end of the last question. Templates that drop earlier reasoning diverge here at the next question.
    Query,
    /// The end of the system prompt and the tools. Other conversations diverge here.
    System,
    /// The end of an answer.
    Answer,
    /// A position within a long prompt.
    Between,
}

impl SnapshotKind {
    /// Estimated likelihood that a later prompt diverges here, relative to [`SnapshotKind::Message`].
    pub fn weight(self) -> f64 {
        match self {
            SnapshotKind::Message => 1.0,
            SnapshotKind::Query => 2.0,
            SnapshotKind::System => 4.0,
            SnapshotKind::Answer => 0.5,
            SnapshotKind::Between => 0.25,
        }
    }
}

/// Chooses at most `max` positions in `from + 1..len` of a prompt of `len` tokens, ascending.
pub fn choose(boundaries: &[Boundary], from: usize, len: usize, max: usize) -> Vec<(usize, SnapshotKind)> {
    let within = |at: usize| from < at && at < len;
    let ends = || boundaries.iter().filter(|boundary| within(boundary.at));
    let mut chosen: Vec<(usize, SnapshotKind)> = Vec::new();
    // A prompt without boundaries gets a snapshot before its last token, for a repetition of the request. The last
    // token itself must be evaluated again to get its logits.
    let last = boundaries.iter().map(|boundary| boundary.at).filter(|&at| at < len).max().unwrap_or(len - 1);
    let query = ends().rev().find(|boundary| boundary.kind == BoundaryKind::Query);
    let system = ends().find(|boundary| boundary.kind == BoundaryKind::System);
    for (at, kind) in [
        (Some(last), SnapshotKind::Message),
        (query.map(|boundary| boundary.at), SnapshotKind::Query),
        (system.map(|boundary| boundary.at), SnapshotKind::System),
    ] {
        chosen
            .extend(at.filter(|&at| within(at) && !chosen.iter().any(|&(other, _)| other == at)).map(|at| (at, kind)));
    }
    let mut distance = STRIDE;
    while distance < last.saturating_sub(from) {
        let target = last - distance;
        let end = ends().map(|boundary| boundary.at).filter(|&at| at <= target && at + distance / 2 > target).max();
        let at = end.unwrap_or(target);
        if within(at) && at - from >= MIN_GAP && chosen.iter().all(|&(other, _)| other.abs_diff(at) >= MIN_GAP) {
            chosen.push((at, SnapshotKind::Between));
        }
        distance *= 2;
    }
    chosen.truncate(max);
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boundaries(ends: &[(usize, BoundaryKind)]) -> Vec<Boundary> {
        ends.iter().map(|&(at, kind)| Boundary { at, kind }).collect()
    }

    #[test]
    fn tool_loop_gets_system_query_and_end() {
        let ends = boundaries(&[
            (300, BoundaryKind::System),
            (340, BoundaryKind::Query),
            (400, BoundaryKind::Message),
            (700, BoundaryKind::Message),
        ]);
        let all = [(300, SnapshotKind::System), (340, SnapshotKind::Query), (700, SnapshotKind::Message)];
        assert_eq!(choose(&ends, 0, 705, 8), all);
        // If not all positions fit, the most useful ones are kept.
        assert_eq!(choose(&ends, 0, 705, 2), all[1..]);
        assert_eq!(choose(&ends, 0, 705, 1), all[2..]);
        // Positions up to `from` already have a snapshot.
        assert_eq!(choose(&ends, 340, 705, 8), all[2..]);
        assert_eq!(choose(&ends, 700, 705, 8), []);
    }

    #[test]
    fn plain_prompt_gets_its_end() {
        assert_eq!(choose(&[], 0, 10, 8), [(9, SnapshotKind::Message)]);
        assert_eq!(choose(&[], 0, 1, 8), []);
        assert_eq!(choose(&[], 9, 10, 8), []);
    }

    #[test]
    fn long_prompt_gets_exponential_distances() {
        let positions = choose(&[], 0, 20_001, 16);
        let at: Vec<usize> = positions.iter().map(|position| position.0).collect();
        assert_eq!(at, [20_000 - 16_384, 20_000 - 8192, 20_000 - 4096, 20_000 - 2048, 20_000 - 1024, 20_000]);
        // Nearby ends of messages are preferred.
        let ends = boundaries(&[
            (9000, BoundaryKind::Message),
            (18_900, BoundaryKind::Message),
            (20_000, BoundaryKind::Message),
        ]);
        let at: Vec<usize> = choose(&ends, 0, 20_005, 16).iter().map(|position| position.0).collect();
        assert_eq!(at, [3616, 9000, 15_904, 17_952, 18_900, 20_000]);
    }
}
