//! Stop strings: cuts streamed text at the first stop string.

/// Searches streamed text for stop strings.
///
/// The first match is the stop string that is complete first. If several stop strings are complete at the same byte,
/// the longest counts. Only text that may still become a stop string is held back. Each byte costs one step per stop
/// string (Knuth, Morris and Pratt), independent of the lengths of the stop strings.
pub struct StopStrings {
    patterns: Vec<StopPattern>,
    held: String,
    /// The stop string that was found.
    found: Option<String>,
}

/// Text that can be sent, because it cannot be part of a stop string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleasedText {
    pub text: String,
    /// True if a stop string was found. `text` then ends before the stop string, and no more text follows.
    pub stopped: bool,
}

struct StopPattern {
    bytes: Vec<u8>,
    /// `borders[i]` is the length of the longest proper prefix of `bytes[..=i]` that is also a suffix of `bytes[..=i]`.
    borders: Vec<usize>,
    /// Length in bytes of the longest prefix of the pattern with which the text so far ends.
    matched: usize,
}

impl StopStrings {
    /// Creates a search for `strings`. Empty strings are ignored.
    pub fn new(strings: Vec<String>) -> Self {
        let patterns = strings.into_iter().filter(|s| !s.is_empty()).map(StopPattern::new).collect();
        Self { patterns, held: String::new(), found: None }
    }

    /// Takes the next piece of text and returns the text that can be sent.
    pub fn push(&mut self, text: &str) -> ReleasedText {
        if self.found.is_some() {
            return ReleasedText { text: String::new(), stopped: true };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let longest = self.patterns.iter_mut().filter_map(|p| p.step(byte).then_some(p.bytes.len())).max();
            if let Some(length) = longest {
                let mut text = std::mem::take(&mut self.held);
                let end = before + i + 1;
                self.found = text.get(end - length..end).map(str::to_owned);
                text.truncate(end - length);
                return ReleasedText { text, stopped: true };
            }
        }
        // A partial match starts with the first byte of a stop string, so the cut is between characters.
        let keep = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        ReleasedText { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The stop string that ended the text.
    pub fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }

    /// Ends the text. Returns the text that was held back because it could have become a stop string.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl StopPattern {
    fn new(string: String) -> Self {
        let bytes = string.into_bytes();
        let mut pattern = Self { borders: vec![0; bytes.len()], bytes, matched: 0 };
        for i in 1..pattern.bytes.len() {
            pattern.step(pattern.bytes[i]);
            pattern.borders[i] = pattern.matched;
        }
        pattern.matched = 0;
        pattern
    }

    /// Takes one byte of the text. Returns true if this byte completes the pattern.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stop = StopStrings::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = Vec::new();
        let mut stopped = false;
        for piece in pieces {
            let released = stop.push(piece);
            out.push(released.text);
            stopped = released.stopped;
        }
        out.push(stop.finish());
        (out, stopped)
    }

    #[test]
    fn only_possible_stop_strings_are_held_back() {
        assert_eq!(run(&["END"], &["a E", "N", "x"]), (vec!["a ".into(), "".into(), "ENx".into(), "".into()], false));
        assert_eq!(run(&["END"], &["a E", "ND b", "c"]), (vec!["a ".into(), "".into(), "".into(), "".into()], true));
        assert_eq!(run(&["END"], &["a EN"]), (vec!["a ".into(), "EN".into()], false));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0.concat(), "a");
        assert_eq!(run(&["→"], &["é", "→"]), (vec!["é".into(), "".into(), "".into()], true));
    }

    #[test]
    fn found_stop_string_is_reported() {
        let mut stop = StopStrings::new(vec!["x→".into(), "→".into(), "b".into()]);
        stop.push("a x");
        assert_eq!(stop.found(), None);
        stop.push("→ b");
        assert_eq!(stop.found(), Some("x→"));
    }

    #[test]
    fn first_complete_string_wins() {
        assert_eq!(run(&["abcd", "bc"], &["abcd"]).0.concat(), "a");
        assert_eq!(run(&["bc", "abc"], &["xabc"]).0.concat(), "x");
        assert_eq!(run(&["", "b"], &["ab"]).0.concat(), "a");
        assert_eq!(run(&[], &["ab"]).0.concat(), "ab");
    }

    /// Reference implementation without streaming.
    fn cut_at_first(stops: &[String], text: &str) -> (String, bool) {
        let ends = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at)));
        match ends.min() {
            Some((_, start)) => (text[..start].into(), true),
            None => (text.into(), false),
        }
    }

    proptest! {
        #[test]
        fn pieces_stop_at_the_same_place(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..8),
        ) {
            let mut stop = StopStrings::new(stops.clone());
            let mut text = String::new();
            let mut stopped = false;
            for piece in &pieces {
                let released = stop.push(piece);
                text += &released.text;
                stopped = released.stopped;
            }
            text += &stop.finish();
            prop_assert_eq!((text, stopped), cut_at_first(&stops, &pieces.concat()));
        }
    }
}
