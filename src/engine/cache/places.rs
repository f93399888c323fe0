//! Places for checkpoints in a prompt: those at which another prompt is likely to depart from it.

use super::super::{Boundary, Departure};

/// Distances from the end at which a long prompt gets checkpoints for edits of what came earlier: this, twice this, four
/// times this, ... (tokens).
const STRIDE: usize = 1024;
/// No two checkpoints for edits lie closer (tokens).
const APART: usize = 512;

/// The reason for a checkpoint; the more it is worth, the earlier it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The end of the last message, in front of the opening of the answer: the next turn departs here if the template
    /// or the client writes the answer differently; a retry does.
    Message,
    /// The end of the last question: templates that drop earlier reasoning depart here at the next question.
    Query,
    /// The end of the system prompt and the tools: other conversations depart here.
    System,
    /// The end of an answer.
    Answer,
    /// Somewhere in a long prompt.
    Between,
}

impl Kind {
    /// The likelihood of a departure here, relative to the end of any message.
    pub fn weight(self) -> f64 {
        match self {
            Kind::Message => 1.0,
            Kind::Query => 2.0,
            Kind::System => 4.0,
            Kind::Answer => 0.5,
            Kind::Between => 0.25,
        }
    }
}

/// Places in `from + 1..len` of a prompt of `len` tokens, ascending; at most `most`.
pub fn choose(boundaries: &[Boundary], from: usize, len: usize, most: usize) -> Vec<(usize, Kind)> {
    let within = |at: usize| from < at && at < len;
    let ends = || boundaries.iter().filter(|boundary| within(boundary.at));
    let mut chosen: Vec<(usize, Kind)> = Vec::new();
    // A prompt of which nothing is known is perhaps asked again: all but the token whose logits are wanted.
    let last = boundaries.iter().map(|boundary| boundary.at).filter(|&at| at < len).max().unwrap_or(len - 1);
    let query = ends().rev().find(|boundary| boundary.departure == Departure::Query);
    let system = ends().find(|boundary| boundary.departure == Departure::System);
    for (at, kind) in [
        (Some(last), Kind::Message),
        (query.map(|boundary| boundary.at), Kind::Query),
        (system.map(|boundary| boundary.at), Kind::System),
    ] {
        chosen
            .extend(at.filter(|&at| within(at) && !chosen.iter().any(|&(other, _)| other == at)).map(|at| (at, kind)));
    }
    let mut distance = STRIDE;
    while distance < last.saturating_sub(from) {
        let wanted = last - distance;
        let end = ends().map(|boundary| boundary.at).filter(|&at| at <= wanted && at + distance / 2 > wanted).max();
        let at = end.unwrap_or(wanted);
        if within(at) && at - from >= APART && chosen.iter().all(|&(other, _)| other.abs_diff(at) >= APART) {
            chosen.push((at, Kind::Between));
        }
        distance *= 2;
    }
    chosen.truncate(most);
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boundaries(ends: &[(usize, Departure)]) -> Vec<Boundary> {
        ends.iter().map(|&(at, departure)| Boundary { at, departure }).collect()
    }

    #[test]
    fn a_tool_loop_keeps_its_system_prompt_its_question_and_its_end() {
        let ends = boundaries(&[
            (300, Departure::System),
            (340, Departure::Query),
            (400, Departure::Message),
            (700, Departure::Message),
        ]);
        let all = [(300, Kind::System), (340, Kind::Query), (700, Kind::Message)];
        assert_eq!(choose(&ends, 0, 705, 8), all);
        // The most useful places come first.
        assert_eq!(choose(&ends, 0, 705, 2), all[1..]);
        assert_eq!(choose(&ends, 0, 705, 1), all[2..]);
        // Places that are known already are not taken again.
        assert_eq!(choose(&ends, 340, 705, 8), all[2..]);
        assert_eq!(choose(&ends, 700, 705, 8), []);
    }

    #[test]
    fn a_plain_prompt_may_be_asked_again() {
        assert_eq!(choose(&[], 0, 10, 8), [(9, Kind::Message)]);
        assert_eq!(choose(&[], 0, 1, 8), []);
        assert_eq!(choose(&[], 9, 10, 8), []);
    }

    #[test]
    fn a_long_prompt_is_marked_ever_more_thinly() {
        let places = choose(&[], 0, 20_001, 16);
        let at: Vec<usize> = places.iter().map(|place| place.0).collect();
        assert_eq!(at, [20_000 - 16_384, 20_000 - 8192, 20_000 - 4096, 20_000 - 2048, 20_000 - 1024, 20_000]);
        // At the ends of messages where there are any near.
        let ends =
            boundaries(&[(9000, Departure::Message), (18_900, Departure::Message), (20_000, Departure::Message)]);
        let at: Vec<usize> = choose(&ends, 0, 20_005, 16).iter().map(|place| place.0).collect();
        assert_eq!(at, [3616, 9000, 15_904, 17_952, 18_900, 20_000]);
    }
}
